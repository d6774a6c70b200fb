"""`prefill_attention` on TPUs, by JAX's splash attention, which skips blocks that are fully masked.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must match `reference.py` up to
rounding.
"""

import functools
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float

BLOCK = 512
"""Maximum number of queries and of keys per block."""


def unsupported_reason(q: Array, *_: Any, **__: Any) -> str | None:
    """Return why splash attention does not support a case, or None if it does."""
    length, dim = q.shape[1], q.shape[-1]
    if length % 128:
        return f"{length} tokens are not a multiple of 128"
    if dim % 64:
        return f"head dim {dim} is not a multiple of 64"
    return None


def prefill_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Causal softmax attention; see the public function."""
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    kernel = _kernel(length, heads // kv_heads, window, interpret)
    grouped = q.reshape(batch, length, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)  # [B, K, G, T, H]
    keys, values = (x.swapaxes(1, 2) for x in (k, v))
    # The kernel has no scale argument. The queries are scaled and rounded instead, which changes a logit by up to 0.4 %
    # in bfloat16.
    given = (grouped * scale).astype(q.dtype), keys, values
    if sinks is None:
        out: Any = jax.vmap(jax.vmap(kernel))(*given)
    else:
        of_head = jax.vmap(lambda q, k, v, sinks: kernel(q, k, v, sinks=sinks))
        out = jax.vmap(of_head, in_axes=(0, 0, 0, None))(*given, sinks.reshape(kv_heads, -1))
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _kernel(length: int, group: int, window: int | None, interpret: bool) -> splash.SplashAttentionKernel:
    """Return the kernel of one KV head and its query heads."""
    shape = length, length
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    block = next(size for size in (BLOCK, 256, 128) if length % size == 0)
    sizes = splash.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block)
    make = functools.partial(splash.make_splash_mqa_single_device, block_sizes=sizes, interpret=interpret)
    return make(masks.MultiHeadMask([mask] * group))
