"""The public function, and the choice of who computes it."""

import dataclasses

from jaxtyping import Array, Float, Int

from ..op import Implementation, Op
from .types import Run, Stripes

_PREFILL = Op("prefill_attention", __name__, gpu=("cudnn",), tpu=("splash",))
_BLOCK = Op(
    "block_attention",
    __name__,
    gpu=(".hopper.block_attention",),
    tpu=("block_attention_pallas_mosaic_tpu",),
    forward_only=True,
)
_PARTIAL = dataclasses.replace(_BLOCK, name="partial_block_attention")


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
    return _PREFILL(q, k, v, scale=scale, window=window, implementation=implementation, interpret=interpret)


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
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B S N H"]:
    """Softmax attention of a block of tokens over slots: each sees those of tokens up to its own position.

    Slots may stand in any order, and each head may have as many as it likes. What free slots hold is not looked at.

    Args:
        q: queries, rotated. Query head n reads KV head n // (N / K).
        k, v: keys (rotated) and values.
        q_pos: position of each query, -1 where there is none, which sees nothing.
        pos: position of the token in each slot, -1 where there is none.
        weight: how many tokens a slot stands for, whose logarithm is added to its logit; 1 each by default.
        scale: factor on the logits.
        window: if given, a token sees only the `window` latest positions, its own included.
        run: where the queries' own tokens stand, in caches and prompts in which all tokens before them do; the kernel for GPUs needs it.
        implementation: who computes it, see `kvjax.pallas_kernels.op`.
        interpret: interpret the Pallas kernel that was named, on any device.

    Returns:
        The attended values in the dtype of `q`, zero for a query that sees nothing.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    options = {"scale": scale, "window": window, "run": run}
    return _BLOCK(q, k, v, q_pos, pos, weight, **options, implementation=implementation, interpret=interpret)


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
    """`block_attention` over a part of the slots, with what is needed to put parts together.

    Args:
        q, k, v, q_pos, pos, weight, scale, window, implementation, interpret: as for `block_attention`.
        run: as for `block_attention`, in numbers of all slots.
        stripes: which of all slots the part is, so that what `run` tells can be told of it; None if it is all of them.

    Returns:
        The attended values, and the logarithms of the sums of exponentials, -inf for a query that sees nothing.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    options = {"scale": scale, "window": window, "run": run, "stripes": stripes}
    return _PARTIAL(q, k, v, q_pos, pos, weight, **options, implementation=implementation, interpret=interpret)
