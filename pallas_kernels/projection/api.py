"""The public functions, and the choice of who computes them."""

import os
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..op import Implementation, Op
from .quantized import Matrix, QuantizedMatrix
from .types import Norm


def _prefer_xla_reason(x: Array, weights: Sequence[Matrix], **_: Any) -> str | None:
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_autotune_level=0" in flags or "xla_gpu_enable_triton_gemm=false" in flags:
        return None  # what XLA takes without trying first writes the whole matrix in float32 first
    if max(w.shape[0] for w in weights) > 65536 and not any(isinstance(w, QuantizedMatrix) for w in weights):
        return "of so many outputs XLA's own kernel is as fast (128256 of 4096 inputs on an H200: 255 us, these kernels 270)"
    return None


_PROJECTION = Op("projection", __name__, gpu=("pallas_triton",), prefer_xla_reason=_prefer_xla_reason)
_GATED = Op("gated_projection", __name__, gpu=("pallas_triton",))


def projection(
    x: Float[Array, "*B D"],
    *weights: Matrix,
    norm: Norm | None = None,
    residual: Float[Array, "*B O"] | None = None,
    dtype: Any = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> list[Float[Array, "*B _"]]:
    """Inputs times each of some matrices, summed in float32.

    A product rounds to the type of `x` before a residual is added. With `norm`, a Pallas kernel divides by the root of the mean
    square after the product instead of before: what it returns is nearer the exact result, in which it differs from XLA.

    Args:
        x: inputs; each matrix multiplies all of them.
        weights: matrices [_, D] as checkpoints keep them, outputs first; each may have other outputs, and all may be in 8 or in 4 bits
            (`QuantizedMatrix`).
        norm: RMS norm of the inputs.
        residual: added to the product of the only matrix.
        dtype: of the products, that of `x` if not given.
        implementation: "auto" takes the device's Pallas kernel where it serves.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    options = {"norm": norm, "residual": residual, "dtype": x.dtype if dtype is None else jnp.dtype(dtype)}
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
    """silu(gate x) · up x, of inputs that may be RMS-normed first: the wide half of a gated MLP (Shazeer 2020).

    Args:
        x: inputs.
        gate, up: matrices [O, D] as checkpoints keep them, outputs first.
        norm: RMS norm of the inputs.
        implementation: "auto" takes the device's Pallas kernel where it serves.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    return _GATED(x, (gate, up), norm=norm, implementation=implementation, interpret=interpret)


def lookup(table: Matrix, indices: Int[Array, "*B"], dtype: Any) -> Float[Array, "*B D"]:
    """Rows of a table, such as the embeddings of tokens; those of one in 8 or 4 bits are dequantised to `dtype`."""
    if isinstance(table, QuantizedMatrix):
        return table.rows(indices).dequantized(dtype)
    return jnp.take(table, indices, axis=0)
