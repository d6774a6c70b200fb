"""`prefill_attention` with attention sinks on Hopper GPUs, by the kernel of `block_attention`.

`Op` in `prefill_attention/api.py` calls it for the cases that `unsupported_reason` permits. A prompt is a block whose
slots are its own tokens. cuDNN's attention does not support sinks.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..gradients import differentiable
from ..prefill_attention import reference
from ..prefill_attention.types import Run
from ..sinks import with_sinks
from . import block_attention
from .wgmma import wgmma_unsupported


def unsupported_reason(
    q: Array, k: Array, v: Array, *, scale: float, window: int | None = None, sinks: Array | None = None
) -> str | None:
    """Return why this does not support a case, or None if it does."""
    if sinks is None:
        return "there are no attention sinks"
    if window is not None and window < q.shape[1]:
        return "there is a sliding window"
    return wgmma_unsupported(q, k, block_attention.DIMS)


def prefill_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " N"],
) -> Float[Array, "B T N H"]:
    """Causal softmax attention; see the public function."""
    return differentiable(_attend, _reference)(q, k, v, sinks, scale=scale, window=window)


def _attend(q: Array, k: Array, v: Array, sinks: Array, *, scale: float, window: int | None) -> Array:
    (rows, size), heads = q.shape[:2], k.shape[2]
    place = jnp.arange(size, dtype=jnp.int32)
    nothing = jnp.zeros((rows, heads), jnp.int32)
    k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
    out, logsumexp = block_attention.partial_block_attention(
        q,
        k,
        v,
        jnp.broadcast_to(place, (rows, size)),
        jnp.broadcast_to(place, (rows, heads, size)),
        run=Run(nothing, nothing),
        scale=scale,
    )
    return with_sinks(out, logsumexp, sinks)


def _reference(q: Array, k: Array, v: Array, sinks: Array, *, scale: float, window: int | None) -> jax.Array:
    return reference.prefill_attention(q, k, v, scale=scale, window=window, sinks=sinks)
