"""Similarity inside chunks on GPUs, as a Triton body.

A program holds a block of a chunk's even places and walks its odd places; lengths, products and comparisons of a block stay in
registers. Two neighbouring places are one row of twice the width, so that even and odd places are columns of it and no key is
copied.
"""

import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from ..dispatch import triton
from ..nearest import Nearest
from ..nearest.gpu import block_within, load_rows, products, store_rows
from ..tuning import tuned
from .ranking import MOST, NONE, inverse_length, rank, unrank


def refuses(keys: Array, dim: int) -> str | None:
    """Why this body does not serve a case, or None if it does."""
    chunk, width = keys.shape[-2:]
    if reason := triton():
        return reason
    if dim & (dim - 1) or not 16 <= dim <= 256:
        return f"head dim {dim} is not a power of two from 16 to 256"
    if width % dim:
        return f"rows of {width} channels are not whole multiples of head dim {dim}"
    if keys.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"keys are {keys.dtype}"
    if chunk % 2:
        return f"a chunk of {chunk} places is not made of pairs"
    if chunk // 2 > MOST:
        return f"a chunk of {chunk} places is longer than {2 * MOST}"
    return None


def chunk_similarity(
    keys: Float[Array, "*B C W"],
    live: Bool[Array, "*B C"],
    dim: int,
    *,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> Nearest:
    """Best edges of every chunk; see the public function.

    Args:
        dim: channels that are the key.
        sizes: `rows` of even places a program holds, `columns` of odd ones it compares them with at a time, its `warps` and
            `stages`, instead of the tuned ones.
    """
    *batch, chunk, width = keys.shape
    chunks, half = math.prod(batch), chunk // 2
    sizes = sizes or _sizes(chunks, half, dim, keys.dtype)
    rows, columns = sizes["rows"], sizes["columns"]
    pairs = keys.reshape(chunks, half, 2 * width)
    even, odd = (live[..., i::2].reshape(chunks, half).astype(jnp.int32) for i in (0, 1))
    places = pl.BlockSpec((None, half), lambda g, i: (g, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas import triton as backend

        best = pl.pallas_call(
            functools.partial(_body, rows=rows, columns=columns),
            grid=(chunks, pl.cdiv(half, rows)),
            in_specs=[
                pl.BlockSpec((None, half, dim), lambda g, i: (g, 0, 0)),
                pl.BlockSpec((None, half, dim), lambda g, i: (g, 0, width // dim)),
                places,
                places,
            ],
            out_specs=places,
            out_shape=jax.ShapeDtypeStruct((chunks, half), jnp.int32),
            compiler_params=backend.CompilerParams(num_warps=sizes["warps"], num_stages=sizes["stages"]),
            interpret=interpret,
            name="chunk_similarity",
        )(pairs, pairs, even, odd)
    return unrank(best.reshape(*batch, half))


def _sizes(chunks: int, half: int, dim: int, dtype: Any) -> dict[str, int]:
    """Block sizes: large enough that loading keys is a small part of the work, and small enough for the registers."""
    wide = jnp.dtype(dtype).itemsize * dim > 256
    default = {
        "rows": min(128 if wide else 256, block_within(half)),
        "columns": min(64, block_within(half)),
        "warps": 8 if half >= 128 else 4,
        "stages": 2 if wide else 3,
    }
    case = {"chunks": chunks, "half": half, "head_dim": dim, "dtype": jnp.dtype(dtype).name}
    return tuned("chunk_similarity", case, default)


def _body(
    even_ref: Any, odd_ref: Any, even_live_ref: Any, odd_live_ref: Any, best_ref: Any, *, rows: int, columns: int
) -> None:
    half = even_ref.shape[0]
    first = pl.program_id(1) * rows
    alive = load_rows(even_live_ref, first, rows, half) != 0
    some = jnp.max(alive.astype(jnp.int32)) != 0

    @pl.when(some)
    def _search() -> None:
        even = load_rows(even_ref, first, rows, half)
        inverse = inverse_length(even)[:, None]

        def compare(j: Array, best: Array) -> Array:
            start = j * columns
            odd = load_rows(odd_ref, start, columns, half)
            target = start + jnp.arange(columns, dtype=jnp.int32)[None]
            ranks = rank(products(even, odd), inverse, inverse_length(odd)[None], target)
            odd_alive = load_rows(odd_live_ref, start, columns, half)[None] != 0
            return jnp.maximum(best, jnp.max(jnp.where(odd_alive, ranks, NONE), axis=1))

        best = jax.lax.fori_loop(0, pl.cdiv(half, columns), compare, jnp.full((rows,), NONE, jnp.int32))
        store_rows(best_ref, first, jnp.where(alive, best, NONE), half)

    # As in a cache that is nearly empty: keys are not even read.
    @pl.when(~some)
    def _nothing() -> None:
        store_rows(best_ref, first, jnp.full((rows,), NONE, jnp.int32), half)
