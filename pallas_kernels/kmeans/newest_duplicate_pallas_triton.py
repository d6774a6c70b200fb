"""Triton kernel of `newest_duplicate`: for each key, find the index of the newest other key that is nearly equal.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must equal those of `reference.py`,
except where rounding decides about a cosine.

A program has a block of keys and loops over all keys. Products, comparisons and the newest indices stay in registers.
Only the part with the block itself is compared place by place, so that no key is its own duplicate.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from ..triton import entry, triton_call, triton_unsupported
from ..tuning import tuned
from .nearest_pallas_triton import block_within, load_rows, products, store_rows
from .reference import inverse_lengths


def unsupported_reason(keys: Array, live: Array, *, threshold: float) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    if reason := triton_unsupported(dim=keys.shape[-1]):
        return reason
    if keys.dtype not in (jnp.bfloat16, jnp.float16):  # float32 matmuls are faster in XLA
        return f"keys are {keys.dtype}"
    return None


def newest_duplicate(
    keys: Float[Array, "B K T H"],
    live: Bool[Array, "B K T"],
    *,
    threshold: float,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> Int[Array, "B K T"]:
    """Find the indices of the newest duplicates; see the public function.

    Args:
        sizes: `rows` (keys per program), `columns` (keys compared at a time, a multiple of `rows`), `warps` and
            `stages`, instead of the tuned sizes.
    """
    batch, heads, count, dim = keys.shape
    sizes = sizes or _sizes(keys)
    inputs = [keys.reshape(-1, count, dim), inverse_lengths(keys, live).reshape(-1, count)]
    out = jax.ShapeDtypeStruct((batch * heads, count), jnp.int32)
    found = triton_call(
        functools.partial(_body, rows=sizes["rows"], columns=sizes["columns"], threshold=threshold),
        grid=(batch * heads, pl.cdiv(count, sizes["rows"])),
        in_specs=[*map(entry, inputs)],
        out_specs=entry(out),
        out_shape=out,
        warps=sizes["warps"],
        stages=sizes["stages"],
        interpret=interpret,
        name="newest_duplicate",
    )(*inputs)
    return found.reshape(batch, heads, count)


def _sizes(keys: Float[Array, "B K T H"]) -> dict[str, int]:
    """Return block sizes: large enough that loading keys is a small part of the work, and small enough for the
    registers.
    """
    batch, heads, count, dim = keys.shape
    default = {"rows": min(64, block_within(count)), "columns": min(64, block_within(count)), "warps": 4, "stages": 2}
    case = {"heads": batch * heads, "keys": count, "head_dim": dim, "dtype": keys.dtype.name}
    return tuned("newest_duplicate", case, default)


def _body(keys_ref: Any, inverse_ref: Any, newest_ref: Any, *, rows: int, columns: int, threshold: float) -> None:
    count = keys_ref.shape[0]
    first = pl.program_id(1) * rows
    own, place = first + jnp.arange(rows, dtype=jnp.int32), jnp.arange(columns, dtype=jnp.int32)
    keys = load_rows(keys_ref, first, rows, count)
    # A cosine above the threshold is a product with the other unit key above the threshold times the own length.
    least = threshold / load_rows(inverse_ref, first, rows, count)

    def compare(j: Array, newest: Int[Array, "R C"], itself: bool) -> Int[Array, "R C"]:
        start = j * columns
        other, inverse = (load_rows(ref, start, columns, count) for ref in (keys_ref, inverse_ref))
        similar = products(keys, other) * inverse[None] > least[:, None]
        if itself:
            similar &= own[:, None] != start + place[None]
        if count % columns:
            similar &= start + place[None] < count
        return jnp.where(similar, j, newest)

    # Each column keeps the newest part of the keys that has a duplicate in it. Columns are reduced once, at the end.
    newest, own_part = jnp.full((rows, columns), -1, jnp.int32), first // columns
    others = functools.partial(compare, itself=False)
    newest = jax.lax.fori_loop(0, own_part, others, newest)
    newest = compare(own_part, newest, itself=True)
    newest = jax.lax.fori_loop(own_part + 1, pl.cdiv(count, columns), others, newest)
    found = jnp.max(jnp.where(newest >= 0, newest * columns + place[None], -1), axis=1)
    store_rows(newest_ref, first, found, count)
