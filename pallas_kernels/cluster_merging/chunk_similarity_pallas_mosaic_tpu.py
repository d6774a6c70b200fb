"""Mosaic TPU kernel of `chunk_similarity`: for each even slot of a chunk, find the odd slot with the most similar key.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must match `reference.py` up to
rounding.

A program processes whole chunks. It loads even and odd slots separately, so that no key is moved in memory. float32
keys are loaded with a stride of two rows; 16-bit keys are the two halves of 32-bit words. In the products, odd slots
are along sublanes and even slots along lanes, so that the maximum over odd slots compares whole registers.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ..interpreter import interpreter
from ..kmeans import Nearest
from ..kmeans.nearest_pallas_mosaic_tpu import LANES, SUBLANES, column
from ..products import dot
from ..tuning import tuned
from .chunks import chunked
from .ranking import NONE, inverse_length, rank, unrank

LONGEST = 2048
"""Slots of the largest chunk. Two chunks must fit into VMEM."""

TILE = 256
"""Maximum number of even or odd slots per matmul."""


def unsupported_reason(keys: Array, first: Array, count: Array, chunk: int) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    if keys.dtype not in (jnp.bfloat16, jnp.float32):
        return f"keys are {keys.dtype}"
    if chunk % 2:
        return f"a chunk of {chunk} slots is odd"
    if chunk % (4 * SUBLANES) or (chunk > 2 * TILE and chunk % (2 * TILE)):
        return f"a chunk of {chunk} slots is not a multiple of {4 * SUBLANES}, or of {2 * TILE} if above {2 * TILE}"
    if chunk > LONGEST:
        return f"a chunk of {chunk} slots is longer than {LONGEST}"
    return None


def chunk_similarity(
    keys: Float[Array, "B K S H"],
    first: Int[Array, " B"],
    count: Int[Array, " B"],
    chunk: int,
    *,
    interpret: bool = False,
) -> Nearest:
    """Return the best edge of each even slot, [B, K, N, A]; see `api.chunk_similarity`."""
    keys, live = chunked(keys, first, count, chunk)
    keys = jnp.pad(keys, [(0, 0)] * (keys.ndim - 1) + [(0, -keys.shape[-1] % LANES)])
    *batch, chunk, dim = keys.shape
    chunks, half = math.prod(batch), chunk // 2
    case = {"chunks": chunks, "half": half, "head_dim": dim, "dtype": keys.dtype.name}
    together = min(chunks, tuned("chunk_similarity", case, {"chunks": max(1, 1024 // chunk)})["chunks"])
    odd = live[..., 1::2].reshape(chunks, 1, half).astype(jnp.int32)
    pairs = pl.BlockSpec((together, 1, half), lambda g: (g, 0, 0))
    best = pl.pallas_call(
        _body,
        grid=(pl.cdiv(chunks, together),),
        in_specs=[pl.BlockSpec((together, chunk, dim), lambda g: (g, 0, 0)), pairs],
        out_specs=pairs,
        out_shape=jax.ShapeDtypeStruct((chunks, 1, half), jnp.int32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=2 * chunks * half * half * dim,
            transcendentals=chunks * chunk,
            bytes_accessed=chunks * chunk * (dim * keys.dtype.itemsize + 4),
        ),
        interpret=interpreter(interpret),
        name="chunk_similarity",
    )(keys.reshape(chunks, chunk, dim), odd)
    return unrank(jnp.where(live[..., 0::2], best.reshape(*batch, half), NONE))


def _body(keys_ref: Any, live_ref: Any, best_ref: Any) -> None:
    """Write the ranks of the best edges of several chunks. `live_ref` tells which odd slots contain keys."""
    together, chunk = keys_ref.shape[:2]
    tile = min(chunk // 2, TILE)
    for c in range(together):
        for even in range(0, chunk // 2, tile):
            best_ref[c, :, even : even + tile] = _best(keys_ref.at[c], live_ref.at[c], even, tile)


def _best(keys_ref: Any, live_ref: Any, start: int, tile: int) -> Array:
    """Return the ranks [1, tile] of the best edges from `tile` even slots."""
    even = _every_second(keys_ref, start, tile, 0)
    # A matmul with ones puts the squared lengths along lanes.
    square = jnp.square(even.astype(jnp.float32))
    length = dot(jnp.ones((SUBLANES, keys_ref.shape[1]), jnp.float32), square, 1)[:1]
    inverse = jnp.where(length > 0, jax.lax.rsqrt(length), 0.0)
    best = jnp.full((SUBLANES, tile), NONE, jnp.int32)
    for first in range(0, keys_ref.shape[0] // 2, tile):
        odd = _every_second(keys_ref, first, tile, 1)
        target = first + jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
        ranks = rank(dot(odd, even, 1), inverse, inverse_length(odd)[:, None], target)
        ranks = jnp.where(column(live_ref[:, first : first + tile]) != 0, ranks, NONE)
        for i in range(0, tile, SUBLANES):
            best = jnp.maximum(best, ranks[i : i + SUBLANES])
    return jnp.max(best, axis=0, keepdims=True)


def _every_second(keys_ref: Any, start: int, size: int, parity: int) -> Float[Array, "S H"]:
    """Load the keys at the even (`parity` 0) or odd (1) slots of `size` pairs, beginning with pair `start`."""
    if keys_ref.dtype == jnp.float32:
        return keys_ref[pl.ds(2 * start + parity, size, stride=2), :]
    # A 32-bit word has the even slot's number in its low half and the odd slot's in its high half. Either half, followed
    # by zeros, is the same number in float32.
    words = pltpu.bitcast(keys_ref[pl.ds(2 * start, 2 * size), :], jnp.uint32)
    bits = words & jnp.uint32(0xFFFF0000) if parity else words << 16
    return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(keys_ref.dtype)
