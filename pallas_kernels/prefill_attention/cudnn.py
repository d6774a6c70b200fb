"""`prefill_attention` on NVIDIA GPUs, by cuDNN's flash attention.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must match `reference.py` up to
rounding.
"""

from typing import Any

import jax
from jaxtyping import Array, Float

from ..device import hopper


def unsupported_reason(q: Array, *_: Any, sinks: Array | None = None, **__: Any) -> str | None:
    """Return why cuDNN does not support a case, or None if it does."""
    if sinks is not None:
        return "there are attention sinks"
    largest = 256 if hopper() else 128
    if q.dtype.itemsize != 2 or q.shape[-1] > largest or q.shape[-1] % 8:
        return (
            f"cuDNN needs 16-bit types and a head dim up to {largest}, a multiple of 8; "
            f"got {q.dtype} with head dim {q.shape[-1]}"
        )
    return None


def prefill_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    window: int | None = None,
    sinks: None = None,
) -> Float[Array, "B T N H"]:
    """Causal softmax attention; see the public function."""
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
