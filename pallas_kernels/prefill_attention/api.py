"""The public function, and the choice of who computes it."""

from functools import partial
from typing import Literal

import jax
from jaxtyping import Array, Float

from . import reference


def prefill_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    window: int | None = None,
    implementation: Literal["auto", "xla", "cudnn"] = "auto",
) -> Float[Array, "B T N H"]:
    """Softmax attention of every token over itself and those before it.

    Rows are padded on the right: what stands after a row's end cannot reach the tokens before it.

    Args:
        q: queries, rotated. Query head n reads KV head n // (N / K).
        k, v: keys (rotated) and values.
        scale: factor on the logits.
        window: if given, a token sees only the `window` latest tokens, itself included.
        implementation: "auto" takes cuDNN on an NVIDIA GPU for 16-bit heads of up to 128 channels, XLA otherwise.

    Returns:
        The attended values in the dtype of `q`.

    Raises:
        ValueError: "cudnn" was asked for a dtype or head dim that it does not serve.
    """
    xla = partial(reference.prefill_attention, scale=scale, window=window)
    served = q.dtype.itemsize == 2 and q.shape[-1] <= 128 and q.shape[-1] % 8 == 0
    if implementation == "cudnn" and not served:
        raise ValueError(
            f"cudnn attention serves bfloat16 and float16 heads of up to 128 channels, a multiple of 8; "
            f"got {q.dtype} with head dim {q.shape[-1]}: use implementation='xla' or 'auto'"
        )
    if implementation == "cudnn":
        return _cudnn(q, k, v, scale=scale, window=window)
    if implementation == "xla" or not served or jax.default_backend() != "gpu":  # tracing cuDNN needs it installed
        return xla(q, k, v)
    return jax.lax.platform_dependent(q, k, v, cuda=partial(_cudnn, scale=scale, window=window), default=xla)


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, window: int | None) -> jax.Array:
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
