"""The public function, and the choice of who computes it."""

from importlib import import_module
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..decode_attention import Attended
from ..dispatch import Implementation, choose, forward_only
from ..rotary import Turned, heads_of, parts_of
from . import reference


def gather_attention(
    q: Float[Array, "B N H"] | Turned,
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
        q: queries, rotated or `Turned`.
        k, v: the cache, keys rotated.
        index: slots, or with `page` > 1 pages: page p is the slots from p · page up to (p + 1) · page. All exist, those that are not
            meant too.
        live: which of the pages are meant, or which of the P · page slots in them; what the others hold, NaN included, cannot
            reach the output.
        scale: factor on the logits, usually H ** -0.5.
        page: slots to a page, a divisor of C.
        tokens: slots from there on are not meant, though their page may be.
        implementation: who computes it, see `kvjax.pallas_kernels.dispatch`.
        interpret: interpret the Pallas body that was named, on any device.

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
    chosen = choose(
        "gather_attention",
        implementation,
        tpu=lambda: _body("tpu").refuses(k, index, page),
        gpu=lambda: _body("gpu").refuses(heads, k, selecting),
        interpret=interpret,
    )
    if chosen != "xla":
        q, k, v = forward_only("gather_attention", (q, k, v))
    if chosen == "gpu":
        body = _body("gpu").gather_attention
        return body(q, k, v, index, live, scale=scale, page=page, tokens=tokens, interpret=interpret)
    q, live = heads_of(q), _of_slots(index, live, page, tokens)
    if chosen == "xla":
        return reference.gather_attention(q, k, v, index, live, scale=scale, page=page)
    return _body("tpu").gather_attention(q, k, v, index, live, scale=scale, page=page, interpret=interpret)


def _of_slots(
    index: Int[Array, "B R P"], live: Bool[Array, "B R L"], page: int, tokens: Int[Array, " B"] | None
) -> Bool[Array, "B R S"]:
    """Which slots are meant."""
    if live.shape != (*index.shape[:2], index.shape[2] * page):
        live = jnp.repeat(live, page, axis=-1)
    if tokens is None:
        return live
    slots = index[..., None] * page + jnp.arange(page, dtype=jnp.int32)
    return live & (slots.reshape(live.shape) < tokens[:, None, None])


def _body(name: str) -> Any:
    """The module of a Pallas body, imported where it is used."""
    return import_module(f".{name}", __package__)
