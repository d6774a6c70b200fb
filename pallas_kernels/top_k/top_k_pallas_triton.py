"""Triton kernels of `top_k` and `top_k_indices`: the highest scores of each row, as a mask or as indices.

`Op` in `api.py` calls them for the cases that `unsupported_reason` permits. They must choose the same scores as
`reference.py`. Indices can be in another order.

There is one program per row, which stays in registers.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from ..triton import backend, entry, triton_call, triton_unsupported
from ..tuning import tuned
from . import keys

LONGEST = 65536
"""Maximum length of a row that fits in the registers of one program."""


def unsupported_reason(scores: Array, *_: Any) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    if (size := scores.shape[-1]) > LONGEST:
        return f"rows of {size} scores do not fit in registers; {LONGEST} do"
    return triton_unsupported()


def top_k(
    scores: Float[Array, "R N"], count: Int[Array, " R"], *, warps: int | None = None, interpret: bool = False
) -> Bool[Array, "R N"]:
    """Return a mask of the `count` highest scores of each row. Ties go to the first.

    Args:
        scores: N scores per row.
        count: between 0 and N.
        warps: warps per program; by default the tuned number, or one per 2048 scores.
        interpret: run the kernel in interpret mode.
    """
    rows, size = scores.shape
    width = pl.next_power_of_2(size)
    if warps is None:
        warps = tuned("top_k", {"rows": rows, "size": size}, {"warps": min(max(width // 2048, 1), 32)})["warps"]

    def body(scores_ref: Any, count_ref: Any, keep_ref: Any) -> None:
        place = jax.lax.broadcasted_iota(jnp.int32, (width,), 0)
        inside = place < size
        row = backend.load(scores_ref.at[place], mask=inside, other=0.0)
        found = keys.highest(jnp.where(inside, keys.ordered(row), keys.LOWEST), count_ref[0])
        backend.store(keep_ref.at[place], found, mask=inside)

    return triton_call(
        body,
        out_shape=jax.ShapeDtypeStruct(scores.shape, bool),
        grid=(rows,),
        in_specs=[entry(scores), pl.BlockSpec((1,), lambda row: (row,))],
        out_specs=entry(scores),
        warps=warps,
        interpret=interpret,
        name="top_k",
    )(scores, count)


@partial(jax.jit, static_argnames=("size", "warps", "interpret"))
def top_k_indices(
    scores: Float[Array, "R N"],
    count: Int[Array, " R"],
    size: int,
    *,
    warps: int | None = None,
    interpret: bool = False,
) -> tuple[Int[Array, "R S"], Bool[Array, "R S"]]:
    """Return the indices of the `count` highest scores of each row, ascending, then others; and a mask of the chosen
    ones.

    By default, up to four warps have 16 scores per thread, and more warps have 32. On an H200, 256 rows of 4192 scores
    took 31 us with 8 warps and 36 us with 16. 32 rows of 1048 scores took 13 us with 4 warps and 17 us with 2.

    Args:
        scores: N scores per row.
        count: between 0 and `size`.
        size: S, at most N.
        warps: warps per program.
        interpret: run the kernel in interpret mode.
    """
    rows, length = scores.shape
    width = pl.next_power_of_2(length)
    if warps is None:
        usual = min(max(width // 1024, min(width // 512, 4), 1), 32)
        warps = tuned("top_k_indices", {"rows": rows, "size": length}, {"warps": usual})["warps"]

    def body(scores_ref: Any, count_ref: Any, index_ref: Any, live_ref: Any) -> None:
        place = jax.lax.broadcasted_iota(jnp.int32, (width,), 0)
        inside = place < length
        row = backend.load(scores_ref.at[place], mask=inside, other=-jnp.inf)
        there = row > -jnp.inf
        found = keys.highest(jnp.where(there, keys.ordered(row), keys.LOWEST), count_ref[0]) & there
        before = jnp.cumsum(found.astype(jnp.int32))
        total = jnp.sum(found.astype(jnp.int32))
        rank = jnp.where(found, before - 1, total + place - before)
        meant = inside & (rank < size)
        backend.store(index_ref.at[rank], place, mask=meant)
        backend.store(live_ref.at[rank], found, mask=meant)

    index, live = triton_call(
        body,
        out_shape=[jax.ShapeDtypeStruct((rows, size), jnp.int32), jax.ShapeDtypeStruct((rows, size), bool)],
        grid=(rows,),
        in_specs=[entry(scores), pl.BlockSpec((1,), lambda row: (row,))],
        out_specs=[pl.BlockSpec((None, size), lambda row: (row, 0))] * 2,
        warps=warps,
        interpret=interpret,
        name="top_k_indices",
    )(scores, count)
    return index, live
