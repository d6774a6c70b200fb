"""The public function, and the choice of who computes it."""

from jaxtyping import Array, Float

from ..dispatch import Implementation, choose, forward_only
from ..rotary import Turned, heads_of, parts_of
from . import reference
from .result import Attended, Rotation


def decode_attention(
    q: Float[Array, "B N H"] | Turned,
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
        q: queries, rotated or `Turned`, or unrotated with `rotation`.
        k, v: the cache; keys rotated, or unrotated with `rotation`.
        weight: multiplicity of each slot, 0 where free.
        scale: factor on the logits, usually H ** -0.5.
        rotation: rotates keys and queries while they are read, by the places that they have now (TreeKV, StreamingLLM).
        probs: whether each slot's probability is wanted (H2O, TOVA and TreeKV score slots with it).
        implementation: "auto" takes the device's Pallas body where it serves.
        interpret: run a Pallas body in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    heads, *_ = parts_of(q)

    def gpu() -> str | None:
        from . import gpu

        return gpu.refuses(heads.shape[1] // k.shape[1], k, rotation)

    def tpu() -> str | None:
        from . import tpu

        return tpu.refuses(heads, k, rotation)

    chosen = choose("decode_attention", implementation, tpu=tpu, gpu=gpu, interpret=interpret)
    if chosen != "xla":
        q, k, v = forward_only("decode_attention", (q, k, v))
        heads, *_ = parts_of(q)
    if chosen == "gpu":
        from .gpu import decode_attention as gpu_body

        return gpu_body(q, k, v, weight, scale=scale, rotation=rotation, probs=probs, interpret=interpret)
    rotated = heads_of(q) if rotation is None else rotation.queries(heads)
    if chosen == "xla":
        return reference.decode_attention(rotated, k, v, weight, scale=scale, rotation=rotation, probs=probs)
    from .tpu import decode_attention as tpu_body

    return tpu_body(rotated, k, v, weight, scale=scale, rotation=rotation, probs=probs, interpret=interpret)
