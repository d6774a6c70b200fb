"""Triton kernels of `merge_clusters` and `copy_clusters`: merge tokens and close the gaps, or copy tokens.

`Op` in `api.py` calls them for the cases that `unsupported_reason` permits. Slots that contain tokens must match
`reference.py` up to rounding.

`merge_clusters` is two kernels. The first copies every remaining token to its new slot, one part of a chunk per
program. It only copies, so that many programs share a multiprocessor. The second overwrites some of these slots with
the means, and reads only tokens that are merged. A step thus reads and writes live tokens once and merged tokens twice.
Chunks after a sequence's tokens cost nothing.

Measured alternatives, on an H200:

- One kernel that accumulates in registers while it copies: 664 us for one layer with 8 sequences of 13264 tokens.
- Means as a matmul with zeros and ones: 214 us for a prompt's first step (32768 tokens, 8 heads). Adding one token at a
  time takes 116 us, and four at a time 135 us.
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
"""Slots of the smallest and of the largest supported chunk."""

KEPT = 16
"""Slots before the chunks that are copied at a time."""


def unsupported_reason(tokens: Clusters, *_: Any, chunk: int | None = None, **__: Any) -> str | None:
    """Return why these kernels do not support a case, or None if they do."""
    k, dim = tokens.k, tokens.k.shape[-1]
    if chunk is not None and (chunk & (chunk - 1) or not CHUNKS[0] <= chunk <= CHUNKS[1]):
        return f"a chunk of {chunk} slots is not a power of two from {CHUNKS[0]} to {CHUNKS[1]}"
    if reason := triton_unsupported():
        return reason
    if k.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"keys and values are {k.dtype}"
    if dim & (dim - 1) or dim < 16:
        return f"head dim {dim} is not a power of two of at least 16"
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
    """Merge tokens and close gaps; see the public function.

    Args:
        sizes: `pairs` of slots moved per program, `odd` slots averaged per program, and `warps`, instead of the tuned
            sizes.
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
    """Call the kernels. They are traced and lowered once for all layers."""
    batch, heads = tokens.k.shape[:2]
    chunks, half = target.shape[2:]
    fold = batch * heads
    gone = jnp.sum(target >= 0, axis=-1, dtype=jnp.int32)
    # Where each chunk's first token goes. The chunks before it are full, so only their merged tokens shift it.
    start = jnp.arange(chunks, dtype=jnp.int32) * chunk - (jnp.cumsum(gone, axis=-1, dtype=jnp.int32) - gone)
    arrays = [x.reshape(fold, *x.shape[2:]) for x in tokens]
    inputs = [*arrays, target.reshape(fold, chunks, half), start.reshape(fold, chunks), first, count]
    room = [] if into is None else [x.reshape(y.shape) for x, y in zip(into, arrays, strict=True)]
    edges = pl.BlockSpec((None, None, half), lambda h, n, i: (h, n, 0))
    begin = pl.BlockSpec((None, 1), lambda h, n, i: (h, n))
    sequence = pl.BlockSpec((1,), lambda h, n, i: (h // heads,))
    written = room
    for name, body, size in (("move_clusters", _move, pairs), ("merge_clusters", _merge, odd)):
        written = triton_call(
            functools.partial(body, size=size),
            grid=(fold, chunks, half // size),
            in_specs=[*map(entry, arrays), edges, begin, sequence, sequence, *map(entry, written)],
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
    """Copy tokens into other arrays; see the public function.

    Args:
        sizes: `rows` copied per program and `warps`, instead of the tuned sizes.
    """
    batch, heads, slots, dim = tokens.k.shape
    fold = batch * heads
    if sizes is None:
        case = {"heads": fold, "slots": slots, "head_dim": dim, "dtype": tokens.k.dtype.name}
        sizes = tuned("copy_clusters", case, {"rows": 64, "warps": 4})
    rows = sizes["rows"]
    arrays, written = ([x.reshape(fold, *x.shape[2:]) for x in of] for of in (tokens, into))

    def body(*refs: Any) -> None:
        *array_refs, size_ref = refs[: len(arrays) + 1]
        first, end = pl.program_id(1) * rows, size_ref[0]

        @pl.when(first < end)
        def _copy() -> None:
            slot = first + jnp.arange(rows, dtype=jnp.int32)
            # load everything first, so that no load waits for a store
            copied = [_load(ref, slot, slot < end) for ref in array_refs]
            for out_ref, x in zip(refs[-len(arrays) :], copied, strict=True):
                _store(out_ref, slot, x, slot < end)

    specs = [*map(entry, arrays)]
    copied = triton_call(
        body,
        grid=(fold, pl.cdiv(slots, rows)),
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
    """Pairs of an even and an odd slot of one chunk.

    Attributes:
        even, odd: slot numbers.
        even_live, odd_live: whether the slots contain a token.
        stays: whether the even slot's token is not merged.
        even_to, odd_to: slots that the tokens move to.
    """

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
    """Return `size` pairs of a chunk, from pair `begin` on."""
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


def _rows(ref: Any, slot: Array, mask: Array) -> tuple[tuple[Any, ...], Array]:
    """Return the index of entries by slot, and its mask. Entries are vectors or scalars."""
    if len(ref.shape) == 1:
        return (slot,), mask
    dim = ref.shape[1]
    return (slot[:, None], jnp.arange(dim, dtype=jnp.int32)[None]), jnp.broadcast_to(mask[:, None], (slot.size, dim))


def _load(ref: Any, slot: Array, mask: Array) -> Array:
    index, mask = _rows(ref, slot, mask)
    return backend.load(ref.at[*index], mask=mask, other=jnp.zeros((), ref.dtype))


def _store(ref: Any, slot: Array, values: Array, mask: Array) -> None:
    index, mask = _rows(ref, slot, mask)
    backend.store(ref.at[*index], values, mask=mask)


def _move(*refs: Any, size: int) -> None:
    """Move the remaining tokens of some pairs to their new slots. The first program also copies the slots before the
    chunks.
    """
    arrays, edges, outs = refs[:4], refs[4:8], refs[-4:]
    chunk, begin = pl.program_id(1), pl.program_id(2) * size
    target_ref, _, first_ref, count_ref = edges
    base = first_ref[0]

    @pl.when((chunk == 0) & (begin == 0))
    def _before() -> None:
        def keep(i: Array, _: None) -> None:
            slot = i * KEPT + jnp.arange(KEPT, dtype=jnp.int32)
            for ref, out_ref in zip(arrays, outs, strict=True):
                _store(out_ref, slot, _load(ref, slot, slot < base), slot < base)

        jax.lax.fori_loop(0, pl.cdiv(base, KEPT), keep, None)

    @pl.when(2 * (chunk * target_ref.shape[0] + begin) < count_ref[0])
    def _these() -> None:
        pairs = _pairs(chunk, begin, size, *edges)
        for ref, out_ref in zip(arrays, outs, strict=True):
            even, odd = _load(ref, pairs.even, pairs.stays), _load(ref, pairs.odd, pairs.odd_live)
            _store(out_ref, pairs.even_to, even, pairs.stays)
            _store(out_ref, pairs.odd_to, odd, pairs.odd_live)


def _merge(*refs: Any, size: int) -> None:
    """Write the means of the tokens merged into some pairs' odd slots. Each mean is accumulated one token at a time."""
    k_ref, v_ref, pos_ref, weight_ref, *edges = refs[:8]
    out_k_ref, out_v_ref, out_pos_ref, out_weight_ref = refs[-4:]
    target_ref, _, first_ref, count_ref = edges
    (half,) = target_ref.shape
    chunk, begin = pl.program_id(1), pl.program_id(2) * size
    first = first_ref[0] + chunk * (2 * half)
    pair, target = jnp.arange(half, dtype=jnp.int32), target_ref[...]
    gone = (target >= begin) & (target < begin + size) & (first + 2 * pair < first_ref[0] + count_ref[0])

    @pl.when(jnp.max(gone.astype(jnp.int32)) > 0)
    def _some() -> None:
        pairs = _pairs(chunk, begin, size, *edges)
        own = begin + jnp.arange(size, dtype=jnp.int32)
        joined = (target[None] == own[:, None]) & gone[None]  # [odd slots, even slots]

        def after(last: Int[Array, " O"]) -> Int[Array, " O"]:
            """Return the pair of the next even slot merged into each odd slot, `half` if there is none."""
            return jnp.min(jnp.where(joined & (pair[None] > last[:, None]), pair[None], half), axis=1)

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
