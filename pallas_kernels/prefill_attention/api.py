"""Public functions. Each `Op` picks a kernel or XLA."""

import dataclasses

from jaxtyping import Array, Float, Int

from ..op import Implementation, Op
from ..sinks import with_sinks
from .types import Run, Stripes

_PREFILL = Op(
    "prefill_attention", __name__, gpu=("cudnn", ".hopper.prompt_attention"), tpu=("splash",), has_gradient=True
)
_BLOCK = Op(
    "block_attention",
    __name__,
    gpu=(".hopper.block_attention",),
    tpu=("block_attention_pallas_mosaic_tpu",),
)
_PARTIAL = dataclasses.replace(_BLOCK, name="partial_block_attention")


def prefill_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Causal softmax attention: every token attends to itself and to those before it.

    Sequences are padded on the right, so that padding does not reach the tokens before it.

    Args:
        q: queries, rotated. Query head n reads KV head n // (N / K).
        k, v: keys (rotated) and values.
        scale: factor on the logits.
        window: if given, a token attends only to the latest `window` tokens, including itself.
        sinks: logit of each query head's attention sink, which is in the denominator of every softmax (gpt-oss).
        implementation: "gpu" is cuDNN's flash attention, with sinks a Pallas kernel for Hopper GPUs, and "tpu" is JAX's
            splash attention. "auto" picks the device's one if it supports the case, else XLA.
        interpret: run the TPU kernel in interpret mode, on any device.

    Returns:
        The attended values in the dtype of `q`.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (1, 6, 4, 4))
        >>> q, k, v = x[:, :, :2], x[:, :, 2:3], x[:, :, 3:]
        >>> out = kvjax.pallas_kernels.prefill_attention(q, k, v, scale=0.5)
        >>> out.shape, bool(jnp.allclose(out[:, 0], v[:, 0]))  # the first token attends to itself alone
        ((1, 6, 2, 4), True)
    """
    options = {"scale": scale, "window": window, "sinks": sinks}
    return _PREFILL(q, k, v, **options, implementation=implementation, interpret=interpret)


def block_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    q_pos: Int[Array, "B S"],
    pos: Int[Array, "B K T"],
    weight: Float[Array, "B K T"] | None = None,
    *,
    scale: float,
    window: int | None = None,
    run: Run | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B S N H"]:
    """Causal softmax attention of a block of tokens over slots: each token attends to slots of positions up to its own.

    Slots can be in any order, and each head can have a different number. The contents of free slots are ignored.

    Args:
        q: queries, rotated. Query head n reads KV head n // (N / K).
        k, v: keys (rotated) and values.
        q_pos: position of each query; -1 for padding, which attends to nothing.
        pos: position of the token in each slot, -1 if the slot is free.
        weight: number of tokens that each slot represents, whose logarithm is added to its logit; 1 by default.
        scale: factor on the logits.
        window: if given, a token attends only to the latest `window` positions, including its own.
        run: location of the queries' tokens in slots that are in order of position. The GPU kernel requires it.
        sinks: as for `prefill_attention`. Kernels serve this case.
        implementation: "auto" picks the device's Pallas kernel if it supports the case, else XLA; see
            `kvjax.pallas_kernels.op`.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        The attended values in the dtype of `q`, zero for a query that attends to nothing.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (1, 1, 6, 4))
        >>> q, at, pos = x[:, 0, 4:, None], jnp.asarray([[4, 5]]), jnp.arange(6)[None, None]  # the last two tokens
        >>> kvjax.pallas_kernels.block_attention(q, x, x, at, pos, scale=0.5).shape
        (1, 2, 1, 4)
    """
    options = {"scale": scale, "window": window, "run": run}
    chosen = {"implementation": implementation, "interpret": interpret}
    if sinks is not None:
        out, logsumexp = _PARTIAL(q, k, v, q_pos, pos, weight, **options, stripes=None, **chosen)
        return with_sinks(out, logsumexp, sinks)
    return _BLOCK(q, k, v, q_pos, pos, weight, **options, **chosen)


def partial_block_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    q_pos: Int[Array, "B S"],
    pos: Int[Array, "B K T"],
    weight: Float[Array, "B K T"] | None = None,
    *,
    scale: float,
    window: int | None = None,
    run: Run | None = None,
    stripes: Stripes | None = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N"]]:
    """Compute `block_attention` over a part of the slots, with the log-sum-exp needed to combine parts.

    Args:
        q, k, v, q_pos, pos, weight, scale, window, implementation, interpret: as for `block_attention`.
        run: as for `block_attention`, with slot numbers of the whole cache.
        stripes: which slots of the whole cache are in this part, to convert the slot numbers of `run`; None if all are.

    Returns:
        The attended values, and the log-sum-exp of the logits, -inf for a query that attends to nothing.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> x, pos = jax.random.normal(jax.random.key(0), (1, 1, 6, 4)), jnp.arange(6)[None, None]
        >>> q, at = x[:, 0, 4:, None], jnp.asarray([[4, 5]])
        >>> out, logsumexp = kvjax.pallas_kernels.partial_block_attention(q, x, x, at, pos, scale=0.5)
        >>> out.shape, logsumexp.shape
        ((1, 2, 1, 4), (1, 2, 1))
    """
    options = {"scale": scale, "window": window, "run": run, "stripes": stripes}
    return _PARTIAL(q, k, v, q_pos, pos, weight, **options, implementation=implementation, interpret=interpret)
