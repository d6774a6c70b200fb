"""Triton kernel of `index_sums`: sums of values by index.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must match `reference.py`, up to
rounding.

A program has some of a head's indices, and compares them with those of all values.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ..triton import backend, entry, triton_call, triton_unsupported

SUMS, VALUES = 128, 64
"""Sums of a program, and values that it reads at a time."""


def unsupported_reason(index: Array, values: Array) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    if reason := triton_unsupported():
        return reason
    if values.dtype != jnp.float32:
        return f"values are {values.dtype}"
    return None


def index_sums(
    index: Int[Array, "B K T"], values: Float[Array, "B K T"], *, interpret: bool = False
) -> Float[Array, "B K T"]:
    """Sum values by index; see the public function."""
    count = index.shape[-1]
    inputs = index.astype(jnp.int32).reshape(-1, count), values.reshape(-1, count)
    return _call(*inputs, interpret=interpret).reshape(values.shape)


@functools.partial(jax.jit, static_argnames="interpret")
def _call(index: Array, values: Array, *, interpret: bool) -> Array:
    """Call the kernel. It is traced and lowered once for all layers of one shape."""
    out = jax.ShapeDtypeStruct(values.shape, jnp.float32)
    return triton_call(
        _body,
        grid=(len(values), pl.cdiv(values.shape[1], SUMS)),
        in_specs=[entry(index), entry(values)],
        out_specs=entry(out),
        out_shape=out,
        warps=4,
        stages=2,
        interpret=interpret,
        name="index_sums",
    )(index, values)


def _body(index_ref: Any, values_ref: Any, sums_ref: Any) -> None:
    count = values_ref.shape[0]
    own = pl.program_id(1) * SUMS + jnp.arange(SUMS, dtype=jnp.int32)

    def add(i: Array, total: Float[Array, "S V"]) -> Float[Array, "S V"]:
        at = i * VALUES + jnp.arange(VALUES, dtype=jnp.int32)
        inside = at < count
        index = backend.load(index_ref.at[at], mask=inside, other=-1)
        some = backend.load(values_ref.at[at], mask=inside, other=0.0)
        return total + jnp.where(index[None] == own[:, None], some[None], 0.0)

    # Sums of every `VALUES`th value are added once, at the end.
    total = jax.lax.fori_loop(0, pl.cdiv(count, VALUES), add, jnp.zeros((SUMS, VALUES), jnp.float32))
    backend.store(sums_ref.at[own], jnp.sum(total, axis=1), mask=own < count)
