"""Mosaic TPU kernel of `top_k`: a mask of the highest scores of each row.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must equal those of `reference.py`.

It computes eight rows at a time, which stay in vector memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from ..interpreter import interpreter
from . import keys

ROWS = 8
"""Rows at a time: the rows of a vector register."""

LONGEST = 131072
"""Maximum length of a row. Eight rows and their intermediate results must fit in vector memory."""


def unsupported_reason(scores: Array, *_: Any) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    size = scores.shape[-1]
    return f"rows of {size} scores do not fit in vector memory; {LONGEST} do" if size > LONGEST else None


def top_k(scores: Float[Array, "R N"], count: Int[Array, " R"], *, interpret: bool = False) -> Bool[Array, "R N"]:
    """Return a mask of the `count` highest scores of each row. Ties go to the first.

    Args:
        scores: N scores per row.
        count: between 0 and N.
        interpret: run the kernel in interpret mode.
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
    count = jnp.clip(count_ref[...], 0, scores_ref.shape[1])  # the row may be out of bounds
    keep_ref[...] = keys.highest(keys.ordered(scores_ref[...]), count).astype(jnp.int32)
