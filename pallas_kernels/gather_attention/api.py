"""The public function, and the choice of who computes it."""

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
    forward_only=True,
)
_FETCH = Op("fetch_slots", __name__, gpu=("fetch_slots_pallas_triton",), forward_only=True)


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
    """Softmax attention of each head over the slots that it selected, which are read where they are and never copied together.

    R heads select, K <= R <= N: query head n attends to what head n // (N / R) selected, which reads from KV head n // (N / K).
    A slot selected twice counts twice.

    Args:
        q: queries, rotated or `DeferredRope`.
        k, v: the cache, keys rotated.
        index: slots, or with `page` > 1 pages: page p is the slots from p · page up to (p + 1) · page. All exist, those that are not
            meant too.
        live: which of the pages are meant, or which of the P · page slots in them; what the others hold, NaN included, cannot
            reach the output.
        scale: factor on the logits, usually H ** -0.5.
        page: slots to a page, a divisor of C.
        tokens: slots from there on are not meant, though their page may be.
        implementation: who computes it, see `kvjax.pallas_kernels.op`.
        interpret: interpret the Pallas kernel that was named, on any device.

    Returns:
        As `decode_attention` does, without `probs`.

    Raises:
        Unsupported: an implementation was named that cannot compute this.
        ValueError: heads, or `index`, `live` and `page`, do not fit together.
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
    """Slots of several stores, where they are missing from what is there already.

    A kernel reads the missing slots alone, wherever the stores lie: an NVIDIA GPU has pinned memory of the host in its own address space, so
    that of a store there only these slots travel, and neither is the store moved first nor does the host do anything.

    Args:
        stores: of one shape and type. Those in host memory need a kernel.
        index: which slots, for each of N heads, of which N / K in turn read from one KV head. All exist.
        missing: which of them to read.
        got: what to return of the others; written in place where it is not used again.
        implementation: "auto" takes the device's Pallas kernel where it serves.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Returns:
        For each store [B, N, F, H], in the device's memory.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    return _FETCH(stores, index, missing, got, implementation=implementation, interpret=interpret)


def reads_host_memory(
    stores: Sequence[Float[Array, "B K C H"]],
    index: Int[Array, "B N F"],
    missing: Bool[Array, "B N F"],
    got: Sequence[Float[Array, "B N F H"]],
) -> bool:
    """Whether `fetch_slots` takes a kernel for this, hence stores in the host's memory."""
    return _FETCH.kernel(stores, index, missing, got) is not None
