"""Triton kernel of `chunk_similarity`: for each even slot of a chunk, find the odd slot with the most similar key.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must match `reference.py` up to
rounding.

Each program compares a block of a chunk's even slots with all odd slots of that chunk. Vector norms, inner products and
comparisons stay in registers. Keys are read directly from every second slot of the cache, without a copy.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ..kmeans import Nearest
from ..kmeans.nearest_pallas_triton import block_within, products, store_rows
from ..triton import backend, entry, triton_call, triton_unsupported
from ..tuning import tuned
from .ranking import MOST, NONE, inverse_length, rank, unrank


def unsupported_reason(keys: Array, first: Array, count: Array, chunk: int) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    dim = keys.shape[-1]
    if reason := triton_unsupported(dim=dim):
        return reason
    if keys.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"keys are {keys.dtype}"
    if chunk % 2:
        return f"a chunk of {chunk} slots is odd"
    if chunk // 2 > MOST:
        return f"a chunk of {chunk} slots is longer than {2 * MOST}"
    return None


def chunk_similarity(
    keys: Float[Array, "B K S H"],
    first: Int[Array, " B"],
    count: Int[Array, " B"],
    chunk: int,
    *,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> Nearest:
    """Return the best edge of each even slot, [B, K, N, A], with N = ⌈S / chunk⌉ and A = chunk / 2.

    See `api.chunk_similarity`.

    Args:
        sizes: `rows` (even slots per program), `columns` (odd slots compared at a time), `warps` and `stages`, instead
            of the tuned sizes.
    """
    batch, heads, slots, dim = keys.shape
    chunks, half = -(-slots // chunk), chunk // 2
    sizes = sizes or _sizes(batch * heads * chunks, half, dim, keys.dtype)
    rows, columns = sizes["rows"], sizes["columns"]
    sequence = pl.BlockSpec((1,), lambda h, n, i: (h // heads,))
    edges = pl.BlockSpec((None, None, half), lambda h, n, i: (h, n, 0))
    keys = keys.reshape(batch * heads, slots, dim)
    best = triton_call(
        functools.partial(_body, rows=rows, columns=columns),
        grid=(batch * heads, chunks, pl.cdiv(half, rows)),
        in_specs=[entry(keys), sequence, sequence],
        out_specs=edges,
        out_shape=jax.ShapeDtypeStruct((batch * heads, chunks, half), jnp.int32),
        warps=sizes["warps"],
        stages=sizes["stages"],
        interpret=interpret,
        name="chunk_similarity",
    )(keys, first, count)
    return unrank(best.reshape(batch, heads, chunks, half))


def _sizes(chunks: int, half: int, dim: int, dtype: Any) -> dict[str, int]:
    """Return block sizes: large enough that loading keys is a small part of the work, and small enough for the
    registers.
    """
    wide = jnp.dtype(dtype).itemsize * dim > 256
    default = {
        "rows": min(128 if wide else 256, block_within(half)),
        "columns": min(64, block_within(half)),
        "warps": 8 if half >= 128 else 4,
        "stages": 2 if wide else 3,
    }
    case = {"chunks": chunks, "half": half, "head_dim": dim, "dtype": jnp.dtype(dtype).name}
    return tuned("chunk_similarity", case, default)


def _body(keys_ref: Any, first_ref: Any, count_ref: Any, best_ref: Any, *, rows: int, columns: int) -> None:
    """Write the ranks of the best edges of `rows` even slots of one chunk of one head."""
    half, dim = best_ref.shape[0], keys_ref.shape[1]
    begin, start = pl.program_id(1) * 2 * half, pl.program_id(2) * rows
    # Number of keys from this chunk's start on, at most one chunk. It is zero or negative for an empty chunk.
    live = jnp.minimum(count_ref[0] - begin, 2 * half)
    first = first_ref[0] + begin

    def load(start: Any, size: int, odd: int) -> tuple[Array, Array, Array]:
        """Load keys at even or odd slots. Return them, their pairs' indices, and whether their slots contain keys."""
        pair = start + jnp.arange(size, dtype=jnp.int32)
        slot = 2 * pair + odd  # of this chunk
        inside = slot < live
        mask = jnp.broadcast_to(inside[:, None], (size, dim))
        at = (first + slot)[:, None], jnp.arange(dim, dtype=jnp.int32)[None]
        return backend.load(keys_ref.at[*at], mask=mask, other=jnp.zeros((), keys_ref.dtype)), pair, inside

    @pl.when(2 * start < live)
    def _search() -> None:
        even, _, alive = load(start, rows, 0)
        inverse = inverse_length(even)[:, None]

        def compare(j: Array, best: Array) -> Array:
            odd, target, odd_alive = load(j * columns, columns, 1)
            ranks = rank(products(even, odd), inverse, inverse_length(odd)[None], target[None])
            return jnp.maximum(best, jnp.max(jnp.where(odd_alive[None], ranks, NONE), axis=1))

        blocks = pl.cdiv(jnp.maximum(live, 0), 2 * columns)
        best = jax.lax.fori_loop(0, blocks, compare, jnp.full((rows,), NONE, jnp.int32))
        store_rows(best_ref, start, jnp.where(alive, best, NONE), half)

    # Without tokens, as in the rest of a nearly empty cache, no keys are read.
    @pl.when(2 * start >= live)
    def _nothing() -> None:
        store_rows(best_ref, start, jnp.full((rows,), NONE, jnp.int32), half)
