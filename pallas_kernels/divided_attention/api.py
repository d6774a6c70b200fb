"""The public function, and the choice of who computes it."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Array, Float

from ..dispatch import Implementation, choose
from ..rotary import Turned
from . import reference


class Held(NamedTuple):
    """What one of the caches holds.

    Attributes:
        k, v: rotated keys, and values.
        weight: multiplicity of each slot, 0 where free.
        heads: which of the layer's KV heads they are of.
    """

    k: Float[Array, "B K C H"]
    v: Float[Array, "B K C H"]
    weight: Float[Array, "B K C"]
    heads: tuple[int, ...]


def divided_attention(
    q: Float[Array, "B N H"] | Turned,
    caches: Sequence[Held],
    *,
    scale: float,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B N H"]:
    """`decode_attention` of all heads of a layer, each over the cache that has it.

    The GPU body is one kernel for all caches, with parts of one length: short caches do not have the device to themselves first.

    Args:
        q: queries of the layer, rotated or `Turned`.
        caches: each KV head is in one of them.
        scale: factor on the logits, usually H ** -0.5.
        implementation: "auto" takes the GPU's Pallas body where it serves, and else attends over one cache after the other.
        interpret: run a Pallas body in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    heads = q.x if isinstance(q, Turned) else q

    def gpu() -> str | None:
        from . import gpu

        return gpu.refuses(heads, caches)

    chosen = choose("divided_attention", implementation, gpu=gpu, interpret=interpret)
    if chosen == "xla":
        return reference.divided_attention(q, caches, scale=scale, by="xla" if implementation == "xla" else "auto")
    from .gpu import divided_attention as body

    return body(q, caches, scale=scale, interpret=interpret)
