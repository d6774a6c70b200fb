"""Public function. Its `Op` picks the Hopper kernel or one call per matmul."""

from typing import Any

from jaxtyping import Array, Float

from ...gradients import differentiable
from ...op import Implementation, Op
from .reference import multiply_apart
from .types import BlockOutput, BlockWeights

_OP = Op("fused_decode_block", __name__, gpu=("pallas_mosaic_gpu",))


def fused_decode_block(
    attended: Float[Array, "B A"],
    x: Float[Array, "B D"],
    weights: BlockWeights,
    *,
    implementation: Implementation = "auto",
) -> BlockOutput:
    """Output projection, gated MLP (Shazeer 2020) and the next layer's QKV projection, with residuals and RMS norms.

    On Hopper GPUs this is one kernel instead of four. Copies of weights continue while its programs wait for each other
    at a grid barrier. The kernel rounds normed inputs before it divides them by their root mean square, instead of
    after.

    The kernel supports weights that are all bfloat16, all int8 or all 4-bit. 4-bit weights must have the form of
    `weights="int4"`, with or without minima, and at most 4 sequences. Quantised codes are exact in bfloat16: they are
    multiplied directly, and the sums are scaled in float32.

    Args:
        attended: output of attention, with heads concatenated.
        x: the residual stream before `attended` is added.
        weights: weights of this layer's output projection and MLP, and of the next layer's attention.
        implementation: "auto" picks the Hopper kernel if it supports the case. Otherwise every matmul is a separate
            call. The kernel has no interpret mode.

    Returns:
        The residual stream, and the next layer's queries, keys and values, without biases and rotation.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> from kvjax.pallas_kernels import BlockWeights, Norm
        >>> a, b = params.layers
        >>> norms = [Norm(gain, params.config.norm_eps) for gain in (a.mlp_norm, b.attn_norm)]
        >>> mlp, qkv = (a.mlp.gate, a.mlp.up, a.mlp.down), (b.attn.q, b.attn.k, b.attn.v)
        >>> weights = BlockWeights(a.attn.o, norms[0], *mlp, norms[1], *qkv)
        >>> out = kvjax.pallas_kernels.fused_decode_block(jnp.ones((1, 64)), jnp.ones((1, 48)), weights)
        >>> out.x.shape, out.q.shape, out.k.shape
        ((1, 48), (1, 64), (1, 32))
    """
    kernel = _OP.kernel(attended, x, weights, implementation=implementation)
    if kernel is not None:
        return BlockOutput(*differentiable(kernel, _apart)(attended, x, weights))
    return BlockOutput(*multiply_apart(attended, x, weights, implementation))


def _apart(attended: Array, x: Array, weights: BlockWeights) -> tuple[Any, ...]:
    """What the kernel returns, by one call per matmul."""
    return tuple(multiply_apart(attended, x, weights))
