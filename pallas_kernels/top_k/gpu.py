"""The highest scores of every row on an NVIDIA GPU (Pallas-Triton): one program a row, which it holds in registers."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from ..dispatch import triton
from ..tuning import tuned
from . import keys

LONGEST = 65536
"""Scores in a row that fit in the registers of one program."""


def refuses(size: int) -> str | None:
    """Why rows of `size` scores are not served."""
    if size > LONGEST:
        return f"rows of {size} scores do not fit in registers; {LONGEST} do"
    return triton()


def top_k(
    scores: Float[Array, "R N"], count: Int[Array, " R"], *, warps: int | None = None, interpret: bool = False
) -> Bool[Array, "R N"]:
    """Which are the `count` highest scores of each row; of equal ones the first.

    Args:
        count: between 0 and N.
        warps: of a program; as measured, or for 64 scores a thread, if not given.
    """
    from jax.experimental.pallas import triton as plt

    rows, size = scores.shape
    width = pl.next_power_of_2(size)
    if warps is None:
        warps = tuned("top_k", {"rows": rows, "size": size}, {"warps": min(max(width // 2048, 1), 32)})["warps"]

    def body(scores_ref, count_ref, keep_ref):
        place = jax.lax.broadcasted_iota(jnp.int32, (width,), 0)
        inside = place < size
        row = plt.load(scores_ref.at[place], mask=inside, other=0.0)
        found = keys.highest(jnp.where(inside, keys.ordered(row), keys.LOWEST), count_ref[0])
        plt.store(keep_ref.at[place], found, mask=inside)

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(scores.shape, bool),
        grid=(rows,),
        in_specs=[pl.BlockSpec((None, size), lambda row: (row, 0)), pl.BlockSpec((1,), lambda row: (row,))],
        out_specs=pl.BlockSpec((None, size), lambda row: (row, 0)),
        compiler_params=plt.CompilerParams(num_warps=warps),
        interpret=interpret,
        name="top_k",
    )(scores, count)
