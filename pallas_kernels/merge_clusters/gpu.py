"""Merging inside chunks on GPUs, as a Triton body.

A program holds a block of channels of one chunk: it adds what is merged to where it is merged into, as a product with zeros and
ones, and writes every row that is left straight to its place. So a step reads and writes what is live once, and chunks beyond
a row's tokens cost nothing.
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ..dispatch import triton
from ..tuning import tuned

CHUNKS = 32, 512
"""Places of the smallest chunk, whose half the tensor cores take, and of the largest, whose zeros and ones fit in registers."""


def refuses(kv: Array, chunks: int) -> str | None:
    """Why this body does not serve a case, or None if it does."""
    places, width = kv.shape[-2:]
    chunk = places // chunks
    if reason := triton():
        return reason
    if kv.dtype != jnp.float32:
        return f"keys and values are {kv.dtype}"
    if width & (width - 1) or width < 16:
        return f"rows of {width} channels are not a power of two from 16 on"
    if chunk & (chunk - 1) or not CHUNKS[0] <= chunk <= CHUNKS[1]:
        return f"a chunk of {chunk} places is not a power of two from {CHUNKS[0]} to {CHUNKS[1]}"
    return None


def merge_clusters(
    kv: Float[Array, "B K S W"],
    pos: Int[Array, "B K S"],
    weight: Float[Array, "B K S"],
    target: Int[Array, "B K N A"],
    count: Int[Array, " B"],
    into: tuple[Float[Array, "B K S W"], Int[Array, "B K S"], Float[Array, "B K S"]] | None = None,
    *,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> tuple[Float[Array, "B K S W"], Int[Array, "B K S"], Float[Array, "B K S"]]:
    """Tokens merged and gaps closed; see the public function.

    Args:
        sizes: `channels` of a program and its `warps`, instead of the tuned ones.
    """
    if sizes is None:
        # Of 32768 places, 8 heads, 256 channels and chunks of 256 on an H200: 289 us; with 64 channels and 4 warps 328, with 32 channels 478.
        default = {"channels": min(128, kv.shape[-1]), "warps": 8}
        case = {"chunks": target.size // target.shape[-1], "half": target.shape[-1], "width": kv.shape[-1]}
        sizes = tuned("merge_clusters", case, default)
    return _call(kv, pos, weight, target, count, into, **sizes, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("channels", "warps", "interpret"))
def _call(
    kv: Float[Array, "B K S W"],
    pos: Int[Array, "B K S"],
    weight: Float[Array, "B K S"],
    target: Int[Array, "B K N A"],
    count: Int[Array, " B"],
    into: tuple[Array, Array, Array] | None,
    *,
    channels: int,
    warps: int,
    interpret: bool,
) -> tuple[Float[Array, "B K S W"], Int[Array, "B K S"], Float[Array, "B K S"]]:
    """The kernel, traced and lowered once for all layers."""
    batch, heads, places, width = kv.shape
    chunks, half = target.shape[2:]
    fold = batch * heads
    gone = jnp.sum(target >= 0, axis=-1, dtype=jnp.int32)
    # Where each chunk's first token goes: the chunks before it are full, so only what they lose counts.
    start = jnp.arange(chunks, dtype=jnp.int32) * (2 * half) - (jnp.cumsum(gone, axis=-1, dtype=jnp.int32) - gone)
    tokens = [kv.reshape(fold, places, width), pos.reshape(fold, places), weight.reshape(fold, places)]
    inputs = [
        *tokens,
        target.reshape(fold, chunks, half),
        start.reshape(fold, chunks),
        jnp.broadcast_to(count[:, None], (batch, heads)).reshape(fold),
    ]
    written = [] if into is None else [x.reshape(y.shape) for x, y in zip(into, tokens, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas import triton as backend

        merged = pl.pallas_call(
            functools.partial(_body, channels=channels),
            grid=(width // channels, chunks, fold),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tokens],
            input_output_aliases={len(inputs) + i: i for i in range(len(written))},
            compiler_params=backend.CompilerParams(num_warps=warps, num_stages=1),
            interpret=interpret,
            name="merge_clusters",
        )(*inputs, *written)
    new_kv, new_pos, new_weight = (x.reshape(y.shape) for x, y in zip(merged, (kv, pos, weight), strict=True))
    return new_kv, new_pos, new_weight


def _body(*refs: Any, channels: int) -> None:
    """A block of channels of one chunk; the first block's program also does positions and weights."""
    from jax.experimental.pallas import triton as backend

    kv_ref, pos_ref, weight_ref, target_ref, start_ref, count_ref = refs[:6]
    out_ref, out_pos_ref, out_weight_ref = refs[-3:]
    half = target_ref.shape[2]
    block, chunk, head = (pl.program_id(axis) for axis in range(3))
    count, first = count_ref[head], chunk * (2 * half)

    @pl.when(first < count)
    def _merge() -> None:
        pair = jnp.arange(half, dtype=jnp.int32)
        channel = block * channels + jnp.arange(channels, dtype=jnp.int32)[None]
        even, odd = first + 2 * pair, first + 2 * pair + 1
        target = target_ref[head, chunk]
        even_live, odd_live = even < count, odd < count
        gone = even_live & (target >= 0)
        stays = even_live & (target < 0)
        joined = (target[None] == pair[:, None]) & gone[None]  # [odd places, even places]

        even_weight = backend.load(weight_ref.at[head, even], mask=even_live, other=0.0)
        odd_weight = backend.load(weight_ref.at[head, odd], mask=odd_live, other=0.0)
        degree = odd_weight + jnp.sum(jnp.where(joined, even_weight[None], 0.0), axis=1)
        left = stays.astype(jnp.int32) + odd_live.astype(jnp.int32)
        even_to = start_ref[head, chunk] + jnp.cumsum(left) - left
        odd_to = even_to + stays.astype(jnp.int32)

        even_mask = jnp.broadcast_to(even_live[:, None], (half, channels))
        odd_mask = jnp.broadcast_to(odd_live[:, None], (half, channels))
        even_kv = backend.load(kv_ref.at[head, even[:, None], channel], mask=even_mask, other=0.0)
        odd_kv = backend.load(kv_ref.at[head, odd[:, None], channel], mask=odd_mask, other=0.0)
        even_to_mask = jnp.broadcast_to(stays[:, None], (half, channels))
        backend.store(out_ref.at[head, even_to[:, None], channel], even_kv, mask=even_to_mask)
        total = odd_weight[:, None] * odd_kv + _chosen(joined, even_weight[:, None] * even_kv)
        mean = total / jnp.maximum(degree, 1.0)[:, None]
        centroid = jnp.where((degree > odd_weight)[:, None], mean, odd_kv)
        backend.store(out_ref.at[head, odd_to[:, None], channel], centroid, mask=odd_mask)

        @pl.when(block == 0)
        def _mark() -> None:
            even_pos = backend.load(pos_ref.at[head, even], mask=even_live, other=-1)
            odd_pos = backend.load(pos_ref.at[head, odd], mask=odd_live, other=-1)
            newest = jnp.maximum(odd_pos, jnp.max(jnp.where(joined, even_pos[None], -1), axis=1))
            backend.store(out_pos_ref.at[head, even_to], even_pos, mask=stays)
            backend.store(out_pos_ref.at[head, odd_to], newest, mask=odd_live)
            backend.store(out_weight_ref.at[head, even_to], even_weight, mask=stays)
            backend.store(out_weight_ref.at[head, odd_to], degree, mask=odd_live)


def _chosen(joined: Array, rows: Float[Array, "A W"]) -> Float[Array, "O W"]:
    """For each odd place the sum of the rows joined to it.

    A float32 row is the exact sum of three of 8 bits each, which the tensor cores multiply by zeros and ones without rounding:
    nothing is lost, and it takes a fraction of the time of a product in float32.
    """
    chosen = joined.astype(jnp.bfloat16)
    total = jnp.zeros(rows.shape, jnp.float32)
    for _ in range(3):
        # Cut off rather than rounded: XLA, interpreting, would leave out a conversion to bfloat16 and back.
        bits = jax.lax.bitcast_convert_type(rows, jnp.int32) & jnp.int32(-(1 << 16))
        part = jax.lax.bitcast_convert_type(bits, jnp.float32)
        total += jax.lax.dot_general(
            chosen, part.astype(jnp.bfloat16), (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        rows = rows - part
    return total
