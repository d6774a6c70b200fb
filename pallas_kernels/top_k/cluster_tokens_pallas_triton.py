"""Triton kernel of `cluster_tokens`: choose the tokens of each query's best clusters.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. It must choose the same tokens as
`reference.py`, in any order.

There is one program per query and block of results.

A program keeps the scores in registers and does not sort. Bisection finds the lowest score whose clusters still fit. A
cumulative sum of the clusters' sizes gives each one's first index in the result. The chosen clusters are listed in
memory, and every result then finds its cluster in that list. The list is short: some dozen clusters of hundreds.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from ..triton import backend, entry, triton_call, triton_unsupported
from ..tuning import tuned
from . import keys
from .types import Always

MOST = 16384
"""Maximum number of clusters per row, whose scores and sizes must fit in the registers of one program."""


def unsupported_reason(scores: Array, *_: Any) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    if (clusters := scores.shape[-1]) > MOST:
        return f"{clusters} clusters do not fit in registers; {MOST} do"
    return triton_unsupported()


def cluster_tokens(
    scores: Float[Array, "B K G M"],
    sizes: Int[Array, "B K M"],
    starts: Int[Array, "B K M"],
    order: Int[Array, "B K C"],
    room: Int[Array, " B"],
    size: int,
    always: Always | None = None,
    *,
    interpret: bool = False,
    tuning: dict[str, int] | None = None,
) -> tuple[Int[Array, "B K G P"], Bool[Array, "B K G P"]]:
    """Choose tokens, in the order of their clusters' indices; see the public function.

    Args:
        tuning: `places` (results per program, a power of two) and `warps`, instead of the tuned sizes.
    """
    clusters = scores.shape[-1]
    if tuning is None:
        places = min(1024, pl.next_power_of_2(size))
        warps = min(max(max(places, pl.next_power_of_2(clusters)) // 128, 1), 8)
        case = {"rows": scores.size // clusters, "clusters": clusters, "size": size}
        tuning = tuned("cluster_tokens", case, {"places": places, "warps": warps})
    ends, counts = ([], (0, 0, size)) if always is None else ([always.tail, always.seen], (*always[:2], always.places))
    return _call(scores, sizes, starts, order, room, *ends, size=size, counts=counts, **tuning, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("size", "counts", "places", "warps", "interpret"))
def _call(
    scores: Float[Array, "B K G M"],
    sizes: Int[Array, "B K M"],
    starts: Int[Array, "B K M"],
    order: Int[Array, "B K C"],
    room: Int[Array, " B"],
    *ends: Int[Array, " B"],
    size: int,
    counts: tuple[int, int, int],
    places: int,
    warps: int,
    interpret: bool,
) -> tuple[Int[Array, "B K G P"], Bool[Array, "B K G P"]]:
    """Call the kernel. It is traced and lowered once for all layers."""
    batch, heads, group, clusters = scores.shape
    first, latest, total = counts
    rows, blocks = batch * heads * group, pl.cdiv(total, places)
    width = pl.next_power_of_2(clusters)
    scores, of_heads = scores.reshape(rows, clusters), [x.reshape(batch * heads, -1) for x in (sizes, starts, order)]
    by_row = pl.BlockSpec((1,), lambda row, _: (row // (heads * group),))
    shapes = [
        *(jax.ShapeDtypeStruct((rows, total), dtype) for dtype in (jnp.int32, bool)),
        jax.ShapeDtypeStruct((rows, blocks, 2, width), jnp.int32),
    ]
    of_program = pl.BlockSpec((None, None, 2, width), lambda row, block: (row, block, 0, 0))
    index, live, _ = triton_call(
        functools.partial(
            _body,
            size=size,
            first=first,
            latest=latest,
            places=places,
            wait=(lambda: None) if interpret else backend.debug_barrier,
        ),
        grid=(rows, blocks),
        in_specs=[entry(scores), *(entry(x, each=group) for x in of_heads), by_row, *[by_row for _ in ends]],
        out_shape=shapes,
        out_specs=[*map(entry, shapes[:2]), of_program],
        warps=warps,
        stages=1,
        interpret=interpret,
        name="cluster_tokens",
    )(scores, *of_heads, room, *ends)
    return index.reshape(batch, heads, group, total), live.reshape(batch, heads, group, total)


def _body(
    scores_ref: Any,
    sizes_ref: Any,
    starts_ref: Any,
    order_ref: Any,
    room_ref: Any,
    *refs: Any,
    size: int,
    first: int,
    latest: int,
    places: int,
    wait: Any,
) -> None:
    """Compute one block of results of one query.

    Args:
        refs: if tokens are always added: the position of the latest ones, and the number of tokens. Then the outputs:
            tokens, their mask, and the list of clusters, chosen ones first. The list has each cluster's first index in
            the result, and the offset from there to its tokens in `order`.
        size: length of the results that are tokens of clusters.
        first, latest: numbers of first and latest tokens that are always added.
        places: results per program.
        wait: barrier for all threads of the program.
    """
    *ends, index_ref, live_ref, list_ref = refs
    begin, (total,) = pl.program_id(1) * places, index_ref.shape
    place = begin + jnp.arange(places, dtype=jnp.int32)

    @pl.when(begin < size)
    def _choose() -> None:
        live, nth = _chosen(scores_ref, sizes_ref, starts_ref, room_ref, list_ref, place, wait)
        inside = place < size
        index = backend.load(order_ref.at[jnp.where(live, nth, 0)], mask=inside, other=0)
        backend.store(index_ref.at[place], index, mask=inside)
        backend.store(live_ref.at[place], live, mask=inside)

    if ends:
        tail, seen = (ref[0] for ref in ends)
        rest = place - size
        pos = jnp.where(rest < first, rest, tail + rest - first)
        inside, held = (rest >= 0) & (place < total), (rest < first + latest) & (pos < seen)
        backend.store(index_ref.at[place], jnp.minimum(pos, order_ref.shape[0] - 1), mask=inside)
        backend.store(live_ref.at[place], held, mask=inside)


def _chosen(
    scores_ref: Any, sizes_ref: Any, starts_ref: Any, room_ref: Any, list_ref: Any, place: Array, wait: Any
) -> tuple[Array, Array]:
    """Return which results are a token of a chosen cluster, and that token's index in `order`."""
    (clusters,) = scores_ref.shape
    number = jnp.arange(list_ref.shape[1], dtype=jnp.int32)
    exists = number < clusters
    lengths = backend.load(sizes_ref.at[number], mask=exists, other=0)
    room = jnp.minimum(room_ref[0], jnp.sum(lengths))

    scores = keys.ordered(backend.load(scores_ref.at[number], mask=exists, other=-jnp.inf))
    last = keys.threshold(scores, room, lengths)
    above, equal = (jnp.where(mask, lengths, 0) for mask in keys.compared(scores, last))
    left = room - jnp.sum(above) - (jnp.cumsum(equal) - equal)
    lengths = above + jnp.clip(left, 0, equal)

    begins = jnp.cumsum(lengths) - lengths
    chosen = lengths > 0
    before, total = jnp.cumsum(chosen.astype(jnp.int32)), jnp.sum(chosen.astype(jnp.int32))
    rank = jnp.where(chosen, before - 1, total + number - before)
    list_ref[0, rank] = begins
    list_ref[1, rank] = backend.load(starts_ref.at[number], mask=chosen, other=0) - begins
    wait()

    def look(i: Array, nth: Array) -> Array:
        return jnp.where(place >= list_ref[0, i], place + list_ref[1, i], nth)

    return place < room, jax.lax.fori_loop(0, total, look, jnp.zeros_like(place))
