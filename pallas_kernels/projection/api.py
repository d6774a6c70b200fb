"""Public functions. Each `Op` picks a Triton kernel or XLA."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..device import sliced_rows, target, tpu_layout
from ..op import Implementation, Op
from .quantized import Matrix, QuantizedMatrix
from .types import Norm

_PROJECTION = Op("projection", __name__, gpu=("pallas_triton",))
_GATED = Op("gated_projection", __name__, gpu=("pallas_triton",))

MOST_SLICED = 64
"""Maximum number of rows that `lookup` slices one by one. More, as of a prompt, are gathered from a copy."""


def projection(
    x: Float[Array, "*B D"],
    *weights: Matrix,
    norm: Norm | None = None,
    biases: Sequence[Float[Array, " _"] | None] | None = None,
    residual: Float[Array, "*B O"] | None = None,
    dtype: Any = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> list[Float[Array, "*B _"]]:
    """Multiply inputs with one or more matrices, accumulating in float32.

    A product with its bias is rounded to `dtype` before the residual is added. With `norm`, a Pallas kernel divides by the
    root mean square after the matmul instead of before. Its result is closer to the exact one than XLA's.

    Args:
        x: inputs; each matrix multiplies all of them.
        weights: matrices [_, D] as in checkpoints, outputs first. The numbers of outputs can differ. All can be 8-bit
            or 4-bit (`QuantizedMatrix`).
        norm: RMS norm of the inputs.
        biases: one bias per matrix, each [outputs] or None, added to its product.
        residual: added to the product; only for a single matrix.
        dtype: dtype of the products, by default that of `x`.
        implementation: "auto" picks the GPU's Pallas kernel if it supports the case, else XLA; see
            `kvjax.pallas_kernels.op`.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        One array [*B, outputs] per matrix.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> x, weight = jnp.asarray([[1.0, 2.0]]), jnp.asarray([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> kvjax.pallas_kernels.projection(x, weight)[0].tolist()
        [[1.0, 2.0, 3.0]]
    """
    biases = None if biases is None or all(b is None for b in biases) else tuple(biases)
    options = {
        "norm": norm,
        "biases": biases,
        "residual": residual,
        "dtype": x.dtype if dtype is None else jnp.dtype(dtype),
    }
    return _PROJECTION(x, weights, **options, implementation=implementation, interpret=interpret)


def gated_projection(
    x: Float[Array, "*B D"],
    gate: Matrix,
    up: Matrix,
    *,
    norm: Norm | None = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "*B O"]:
    """Compute silu(gate x) · up x, with an optional RMS norm of x: the first half of a gated MLP (Shazeer 2020).

    Args:
        x: inputs.
        gate, up: matrices [O, D] as in checkpoints, outputs first.
        norm: RMS norm of the inputs.
        implementation: "auto" picks the GPU's Pallas kernel if it supports the case, else XLA; see
            `kvjax.pallas_kernels.op`.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        The gated activations in the dtype of `x`.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> x, one = jnp.asarray([[1.0, 2.0]]), jnp.asarray([[1.0, 0.0]])
        >>> out = kvjax.pallas_kernels.gated_projection(x, one, one)
        >>> bool(jnp.allclose(out, jax.nn.silu(1.0)))
        True
    """
    return _GATED(x, (gate, up), norm=norm, implementation=implementation, interpret=interpret)


def lookup(table: Matrix, indices: Int[Array, "*B"], dtype: Any) -> Float[Array, "*B D"]:
    """Return rows of a table, such as token embeddings. Rows of a quantised table are dequantised to `dtype`.

    If a TPU stores the table by columns, a gather copies all of it by rows. A few rows are therefore sliced one by one.

    Example:
        >>> kvjax.pallas_kernels.lookup(jnp.asarray([[1.0, 2.0], [3.0, 4.0]]), jnp.asarray([1, 0]), "bfloat16").tolist()
        [[3.0, 4.0], [1.0, 2.0]]
    """
    if isinstance(table, QuantizedMatrix):
        return table.rows(indices).dequantized(dtype)
    if indices.size <= MOST_SLICED and target().platform == "tpu" and tpu_layout(table.shape) == (1, 0):
        rows = jax.lax.map(lambda index: sliced_rows(table, index, 1)[0], indices.reshape(-1))
        return rows.reshape(*indices.shape, -1)
    return jnp.take(table, indices, axis=0)
