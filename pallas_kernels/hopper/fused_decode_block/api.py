"""The public function, and the choice of who computes it."""

from jaxtyping import Array, Float

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
    """Output projection, gated MLP (Shazeer 2020) and the next layer's queries, keys and values, with both residual sums and RMS norms.

    The Hopper kernel is one kernel for what else are four: weights go on arriving while programs wait for each other. It rounds
    normed inputs before they are divided by their root mean square instead of after. It serves weights that are all in
    bfloat16, all in int8, or, but for eight rows, all in 4 bits as `weights="int4"` makes them, or so without minima. Those it multiplies as
    they are: levels are exact in bfloat16, and groups' sums are scaled in float32.

    Args:
        attended: what attention returned, heads side by side.
        x: the residual stream before it is added.
        implementation: "auto" takes the device's kernel where it serves; there is no interpreter for it.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    kernel = _OP.kernel(attended, x, weights, implementation=implementation)
    if kernel is not None:
        return BlockOutput(*kernel(attended, x, weights))
    return BlockOutput(*multiply_apart(attended, x, weights, implementation))
