"""The public function, and the choice of who computes it."""

from jaxtyping import Array, Float

from ..op import Implementation, Op

_OP = Op("prefill_attention", __name__, gpu=("cudnn",), tpu=("splash",))


def prefill_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    window: int | None = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Softmax attention of every token over itself and those before it.

    Rows are padded on the right: what stands after a row's end cannot reach the tokens before it.

    Args:
        q: queries, rotated. Query head n reads KV head n // (N / K).
        k, v: keys (rotated) and values.
        scale: factor on the logits.
        window: if given, a token sees only the `window` latest tokens, itself included.
        implementation: "gpu" is cuDNN's flash attention, "tpu" JAX's splash attention; "auto" takes the device's own where it serves.
        interpret: run the TPU's in its interpreter, on any device.

    Returns:
        The attended values in the dtype of `q`.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    return _OP(q, k, v, scale=scale, window=window, implementation=implementation, interpret=interpret)
