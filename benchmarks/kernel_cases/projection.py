"""A model's matrix products with the one token of a decoding step, in the ways there are to have XLA do them.

Nearly all the time of a step at batch 1 goes into these. They are no operation of `kvjax.pallas_kernels`: "xla" is what models do.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .case import Case, relative_error

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
"""Outputs and inputs of Llama-3.1-8B's queries, keys and values in one; of what follows attention; of gate and up; of down; of the head."""


def cases() -> Iterator[Case]:
    """Normal weights, kept as [outputs, inputs]."""
    for (outputs, inputs), rows in [(shape, rows) for shape in SHAPES for rows in (1, 8)]:
        yield Case(
            operation="projection",
            shape=f"{rows} x {inputs} to {outputs}",
            dtype="bfloat16",
            inputs=partial(_inputs, rows, outputs, inputs),
            variants={
                "xla": _plain,
                "padded to 8": partial(_padded, 8),
                "padded to 16": partial(_padded, 16),
                "inputs first": lambda x, w, transposed: _plain(x, transposed.T),
                "multiply and sum": _summed,
            },
            error=_error,
            tolerance=5e-3,
            bytes=2 * (outputs * inputs + rows * (inputs + outputs)),
            flops=2 * rows * outputs * inputs,
        )


def _plain(x: jax.Array, w: jax.Array, *_: jax.Array) -> jax.Array:
    return jnp.einsum("bd,od->bo", x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def _padded(rows: int, x: jax.Array, w: jax.Array, *_: jax.Array) -> jax.Array:
    """With more rows XLA takes another kernel."""
    return _plain(jnp.pad(x, ((0, max(0, rows - len(x))), (0, 0))), w)[: len(x)]


def _summed(x: jax.Array, w: jax.Array, *_: jax.Array) -> jax.Array:
    wide = w.astype(jnp.float32)
    return jnp.stack([jnp.sum(wide * row.astype(jnp.float32), axis=-1) for row in x]).astype(x.dtype)


def _inputs(rows: int, outputs: int, inputs: int, seed: int) -> tuple[jax.Array, ...]:
    first, second = jax.random.split(jax.random.key(seed))
    w = jax.random.normal(second, (outputs, inputs), jnp.bfloat16)
    return jax.random.normal(first, (rows, inputs), jnp.bfloat16), w, w.T.copy()


def _error(inputs: tuple[Any, ...], out: Any) -> float:
    """Of the first 512 outputs."""
    x, w = (np.asarray(given, np.float64) for given in (inputs[0], inputs[1][:512]))
    return relative_error(out[:, :512], x @ w.T)
