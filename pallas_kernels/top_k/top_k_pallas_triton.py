"""The highest scores of every row on an NVIDIA GPU (Pallas-Triton): one program per row, which it holds in registers."""

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
"""Scores in a row that fit in the registers of one program."""


def unsupported_reason(scores: Array, *_: Any) -> str | None:
    """Why this kernel does not serve a case, or None if it does."""
    if (size := scores.shape[-1]) > LONGEST:
        return f"rows of {size} scores do not fit in registers; {LONGEST} do"
    return triton_unsupported()


def top_k(
    scores: Float[Array, "R N"], count: Int[Array, " R"], *, warps: int | None = None, interpret: bool = False
) -> Bool[Array, "R N"]:
    """Which are the `count` highest scores of each row; of equal ones the first.

    Args:
        count: between 0 and N.
        warps: of a program; as measured, or for 64 scores a thread, if not given.
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
    """Places of the `count` highest scores of each row, ascending, and after them any others; and which are meant.

    Args:
        count: between 0 and `size`.
        size: S, at most N.
        warps: of a program; if not given, up to four for 16 scores a thread, and more for 32. (On an H200, of 256 rows of 4192 scores,
            8 warps took 31 us and 16 took 36; of 32 rows of 1048, 4 took 13 and 2 took 17.)
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
