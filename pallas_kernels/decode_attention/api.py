"""The public function, and the choice of who computes it."""

from jaxtyping import Array, Float

from ..op import Implementation, Op
from ..rotary import DeferredRope
from .types import Attended, Rotation

_OP = Op("decode_attention", __name__, gpu=("pallas_triton",), tpu=("pallas_mosaic_tpu",), forward_only=True)


def decode_attention(
    q: Float[Array, "B N H"] | DeferredRope,
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    weight: Float[Array, "B K C"],
    *,
    scale: float,
    rotation: Rotation | None = None,
    probs: bool = False,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Attended:
    """Softmax attention over cache slots, each counted `weight` times.

    Query head n reads KV head n // (N / K). A slot of weight w contributes like w equal tokens: `log(w)` is added to its
    logit (Chelsea's degree bias); weight 0 is a free slot, whose contents, NaN included, cannot reach the output.

    Args:
        q: queries, rotated or `DeferredRope`, or unrotated with `rotation`.
        k, v: the cache; keys rotated, or unrotated with `rotation`.
        weight: multiplicity of each slot, 0 where free.
        scale: factor on the logits, usually H ** -0.5.
        rotation: rotates keys and queries while they are read, by the places that they have now (TreeKV, StreamingLLM).
        probs: whether each slot's probability is wanted (H2O, TOVA and TreeKV score slots with it).
        implementation: "auto" takes the device's Pallas kernel where it serves.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    options = {"scale": scale, "rotation": rotation, "probs": probs}
    return _OP(q, k, v, weight, **options, implementation=implementation, interpret=interpret)
