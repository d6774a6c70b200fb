"""Merging inside chunks on GPUs, as two Triton kernels.

The first moves every row that is left to its place, a part of a chunk a program, and does nothing but copy, so that many programs share a
multiprocessor. The second writes the means of what is merged over some of these rows, and reads only rows that are merged. So a step
reads and writes what is live once, what is merged twice, and chunks beyond a row's tokens cost nothing. (In one kernel, which holds what it
adds up in registers while it copies, a layer of 8 rows with 13264 tokens took 664 us on an H200. Means as products with zeros and ones
took 214 us of a prompt's first step, 32768 tokens in 8 heads, where one token after the other takes 116, and four at a time 135.)
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from ..triton import backend, entry, triton_call, triton_unsupported
from ..tuning import tuned
from .types import Clusters

CHUNKS = 32, 512
"""Places of the smallest and of the largest chunk."""

KEPT = 16
"""Places before the chunks that are copied at a time."""


def unsupported_reason(tokens: Clusters, *_: Any, chunk: int | None = None, **__: Any) -> str | None:
    """Why these kernels do not serve a case, or None if they do."""
    k, dim = tokens.k, tokens.k.shape[-1]
    if chunk is not None and (chunk & (chunk - 1) or not CHUNKS[0] <= chunk <= CHUNKS[1]):
        return f"a chunk of {chunk} places is not a power of two from {CHUNKS[0]} to {CHUNKS[1]}"
    if reason := triton_unsupported():
        return reason
    if k.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"keys and values are {k.dtype}"
    if dim & (dim - 1) or dim < 16:
        return f"head dim {dim} is not a power of two from 16 on"
    return None


def merge_clusters(
    tokens: Clusters,
    target: Int[Array, "B K N A"],
    first: Int[Array, " B"],
    count: Int[Array, " B"],
    chunk: int,
    into: Clusters | None = None,
    *,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> list[Array]:
    """Tokens merged and gaps closed; see the public function.

    Args:
        sizes: `pairs` of neighbours that a program moves, `odd` places of which one writes the means, and their `warps`, instead of the
            tuned ones.
    """
    if sizes is None:
        half, dim, dtype = target.shape[-1], tokens.k.shape[-1], tokens.k.dtype.name
        case = {"chunks": target.size // half, "half": half, "head_dim": dim, "dtype": dtype}
        default = {"pairs": min(32, half), "odd": min(16, half), "warps": 4}
        sizes = tuned("merge_clusters", case, default)
    return _call(tokens, target, first, count, into, chunk=chunk, **sizes, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("chunk", "pairs", "odd", "warps", "interpret"))
def _call(
    tokens: Clusters,
    target: Int[Array, "B K N A"],
    first: Int[Array, " B"],
    count: Int[Array, " B"],
    into: Clusters | None,
    *,
    chunk: int,
    pairs: int,
    odd: int,
    warps: int,
    interpret: bool,
) -> list[Array]:
    """The kernels, traced and lowered once for all layers."""
    batch, heads = tokens.k.shape[:2]
    chunks, half = target.shape[2:]
    fold = batch * heads
    gone = jnp.sum(target >= 0, axis=-1, dtype=jnp.int32)
    # Where each chunk's first token goes: the chunks before it are full, so only what they lose counts.
    start = jnp.arange(chunks, dtype=jnp.int32) * chunk - (jnp.cumsum(gone, axis=-1, dtype=jnp.int32) - gone)
    arrays = [x.reshape(fold, *x.shape[2:]) for x in tokens]
    inputs = [*arrays, target.reshape(fold, chunks, half), start.reshape(fold, chunks), first, count]
    room = [] if into is None else [x.reshape(y.shape) for x, y in zip(into, arrays, strict=True)]
    edges = pl.BlockSpec((None, None, half), lambda h, n, i: (h, n, 0))
    begin = pl.BlockSpec((None, 1), lambda h, n, i: (h, n))
    row = pl.BlockSpec((1,), lambda h, n, i: (h // heads,))
    written = room
    for name, body, size in (("move_clusters", _move, pairs), ("merge_clusters", _merge, odd)):
        written = triton_call(
            functools.partial(body, size=size),
            grid=(fold, chunks, half // size),
            in_specs=[*map(entry, arrays), edges, begin, row, row, *map(entry, written)],
            out_specs=[*map(entry, arrays)],
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays],
            input_output_aliases={len(inputs) + i: i for i in range(len(written))},
            warps=warps,
            stages=1,
            interpret=interpret,
            name=name,
        )(*inputs, *written)
    return [x.reshape(y.shape) for x, y in zip(written, tokens, strict=True)]


def copy_clusters(
    tokens: Clusters,
    size: Int[Array, " B"],
    into: Clusters,
    *,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> list[Array]:
    """Tokens as they are, elsewhere; see the public function.

    Args:
        sizes: `rows` that a program copies and its `warps`, instead of the tuned ones.
    """
    batch, heads, places, dim = tokens.k.shape
    fold = batch * heads
    if sizes is None:
        case = {"heads": fold, "places": places, "head_dim": dim, "dtype": tokens.k.dtype.name}
        sizes = tuned("copy_clusters", case, {"rows": 64, "warps": 4})
    rows = sizes["rows"]
    arrays, written = ([x.reshape(fold, *x.shape[2:]) for x in of] for of in (tokens, into))

    def body(*refs: Any) -> None:
        *array_refs, size_ref = refs[: len(arrays) + 1]
        first, end = pl.program_id(1) * rows, size_ref[0]

        @pl.when(first < end)
        def _copy() -> None:
            place = first + jnp.arange(rows, dtype=jnp.int32)
            copied = [_load(ref, place, place < end) for ref in array_refs]  # all of it first, so that nothing waits
            for out_ref, x in zip(refs[-len(arrays) :], copied, strict=True):
                _store(out_ref, place, x, place < end)

    specs = [*map(entry, arrays)]
    copied = triton_call(
        body,
        grid=(fold, pl.cdiv(places, rows)),
        in_specs=[*specs, pl.BlockSpec((1,), lambda h, i: (h // heads,)), *specs],
        out_specs=specs,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays],
        input_output_aliases={len(arrays) + 1 + i: i for i in range(len(arrays))},
        warps=sizes["warps"],
        stages=1,
        interpret=interpret,
        name="copy_clusters",
    )(*arrays, size, *written)
    return [x.reshape(y.shape) for x, y in zip(copied, tokens, strict=True)]


class _Pairs(NamedTuple):
    """Some neighbours of one chunk, an even and an odd place each: where they are, what is there, what stays, and where it goes."""

    even: Array
    odd: Array
    even_live: Array
    odd_live: Array
    stays: Array
    even_to: Array
    odd_to: Array


def _pairs(
    chunk: Array, begin: Array, size: int, target_ref: Any, start_ref: Any, first_ref: Any, count_ref: Any
) -> _Pairs:
    """The `size` pairs of a chunk from `begin` on."""
    (half,) = target_ref.shape
    base = first_ref[0]
    first, end = base + chunk * (2 * half), base + count_ref[0]

    def of(pair: Array) -> tuple[Array, Array, Array, Array]:
        even = first + 2 * pair
        even_live, odd_live = even < end, even + 1 < end
        stays = even_live & (backend.load(target_ref.at[pair]) < 0)
        return even, even_live, odd_live, stays

    own = begin + jnp.arange(size, dtype=jnp.int32)
    every = jnp.arange(half, dtype=jnp.int32)
    _, _, odd_live, stays = of(every)
    left = stays.astype(jnp.int32) + odd_live.astype(jnp.int32)
    before = base + start_ref[0] + jnp.sum(jnp.where(every < begin, left, 0))
    even, even_live, odd_live, stays = of(own)
    left = stays.astype(jnp.int32) + odd_live.astype(jnp.int32)
    even_to = before + jnp.cumsum(left) - left
    return _Pairs(even, even + 1, even_live, odd_live, stays, even_to, even_to + stays.astype(jnp.int32))


def _rows(ref: Any, place: Array, mask: Array) -> tuple[tuple[Any, ...], Array]:
    """How to index entries by place, and which are meant: rows, or numbers."""
    if len(ref.shape) == 1:
        return (place,), mask
    dim = ref.shape[1]
    return (place[:, None], jnp.arange(dim, dtype=jnp.int32)[None]), jnp.broadcast_to(mask[:, None], (place.size, dim))


def _load(ref: Any, place: Array, mask: Array) -> Array:
    index, mask = _rows(ref, place, mask)
    return backend.load(ref.at[*index], mask=mask, other=jnp.zeros((), ref.dtype))


def _store(ref: Any, place: Array, values: Array, mask: Array) -> None:
    index, mask = _rows(ref, place, mask)
    backend.store(ref.at[*index], values, mask=mask)


def _move(*refs: Any, size: int) -> None:
    """What stays of some pairs, to where it goes; the first program also does what is before the chunks."""
    arrays, edges, outs = refs[:4], refs[4:8], refs[-4:]
    chunk, begin = pl.program_id(1), pl.program_id(2) * size
    target_ref, _, first_ref, count_ref = edges
    base = first_ref[0]

    @pl.when((chunk == 0) & (begin == 0))
    def _before() -> None:
        def keep(i: Array, _: None) -> None:
            place = i * KEPT + jnp.arange(KEPT, dtype=jnp.int32)
            for ref, out_ref in zip(arrays, outs, strict=True):
                _store(out_ref, place, _load(ref, place, place < base), place < base)

        jax.lax.fori_loop(0, pl.cdiv(base, KEPT), keep, None)

    @pl.when(2 * (chunk * target_ref.shape[0] + begin) < count_ref[0])
    def _these() -> None:
        pairs = _pairs(chunk, begin, size, *edges)
        for ref, out_ref in zip(arrays, outs, strict=True):
            even, odd = _load(ref, pairs.even, pairs.stays), _load(ref, pairs.odd, pairs.odd_live)
            _store(out_ref, pairs.even_to, even, pairs.stays)
            _store(out_ref, pairs.odd_to, odd, pairs.odd_live)


def _merge(*refs: Any, size: int) -> None:
    """The means of what is merged into the odd places of some pairs; of each, one token after the other."""
    k_ref, v_ref, pos_ref, weight_ref, *edges = refs[:8]
    out_k_ref, out_v_ref, out_pos_ref, out_weight_ref = refs[-4:]
    target_ref, _, first_ref, count_ref = edges
    (half,) = target_ref.shape
    chunk, begin = pl.program_id(1), pl.program_id(2) * size
    first = first_ref[0] + chunk * (2 * half)
    place, target = jnp.arange(half, dtype=jnp.int32), target_ref[...]
    gone = (target >= begin) & (target < begin + size) & (first + 2 * place < first_ref[0] + count_ref[0])

    @pl.when(jnp.max(gone.astype(jnp.int32)) > 0)
    def _some() -> None:
        pairs = _pairs(chunk, begin, size, *edges)
        own = begin + jnp.arange(size, dtype=jnp.int32)
        joined = (target[None] == own[:, None]) & gone[None]  # [odd places, even places]

        def after(last: Int[Array, " O"]) -> Int[Array, " O"]:
            """The next even place that is joined to each odd one, `half` if there is none."""
            return jnp.min(jnp.where(joined & (place[None] > last[:, None]), place[None], half), axis=1)

        def add(state: tuple[Array, ...]) -> tuple[Array, ...]:
            even, degree, newest, *totals = state
            at, there = first + 2 * even, even < half
            weight = _load(weight_ref, at, there)
            totals = [
                total + weight[:, None] * _load(ref, at, there).astype(jnp.float32)
                for total, ref in zip(totals, (k_ref, v_ref), strict=True)
            ]
            return after(even), degree + weight, jnp.maximum(newest, _load(pos_ref, at, there)), *totals

        even = after(jnp.full((size,), -1, jnp.int32))
        grown = even < half
        weight = _load(weight_ref, pairs.odd, grown)
        centres = (weight[:, None] * _load(ref, pairs.odd, grown).astype(jnp.float32) for ref in (k_ref, v_ref))
        start = even, weight, _load(pos_ref, pairs.odd, grown), *centres
        _, degree, newest, *totals = jax.lax.while_loop(lambda state: jnp.min(state[0]) < half, add, start)
        _store(out_pos_ref, pairs.odd_to, newest, grown)
        _store(out_weight_ref, pairs.odd_to, degree, grown)
        for total, out_ref in zip(totals, (out_k_ref, out_v_ref), strict=True):
            mean = total / jnp.maximum(degree, 1.0)[:, None]
            _store(out_ref, pairs.odd_to, mean.astype(out_ref.dtype), grown)
