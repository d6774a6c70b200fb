"""The public function, and the choice of who computes it."""

from jaxtyping import Array, Float, Int

from ..op import Implementation, Op
from ..rotary import DeferredRope

_OP = Op("page_scores", __name__, gpu=("pallas_triton",))


def page_scores(
    q: Float[Array, "B N H"] | DeferredRope,
    bounds: Float[Array, "B K P W"],
    tokens: Int[Array, " B"],
    *,
    page: int,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B N P"]:
    """Σ_d max(q_d · low_d, q_d · high_d): no key between the bounds has a larger product with the query (Quest, section 3.3).

    Query head n reads KV head n // (N / K).

    Args:
        q: queries, rotated or `DeferredRope`.
        bounds: of each page the least value of every key channel, and then the greatest: W = 2 H.
        tokens: of a row; pages of later ones score -inf, whatever their bounds hold.
        page: tokens to a page.
        implementation: who computes it, see `kvjax.pallas_kernels.op`. There is no kernel for TPUs.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Returns:
        Bounds of products, in float32.

    Raises:
        Unsupported: an implementation was named that cannot compute this.
    """
    return _OP(q, bounds, tokens, page=page, implementation=implementation, interpret=interpret)
