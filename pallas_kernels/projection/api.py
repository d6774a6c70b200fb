"""The public functions, and the choice of who computes them."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..dispatch import Implementation, choose
from . import reference
from .norm import Norm


def projection(
    x: Float[Array, "*B D"],
    *weights: Float[Array, "_ D"],
    norm: Norm | None = None,
    residual: Float[Array, "*B O"] | None = None,
    dtype: Any = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> list[Float[Array, "*B _"]]:
    """Inputs times each of some matrices, summed in float32.

    A product rounds to the type of `x` before a residual is added. With `norm`, a Pallas body divides by the root of the mean
    square after the product instead of before: what it returns is nearer the exact result, in which it differs from XLA.

    Args:
        x: inputs; each matrix multiplies all of them.
        weights: matrices as checkpoints keep them, outputs first; each may have other outputs.
        norm: RMS norm of the inputs.
        residual: added to the product of the only matrix.
        dtype: of the products, that of `x` if not given.
        implementation: "auto" takes the device's Pallas body where it serves.
        interpret: run a Pallas body in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    chosen = choose(
        "projection",
        implementation,
        gpu=lambda: _refuses(x, weights),
        slower=lambda: _slower(weights),
        interpret=interpret,
    )
    if chosen == "xla":
        return reference.projection(x, weights, norm=norm, residual=residual, dtype=dtype)
    from . import gpu

    return gpu.projection(x, weights, norm=norm, residual=residual, dtype=dtype, interpret=interpret)


def gated_projection(
    x: Float[Array, "*B D"],
    gate: Float[Array, "O D"],
    up: Float[Array, "O D"],
    *,
    norm: Norm | None = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "*B O"]:
    """silu(gate x) · up x, of inputs that may be RMS-normed first: the wide half of a gated MLP (Shazeer 2020).

    Args:
        x: inputs.
        gate, up: matrices as checkpoints keep them, outputs first.
        norm: RMS norm of the inputs.
        implementation: "auto" takes the device's Pallas body where it serves.
        interpret: run a Pallas body in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    chosen = choose("gated_projection", implementation, gpu=lambda: _refuses(x, [gate, up]), interpret=interpret)
    if chosen == "xla":
        return reference.gated_projection(x, gate, up, norm=norm)
    from . import gpu

    (out,) = gpu.projection(x, [gate, up], norm=norm, residual=None, dtype=x.dtype, gated=True, interpret=interpret)
    return out


def _refuses(x: Array, weights: Sequence[Array]) -> str | None:
    from . import gpu

    return gpu.refuses(x, weights)


def _slower(weights: Sequence[Array]) -> str | None:
    if max(w.shape[0] for w in weights) > 65536:
        return "of so many outputs XLA's own kernel is as fast (128256 of 4096 inputs on an H200: 255 us, these bodies 270)"
    return None
