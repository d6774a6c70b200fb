"""Causal attention on NVIDIA GPUs: cuDNN's flash attention."""

from typing import Any

import jax
from jaxtyping import Array, Float


def unsupported_reason(q: Array, *_: Any, **__: Any) -> str | None:
    """Why cuDNN does not serve a case, or None if it does."""
    if q.dtype.itemsize != 2 or q.shape[-1] > 128 or q.shape[-1] % 8:
        return f"cuDNN serves 16-bit heads of up to 128 channels, a multiple of 8; got {q.dtype} with head dim {q.shape[-1]}"
    return None


def prefill_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "B T N H"]:
    """Softmax attention of every token over itself and those before it; see the public function."""
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
