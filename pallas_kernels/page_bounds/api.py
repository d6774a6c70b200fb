"""The public function, and the choice of who computes it."""

from jaxtyping import Array, Float, Int

from ..op import Implementation, Op
from ..rotary import DeferredRope

_OP = Op("widen_bounds", __name__, gpu=("pallas_triton",))


def widen_bounds(
    bounds: Float[Array, "B K P W"],
    key: Float[Array, "B K H"] | DeferredRope,
    pos: Int[Array, " B"],
    *,
    page: int,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B K P W"]:
    """The bounds of pages (Quest, section 3.3) with a new token a row, in place where `bounds` are not used again.

    Args:
        bounds: of each page the least value of every key channel, and then the greatest: W = 2 H.
        key: the new token's, rotated or `DeferredRope`.
        pos: its position; the first token of a page finds nothing there, and one beyond the last page changes nothing.
        page: tokens to a page.
        implementation: who computes it, see `kvjax.pallas_kernels.op`. There is no kernel for TPUs.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that cannot compute this.
    """
    return _OP(bounds, key, pos, page=page, implementation=implementation, interpret=interpret)
