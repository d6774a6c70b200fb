"""The highest scores of every row on a TPU: eight rows at a time, which stay in vector memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from ..interpreter import interpreter
from . import keys

ROWS = 8
"""Rows at a time: those of a vector register."""

LONGEST = 131072
"""Scores in a row of which eight rows, with what is computed of them, fit in vector memory."""


def unsupported_reason(scores: Array, *_: Any) -> str | None:
    """Why rows of `size` scores are not served, or None if they are."""
    size = scores.shape[-1]
    return f"rows of {size} scores do not fit in vector memory; {LONGEST} do" if size > LONGEST else None


def top_k(scores: Float[Array, "R N"], count: Int[Array, " R"], *, interpret: bool = False) -> Bool[Array, "R N"]:
    """Which are the `count` highest scores of each row; of equal ones the first.

    Args:
        count: between 0 and N.
    """
    rows, size = scores.shape
    keep = pl.pallas_call(
        _body,
        out_shape=jax.ShapeDtypeStruct(scores.shape, jnp.int32),
        grid=(pl.cdiv(rows, ROWS),),
        in_specs=[pl.BlockSpec((ROWS, size), lambda i: (i, 0)), pl.BlockSpec((ROWS, 1), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((ROWS, size), lambda i: (i, 0)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpreter(interpret),
        name="top_k",
    )(scores, count[:, None])
    return keep > 0


def _body(scores_ref: Any, count_ref: Any, keep_ref: Any) -> None:
    count = jnp.clip(count_ref[...], 0, scores_ref.shape[1])  # there may be no such row
    keep_ref[...] = keys.highest(keys.ordered(scores_ref[...]), count).astype(jnp.int32)
