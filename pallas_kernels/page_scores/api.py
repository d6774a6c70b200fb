"""The public function, and the choice of who computes it."""

from jaxtyping import Array, Float, Int

from ..dispatch import Implementation, choose
from ..rotary import Turned, heads_of
from . import reference


def page_scores(
    q: Float[Array, "B N H"] | Turned,
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
        q: queries, rotated or `Turned`.
        bounds: of each page the least value of every key channel, and then the greatest: W = 2 H.
        tokens: of a row; pages of later ones score -inf, whatever their bounds hold.
        page: tokens to a page.
        implementation: who computes it, see `kvjax.pallas_kernels.dispatch`. There is no body for TPUs.
        interpret: run a Pallas body in its interpreter, on any device.

    Returns:
        Bounds of products, in float32.

    Raises:
        Unsupported: an implementation was named that cannot compute this.
    """

    def gpu() -> str | None:
        from . import gpu

        return gpu.refuses(q, bounds)

    if choose("page_scores", implementation, gpu=gpu, interpret=interpret) == "xla":
        return reference.page_scores(heads_of(q), bounds, tokens, page=page)
    from . import gpu as body

    return body.page_scores(q, bounds, tokens, page=page, interpret=interpret)
