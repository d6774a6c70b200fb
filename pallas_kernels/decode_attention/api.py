"""The public functions, and the choice of who computes them."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..head_shards import query_heads
from ..op import Implementation, Op
from ..rotary import DeferredRope, parts_of
from .packed import Bits
from .types import Attended, CacheShard, PackedSlots, Rotation

_DECODE = Op(
    "decode_attention",
    __name__,
    gpu=("decode_attention_pallas_triton",),
    tpu=("decode_attention_pallas_mosaic_tpu",),
    forward_only=True,
)
_SHARDED = Op("sharded_decode_attention", __name__, gpu=("sharded_decode_attention_pallas_triton",))
_PACKED = Op("packed_decode_attention", __name__, gpu=("packed_decode_attention_pallas_triton",), forward_only=True)


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
    return _DECODE(q, k, v, weight, **options, implementation=implementation, interpret=interpret)


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
    kernel = _SHARDED.kernel(q, caches, scale=scale, implementation=implementation, interpret=interpret)
    if kernel is not None:
        return kernel(q, caches, scale=scale)
    # One cache after the other, each by whoever does that best; where XLA is asked for, by XLA.
    group = parts_of(q)[0].shape[1] // sum(len(held.heads) for held in caches)
    order = [query_heads(held.heads, group) for held in caches]
    by, outs = ("xla" if implementation == "xla" else "auto"), []
    for held, mine in zip(caches, order, strict=True):
        queries = q._replace(x=q.x[:, mine]) if isinstance(q, DeferredRope) else q[:, mine]
        attended = decode_attention(queries, held.k, held.v, held.weight, scale=scale, implementation=by)
        outs.append(attended.out)
    return jnp.concatenate(outs, axis=1)[:, np.argsort(np.concatenate(order))]


def packed_decode_attention(
    q: Float[Array, "B N H"],
    slots: PackedSlots,
    visible: Bool[Array, "B K C"],
    *,
    bits: Bits,
    scale: float,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B N H"]:
    """Softmax attention over slots in a few bits, which become floats on the way (KIVI, Liu et al. 2024, section 3.2).

    Query head n reads KV head n // (N / K). XLA unpacks block by block and computes in float32; the GPU kernel multiplies queries by
    scales and codes in the queries' type, and adds up in float32.

    Args:
        q: queries, rotated.
        slots: keys and values. What is in slots that do not count, NaN included, cannot reach the output.
        visible: slots that count, among those that are filled.
        bits: of a packed number.
        scale: factor on the logits, usually H ** -0.5.
        implementation: "auto" takes the device's Pallas kernel where it serves.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Returns:
        The attended values in the dtype of `q`; zeros for a head that has nothing to attend to.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    options = {"bits": bits, "scale": scale}
    return _PACKED(q, slots, visible, **options, implementation=implementation, interpret=interpret)
