"""Public functions. Each `Op` picks a kernel or XLA."""

from collections.abc import Sequence

from jaxtyping import Array, Bool, Float, Int

from ..decode_attention import Attended
from ..op import Implementation, Op
from ..rotary import DeferredRope, parts_of

_OP = Op(
    "gather_attention",
    __name__,
    gpu=("gather_attention_pallas_triton",),
    tpu=("gather_attention_pallas_mosaic_tpu",),
)
_FETCH = Op("fetch_slots", __name__, gpu=("fetch_slots_pallas_triton",))


def gather_attention(
    q: Float[Array, "B N H"] | DeferredRope,
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    index: Int[Array, "B R P"],
    live: Bool[Array, "B R L"],
    *,
    scale: float,
    page: int = 1,
    tokens: Int[Array, " B"] | None = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Attended:
    """Softmax attention of each head over the slots that it selected. They are read in place, without a gathered copy.

    R heads select slots, K <= R <= N. Query head n attends to the selection n // (N / R), in KV head n // (N / K). A
    slot that is selected twice counts twice.

    Args:
        q: queries, rotated or `DeferredRope`.
        k, v: cached keys (rotated) and values.
        index: selected slots. If `page` > 1, selected pages: page p is slots p · page to (p + 1) · page. All indices
            must be in range, also those that `live` masks.
        live: mask of the selected pages, or of their P · page slots. The contents of masked slots, even NaN, do not
            reach the output.
        scale: factor on the logits, usually H ** -0.5.
        page: slots per page, a divisor of C.
        tokens: number of tokens per sequence. Slots after them are masked, even in a selected page.
        implementation: "auto" picks the device's Pallas kernel if it supports the case, else XLA; see
            `kvjax.pallas_kernels.op`.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        As `decode_attention`, without `probs`.

    Raises:
        Unsupported: the requested implementation does not support this case.
        ValueError: the numbers of heads, or `index`, `live` and `page`, do not match.

    Example:
        >>> q, k = jax.random.normal(jax.random.key(0), (1, 2, 4)), jax.random.normal(jax.random.key(1), (1, 1, 6, 4))
        >>> pages = jnp.asarray([[[0, 2]]])  # of two slots each: slots 0, 1, 4 and 5
        >>> found = kvjax.pallas_kernels.gather_attention(q, k, k, pages, pages >= 0, scale=0.5, page=2)
        >>> weight = jnp.asarray([[[1.0, 1, 0, 0, 1, 1]]])
        >>> bool(jnp.allclose(found.out, kvjax.pallas_kernels.decode_attention(q, k, k, weight, scale=0.5).out))
        True
    """
    heads, selecting, kv_heads = parts_of(q)[0].shape[1], index.shape[1], k.shape[1]
    if heads % selecting or selecting % kv_heads:
        raise ValueError(
            f"gather_attention: {selecting} selecting heads for {heads} query heads and {kv_heads} KV heads; give a multiple of "
            "the KV heads that divides the query heads"
        )
    pages = index.shape[-1]
    if live.shape[-1] not in (pages, pages * page) or k.shape[2] % page:
        raise ValueError(
            f"gather_attention: {pages} pages of {page} slots, live for {live.shape[-1]}, and a cache of {k.shape[2]} slots; live must "
            "be given for each page or each slot, and page must divide the cache"
        )
    options = {"scale": scale, "page": page, "tokens": tokens}
    return _OP(q, k, v, index, live, **options, implementation=implementation, interpret=interpret)


def fetch_slots(
    stores: Sequence[Float[Array, "B K C H"]],
    index: Int[Array, "B N F"],
    missing: Bool[Array, "B N F"],
    got: Sequence[Float[Array, "B N F H"]],
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> list[Array]:
    """Load the missing slots from several stores, for example from a cache in host memory.

    The kernel reads only the missing slots, in whatever memory the stores are. An NVIDIA GPU maps pinned host memory
    into its own address space. Only these slots then cross the bus, and the host does nothing.

    Args:
        stores: arrays of one shape and dtype. Those in host memory require a kernel.
        index: slots to load for each of N heads. N / K consecutive heads read from one KV head. All indices must be in
            range.
        missing: which of the slots to load.
        got: values to return for the other slots, overwritten in place if they are not used again.
        implementation: "auto" picks the GPU's Pallas kernel if it supports the case, else XLA.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        One array [B, N, F, H] per store, in device memory.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> store, got = jnp.arange(8.0).reshape(1, 1, 8, 1), jnp.full((1, 1, 2, 1), -1.0)
        >>> index, missing = jnp.asarray([[[5, 2]]]), jnp.asarray([[[True, False]]])
        >>> (found,) = kvjax.pallas_kernels.fetch_slots([store], index, missing, [got])
        >>> found.ravel().tolist()
        [5.0, -1.0]
    """
    return _FETCH(stores, index, missing, got, implementation=implementation, interpret=interpret)


def reads_host_memory(
    stores: Sequence[Float[Array, "B K C H"]],
    index: Int[Array, "B N F"],
    missing: Bool[Array, "B N F"],
    got: Sequence[Float[Array, "B N F H"]],
) -> bool:
    """Return whether `fetch_slots` uses a kernel for these arguments, so that the stores can be in host memory.

    Example:
        >>> store, index = jnp.zeros((1, 1, 8, 4)), jnp.asarray([[[5, 2]]])
        >>> kvjax.pallas_kernels.reads_host_memory([store], index, index >= 0, [jnp.zeros((1, 1, 2, 4))])  # on CPU
        False
    """
    return _FETCH.kernel(stores, index, missing, got) is not None
