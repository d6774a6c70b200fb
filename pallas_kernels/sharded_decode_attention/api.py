"""The public function, and the choice of who computes it."""

from collections.abc import Sequence

from jaxtyping import Array, Float

from ..op import Implementation, Op
from ..rotary import DeferredRope
from .reference import attend_apart
from .types import CacheShard

_OP = Op("sharded_decode_attention", __name__, gpu=("pallas_triton",))


def sharded_decode_attention(
    q: Float[Array, "B N H"] | DeferredRope,
    caches: Sequence[CacheShard],
    *,
    scale: float,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B N H"]:
    """`decode_attention` of all heads of a layer, each over the cache that has it.

    The GPU kernel is one kernel for all caches, with parts of one length: short caches do not have the device to themselves first.

    Args:
        q: queries of the layer, rotated or `DeferredRope`.
        caches: each KV head is in one of them.
        scale: factor on the logits, usually H ** -0.5.
        implementation: "auto" takes the GPU's Pallas kernel where it serves, and else attends over one cache after the other.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    kernel = _OP.kernel(q, caches, scale=scale, implementation=implementation, interpret=interpret)
    if kernel is not None:
        return kernel(q, caches, scale=scale)
    return attend_apart(q, caches, scale=scale, implementation=implementation)
