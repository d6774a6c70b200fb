"""Public functions. Each `Op` picks a kernel or XLA."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..gradients import differentiable
from ..head_shards import query_heads
from ..op import Implementation, Op
from ..rotary import DeferredRope, parts_of
from ..sinks import with_sinks
from .packed import Bits
from .types import Attended, CacheShard, Factors, PackedSlots, Rotation

_DECODE = Op(
    "decode_attention",
    __name__,
    gpu=("decode_attention_pallas_triton",),
    tpu=("decode_attention_pallas_mosaic_tpu",),
)
_SHARDED = Op(
    "sharded_decode_attention",
    __name__,
    gpu=("sharded_decode_attention_pallas_triton",),
)
_PACKED = Op(
    "packed_decode_attention",
    __name__,
    gpu=("packed_decode_attention_pallas_triton",),
)


def decode_attention(
    q: Float[Array, "B N H"] | DeferredRope,
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    weight: Float[Array, "B K C"],
    *,
    scale: float,
    rotation: Rotation | None = None,
    factors: Factors | None = None,
    probs: bool = False,
    sinks: Float[Array, " N"] | None = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Attended:
    """Softmax attention over weighted cache slots.

    Query head n reads KV head n // (N / K). A slot of weight w contributes like w equal tokens: log(w) is added to its
    logit (Chelsea's degree bias). A slot of weight 0 is free; its contents, even NaN, do not reach the output.

    Args:
        q: queries, rotated or `DeferredRope`, or unrotated if `rotation` is given.
        k, v: cached keys and values. Keys are rotated, or unrotated if `rotation` is given.
        weight: number of tokens that each slot represents, 0 for free slots.
        scale: factor on the logits, usually H ** -0.5.
        rotation: rotates queries and keys as they are read, by their current positions in the cache (TreeKV,
            StreamingLLM).
        factors: factors of each slot's key and value, for `k` and `v` in 8-bit floats (float8_e4m3fn).
        probs: whether to return each slot's probability, from which H2O, TOVA and TreeKV score slots.
        sinks: logit of each query head's attention sink, which is in the denominator of the softmax (gpt-oss). It is not
            part of the log-sum-exp. With `probs`, XLA computes this case.
        implementation: "auto" picks the device's Pallas kernel if it supports the case, else XLA; see
            `kvjax.pallas_kernels.op`.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        The attended values, the log-sum-exp of the logits and, if requested, the probabilities.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, heads, 6, 4)) for i, heads in enumerate((2, 1, 1)))
        >>> weight = jnp.asarray([[[1.0, 1, 1, 1, 1, 0]]])  # the last slot is free
        >>> found = kvjax.pallas_kernels.decode_attention(q[:, :, 0], k, v, weight, scale=0.5, probs=True)
        >>> found.out.shape, found.probs[0, 0, 5].item()  # rows, query heads, channels
        ((1, 2, 4), 0.0)
    """
    options: dict[str, Any] = {"scale": scale, "rotation": rotation, "factors": factors, "probs": probs}
    options |= {"implementation": implementation, "interpret": interpret}
    if sinks is not None and probs:  # which are means over query heads, so that they cannot be scaled afterwards
        return _DECODE(q, k, v, weight, sinks=sinks, **options)
    attended = _DECODE(q, k, v, weight, **options)
    return attended._replace(out=with_sinks(attended.out, attended.logsumexp, sinks))


def sharded_decode_attention(
    q: Float[Array, "B N H"] | DeferredRope,
    caches: Sequence[CacheShard],
    *,
    scale: float,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B N H"]:
    """Compute `decode_attention` for a layer whose KV heads are divided among several caches.

    The GPU implementation is one kernel for all caches. It splits them into parts of equal length, so that short caches
    do not first occupy the device alone.

    Args:
        q: queries of the layer, rotated or `DeferredRope`.
        caches: the caches; each KV head is in exactly one of them.
        scale: factor on the logits, usually H ** -0.5.
        implementation: "auto" picks the Triton kernel if it supports the case. Otherwise `decode_attention` is called
            once per cache.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        The attended values in the dtype of `q`.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> x, q = jax.random.normal(jax.random.key(0), (1, 2, 6, 4)), jnp.ones((1, 4, 4))
        >>> weight, CacheShard = jnp.ones((1, 2, 6)), kvjax.pallas_kernels.CacheShard
        >>> caches = [CacheShard(x[:, i:i+1], x[:, i:i+1], weight[:, i:i+1], heads=(i,)) for i in range(2)]
        >>> out = kvjax.pallas_kernels.sharded_decode_attention(q, caches, scale=0.5)
        >>> bool(jnp.allclose(out, kvjax.pallas_kernels.decode_attention(q, x, x, weight, scale=0.5).out))
        True
    """
    kernel = _SHARDED.kernel(q, caches, scale=scale, implementation=implementation, interpret=interpret)
    if kernel is not None:
        return differentiable(kernel, _cache_by_cache)(q, caches, scale=scale)
    # Each call picks its own implementation, unless XLA was requested.
    return _cache_by_cache(q, caches, scale=scale, implementation="xla" if implementation == "xla" else "auto")


def _cache_by_cache(
    q: Float[Array, "B N H"] | DeferredRope,
    caches: Sequence[CacheShard],
    *,
    scale: float,
    implementation: Implementation = "xla",
) -> Float[Array, "B N H"]:
    """One call per cache."""
    group = parts_of(q)[0].shape[1] // sum(len(held.heads) for held in caches)
    order, outs = [query_heads(held.heads, group) for held in caches], []
    for held, mine in zip(caches, order, strict=True):
        queries = q._replace(x=q.x[:, mine]) if isinstance(q, DeferredRope) else q[:, mine]
        attended = decode_attention(queries, held.k, held.v, held.weight, scale=scale, implementation=implementation)
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
    """Softmax attention over quantised slots, which are dequantised in registers (KIVI, Liu et al. 2024, section 3.2).

    Query head n reads KV head n // (N / K). XLA dequantises block by block and computes in float32. The GPU kernel
    multiplies queries by scales and codes in the dtype of the queries, and accumulates in float32.

    Args:
        q: queries, rotated.
        slots: quantised keys and values. The contents of masked slots, even NaN, do not reach the output.
        visible: which of the filled slots are attended to.
        bits: bits per code.
        scale: factor on the logits, usually H ** -0.5.
        implementation: "auto" picks the Triton kernel if it supports the case, else XLA; see `kvjax.pallas_kernels.op`.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        The attended values in the dtype of `q`; zeros for a head that has nothing to attend to.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> state, _ = kvjax.KIVI(bits=8, group=2, residual=2).layer(spec).prefill(prompt, {})  # 8-bit codes
        >>> recent = state.k_recent, state.v_recent
        >>> slots = kvjax.pallas_kernels.PackedSlots(state.k, state.v, *recent, state.k_packed, state.next)
        >>> out = kvjax.pallas_kernels.packed_decode_attention(token.q, slots, state.live, bits=8, scale=0.5)
        >>> out.shape
        (1, 2, 4)
    """
    options = {"bits": bits, "scale": scale}
    return _PACKED(q, slots, visible, **options, implementation=implementation, interpret=interpret)
