"""Triton kernel of `write_rows`: copy rows to their places.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must equal those of `reference.py`.

Each program copies a part of one row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Int, Shaped

from ..triton import backend, triton_call, triton_unsupported

PART = 4096
"""Elements that a program copies."""


def unsupported_reason(array: Array, rows: Array, values: Array) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    if reason := triton_unsupported():
        return reason
    if array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32):
        return f"the array is {array.dtype}"
    if array.size > np.iinfo(np.int32).max:
        return f"the array has {array.size} elements, more than 32-bit indices reach"
    return None


def write_rows(
    array: Shaped[Array, "B ..."],
    rows: Int[Array, " R"],
    values: Shaped[Array, "R ..."],
    *,
    interpret: bool = False,
) -> Shaped[Array, "B ..."]:
    """Write whole rows; see the public function."""
    flat, new = array.reshape(array.shape[0], -1), values.reshape(values.shape[0], -1)
    return _call(flat, rows.astype(jnp.int32), new, interpret=interpret).reshape(array.shape)


@functools.partial(jax.jit, static_argnames="interpret")
def _call(array: Array, rows: Array, values: Array, *, interpret: bool) -> Array:
    """Call the kernel. It is traced and lowered once for all layers of one shape."""
    return triton_call(
        _body,
        grid=(len(rows), pl.cdiv(array.shape[1], PART)),
        out_shape=jax.ShapeDtypeStruct(array.shape, array.dtype),
        input_output_aliases={2: 0},
        warps=4,
        stages=1,
        interpret=interpret,
        name="write_rows",
    )(rows, values, array)


def _body(rows_ref: Any, values_ref: Any, _: Any, out_ref: Any) -> None:
    number, size = pl.program_id(0), values_ref.shape[1]
    row, at = rows_ref[number], pl.program_id(1) * PART + jnp.arange(PART, dtype=jnp.int32)
    inside = at < size
    new = backend.load(values_ref.at[number, at], mask=inside, other=jnp.zeros((), values_ref.dtype))
    there = (row >= 0) & (row < out_ref.shape[0])
    backend.store(out_ref.at[jnp.where(there, row, 0), at], new, mask=inside & there)
