"""The public function, and the choice of who computes it."""

from jaxtyping import Array, Bool, Float, Int

from ..decode_attention import Attended
from ..op import Implementation, Op
from ..rotary import DeferredRope, parts_of

_OP = Op("gather_attention", __name__, gpu=("pallas_triton",), tpu=("pallas_mosaic_tpu",), forward_only=True)


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
