"""Merging inside chunks on GPUs, as a Triton body.

A program holds a block of channels of one chunk: it adds what is merged to where it is merged into, as a product with zeros and
ones, and writes every row that is left straight to its place. So a step reads and writes what is live once, and chunks beyond
a row's tokens cost nothing.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ..dispatch import triton
from ..tuning import tuned

if TYPE_CHECKING:
    from .api import Clusters

CHUNKS = 32, 512
"""Places of the smallest chunk, whose half the tensor cores take, and of the largest, whose zeros and ones fit in registers."""

KEPT = 16
"""Places before the chunks that are copied at a time."""


def refuses_rows(k: Array) -> str | None:
    """Why keys and values like these are not moved by these bodies, or None if they are."""
    dim = k.shape[-1]
    if reason := triton():
        return reason
    if k.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"keys and values are {k.dtype}"
    if dim & (dim - 1) or dim < 16:
        return f"head dim {dim} is not a power of two from 16 on"
    return None


def refuses(k: Array, chunk: int) -> str | None:
    """Why merging in chunks of so many places is not served, or None if it is."""
    if chunk & (chunk - 1) or not CHUNKS[0] <= chunk <= CHUNKS[1]:
        return f"a chunk of {chunk} places is not a power of two from {CHUNKS[0]} to {CHUNKS[1]}"
    return refuses_rows(k)


def merge_clusters(
    tokens: "Clusters",
    target: Int[Array, "B K N A"],
    first: Int[Array, " B"],
    count: Int[Array, " B"],
    chunk: int,
    into: "Clusters | None" = None,
    *,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> list[Array]:
    """Tokens merged and gaps closed; see the public function.

    Args:
        sizes: `channels` of a program and its `warps`, instead of the tuned ones.
    """
    dim = tokens.k.shape[-1]
    if sizes is None:
        default = {"channels": min(128, dim), "warps": 8}
        case = {"chunks": target.size // target.shape[-1], "half": target.shape[-1], "head_dim": dim}
        sizes = tuned("merge_clusters", case | {"dtype": tokens.k.dtype.name}, default)
    return _call(tokens, target, first, count, into, chunk=chunk, **sizes, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("chunk", "channels", "warps", "interpret"))
def _call(
    tokens: "Clusters",
    target: Int[Array, "B K N A"],
    first: Int[Array, " B"],
    count: Int[Array, " B"],
    into: "Clusters | None",
    *,
    chunk: int,
    channels: int,
    warps: int,
    interpret: bool,
) -> list[Array]:
    """The kernel, traced and lowered once for all layers."""
    batch, heads, places, dim = tokens.k.shape
    chunks, half = target.shape[2:]
    fold = batch * heads
    gone = jnp.sum(target >= 0, axis=-1, dtype=jnp.int32)
    # Where each chunk's first token goes: the chunks before it are full, so only what they lose counts.
    start = jnp.arange(chunks, dtype=jnp.int32) * chunk - (jnp.cumsum(gone, axis=-1, dtype=jnp.int32) - gone)
    arrays = [x.reshape(fold, *x.shape[2:]) for x in tokens]
    inputs = [*arrays, target.reshape(fold, chunks, half), start.reshape(fold, chunks), first, count]
    written = [] if into is None else [x.reshape(y.shape) for x, y in zip(into, arrays, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas import triton as backend

        merged = pl.pallas_call(
            functools.partial(_body, heads=heads, channels=channels),
            grid=(2 * (dim // channels), chunks, fold),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays],
            input_output_aliases={len(inputs) + i: i for i in range(len(written))},
            compiler_params=backend.CompilerParams(num_warps=warps, num_stages=1),
            interpret=interpret,
            name="merge_clusters",
        )(*inputs, *written)
    return [x.reshape(y.shape) for x, y in zip(merged, tokens, strict=True)]


def copy_clusters(
    tokens: "Clusters",
    size: Int[Array, " B"],
    into: "Clusters",
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
        from jax.experimental.pallas import triton as backend

        *array_refs, size_ref = refs[: len(arrays) + 1]
        first, end = pl.program_id(1) * rows, size_ref[0]

        @pl.when(first < end)
        def _copy() -> None:
            place = first + jnp.arange(rows, dtype=jnp.int32)
            moved = []
            for ref in array_refs:  # all is read before anything is written, so that nothing waits
                wide = len(ref.shape) == 2
                index = (place[:, None], jnp.arange(dim, dtype=jnp.int32)[None]) if wide else (place,)
                mask = jnp.broadcast_to(place[:, None] < end, (rows, dim)) if wide else place < end
                moved.append((index, mask, backend.load(ref.at[*index], mask=mask, other=jnp.zeros((), ref.dtype))))
            for out_ref, (index, mask, x) in zip(refs[-len(arrays) :], moved, strict=True):
                backend.store(out_ref.at[*index], x, mask=mask)

    specs = [pl.BlockSpec((None, *x.shape[1:]), lambda h, i, n=x.ndim: (h,) + (0,) * (n - 1)) for x in arrays]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas import triton as backend

        copied = pl.pallas_call(
            body,
            grid=(fold, pl.cdiv(places, rows)),
            in_specs=[*specs, pl.BlockSpec((1,), lambda h, i: (h // heads,)), *specs],
            out_specs=specs,
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays],
            input_output_aliases={len(arrays) + 1 + i: i for i in range(len(arrays))},
            compiler_params=backend.CompilerParams(num_warps=sizes["warps"], num_stages=1),
            interpret=interpret,
            name="copy_clusters",
        )(*arrays, size, *written)
    return [x.reshape(y.shape) for x, y in zip(copied, tokens, strict=True)]


def _body(*refs: Any, heads: int, channels: int) -> None:
    """A block of channels of one chunk, of keys or of values; the first block's program also does positions and weights."""
    k_ref, v_ref, pos_ref, weight_ref, target_ref, start_ref, first_ref, count_ref = refs[:8]
    out_k_ref, out_v_ref, out_pos_ref, out_weight_ref = refs[-4:]
    half, blocks = target_ref.shape[2], k_ref.shape[2] // channels
    block, chunk, head = (pl.program_id(axis) for axis in range(3))
    base = first_ref[head // heads]
    first, end = base + chunk * (2 * half), base + count_ref[head // heads]
    channel = (block % blocks) * channels + jnp.arange(channels, dtype=jnp.int32)[None]

    def both(ref: Any, out_ref: Any) -> None:
        marks = [(pos_ref, out_pos_ref), (weight_ref, out_weight_ref)]

        @pl.when(chunk == 0)
        def _before() -> None:
            arrays = [(ref, out_ref), *(marks if ref is k_ref else [])]
            jax.lax.fori_loop(0, pl.cdiv(base, KEPT), lambda i, _: _keep(arrays, head, i, base, channel), None)

        @pl.when(first < end)
        def _chunk() -> None:
            edges = target_ref.at[head, chunk], base + start_ref[head, chunk]
            _merge((ref, out_ref), marks, ref is k_ref and block == 0, edges, head, first, end, channel)

    pl.when(block < blocks)(lambda: both(k_ref, out_k_ref))
    pl.when(block >= blocks)(lambda: both(v_ref, out_v_ref))


def _keep(arrays: Sequence[tuple[Any, Any]], head: Array, i: Array, base: Array, channel: Array) -> None:
    """Some of the places before the chunks."""
    from jax.experimental.pallas import triton as backend

    at = i * KEPT + jnp.arange(KEPT, dtype=jnp.int32)
    for ref, out_ref in arrays:
        wide = len(ref.shape) == 3
        index = (head, at[:, None], channel) if wide else (head, at)
        mask = jnp.broadcast_to(at[:, None] < base, (KEPT, channel.size)) if wide else at < base
        kept = backend.load(ref.at[*index], mask=mask, other=jnp.zeros((), ref.dtype))
        backend.store(out_ref.at[*index], kept, mask=mask)


def _merge(
    rows: tuple[Any, Any],
    marks: Sequence[tuple[Any, Any]],
    marked: Any,
    edges: tuple[Any, Array],
    head: Array,
    first: Array,
    end: Array,
    channel: Array,
) -> None:
    """Channels of one chunk.

    Args:
        rows: the array and where its rows go.
        marks: positions and where they go, weights and where they go; `marked` says whether this program does them.
        edges: the chunk's targets, and where its first token goes.
        first, end: the chunk's first place, and the one after the head's last.
    """
    from jax.experimental.pallas import triton as backend

    (ref, out_ref), ((pos_ref, out_pos_ref), (weight_ref, out_weight_ref)) = rows, marks
    target_ref, start = edges
    half, channels = target_ref.shape[0], channel.size
    pair = jnp.arange(half, dtype=jnp.int32)
    even, odd = first + 2 * pair, first + 2 * pair + 1
    even_live, odd_live = even < end, odd < end
    even_mask, odd_mask = (jnp.broadcast_to(live[:, None], (half, channels)) for live in (even_live, odd_live))
    zero = jnp.zeros((), ref.dtype)
    even_rows = backend.load(ref.at[head, even[:, None], channel], mask=even_mask, other=zero)
    odd_rows = backend.load(ref.at[head, odd[:, None], channel], mask=odd_mask, other=zero)
    even_weight = backend.load(weight_ref.at[head, even], mask=even_live, other=0.0)
    odd_weight = backend.load(weight_ref.at[head, odd], mask=odd_live, other=0.0)

    target = target_ref[...]
    gone = even_live & (target >= 0)
    stays = even_live & (target < 0)
    joined = (target[None] == pair[:, None]) & gone[None]  # [odd places, even places]
    degree = odd_weight + jnp.sum(jnp.where(joined, even_weight[None], 0.0), axis=1)
    left = stays.astype(jnp.int32) + odd_live.astype(jnp.int32)
    even_to = start + jnp.cumsum(left) - left
    odd_to = even_to + stays.astype(jnp.int32)

    even_to_mask = jnp.broadcast_to(stays[:, None], (half, channels))
    backend.store(out_ref.at[head, even_to[:, None], channel], even_rows, mask=even_to_mask)
    own = odd_rows.astype(jnp.float32)
    mean = (odd_weight[:, None] * own + _added(joined, even_weight, even_rows)) / jnp.maximum(degree, 1.0)[:, None]
    centroid = jnp.where((degree > odd_weight)[:, None], mean, own).astype(ref.dtype)
    backend.store(out_ref.at[head, odd_to[:, None], channel], centroid, mask=odd_mask)

    @pl.when(marked)
    def _mark() -> None:
        even_pos = backend.load(pos_ref.at[head, even], mask=even_live, other=-1)
        odd_pos = backend.load(pos_ref.at[head, odd], mask=odd_live, other=-1)
        newest = jnp.maximum(odd_pos, jnp.max(jnp.where(joined, even_pos[None], -1), axis=1))
        backend.store(out_pos_ref.at[head, even_to], even_pos, mask=stays)
        backend.store(out_pos_ref.at[head, odd_to], newest, mask=odd_live)
        backend.store(out_weight_ref.at[head, even_to], even_weight, mask=stays)
        backend.store(out_weight_ref.at[head, odd_to], degree, mask=odd_live)


def _added(joined: Array, weight: Float[Array, " A"], rows: Float[Array, "A W"]) -> Float[Array, "O W"]:
    """For each odd place the sum of the rows joined to it, each times its weight.

    The tensor cores multiply numbers of 8 bits without rounding. Rows of bfloat16 have so many, and a weight is the exact sum of three
    such numbers, of which the first is all up to 256. Of a row in float32 as much goes for its product with the weight. So nothing is lost,
    in a fraction of the time of a product in float32.
    """
    if rows.dtype != jnp.bfloat16:
        return _products(joined.astype(jnp.float32), weight[:, None] * rows.astype(jnp.float32), of_rows=True)
    shares = jnp.where(joined, weight[None], 0.0)
    return jax.lax.cond(
        jnp.max(weight) <= 256,
        lambda: _product(shares, rows.astype(jnp.float32)),
        lambda: _products(shares, rows.astype(jnp.float32), of_rows=False),
    )


def _products(left: Float[Array, "O A"], right: Float[Array, "A W"], *, of_rows: bool) -> Float[Array, "O W"]:
    """A product of which one side has no more than 8 bits and the other is cut into three parts that have."""
    whole, total = right if of_rows else left, jnp.zeros((left.shape[0], right.shape[1]), jnp.float32)
    for _ in range(3):
        # Cut off rather than rounded: XLA, interpreting, would leave out a conversion to bfloat16 and back.
        bits = jax.lax.bitcast_convert_type(whole, jnp.int32) & jnp.int32(-(1 << 16))
        part = jax.lax.bitcast_convert_type(bits, jnp.float32)
        total += _product(left, part) if of_rows else _product(part, right)
        whole = whole - part
    return total


def _product(left: Float[Array, "O A"], right: Float[Array, "A W"]) -> Float[Array, "O W"]:
    """A product of numbers of 8 bits."""
    left, right = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16)
    return jax.lax.dot_general(left, right, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
