"""Triton kernels of `window_scores`: attention of a prompt's last queries to each token.

`Op` in `api.py` calls them for the cases that `unsupported_reason` permits. Results must match `reference.py` up to
rounding.

The first kernel computes the softmax normalisers, the second the scores.

All of a window's queries that read one KV head are rows of one matrix. Each kernel reads the keys once. Tokens outside
the range that a sequence observes are not read.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ..masking import MASKED
from ..products import dot
from ..triton import backend, triton_call, triton_unsupported
from ..tuning import tuned
from .types import Observers


def unsupported_reason(
    observers: Observers, k: Array, *_: Any, chunk: int, pos: Array | None = None, **__: Any
) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    if pos is not None:
        return "positions are given by `pos`"
    if observers.sinks is not None:
        return "there are attention sinks"
    dim = k.shape[-1]
    if reason := triton_unsupported(dim=dim):
        return reason
    if chunk & (chunk - 1) or chunk > 32:
        return f"a chunk of {chunk} tokens is not a power of two up to 32"
    if k.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"keys are {k.dtype}"
    return None


def window_scores(
    observers: Observers,
    k: Float[Array, "B T K H"],
    first: Int[Array, " B"] | None,
    stop: Int[Array, " B"],
    *,
    scale: float,
    sliding_window: int | None,
    chunk: int,
    pos: None = None,
    sizes: dict[str, int] | None = None,
    interpret: bool = False,
) -> Float[Array, "B K M"]:
    """Sum the observers' attention to each chunk of the tokens from `first` to `stop`.

    Args:
        observers: the observing queries.
        k: keys.
        first: first observed token, None for the first of all.
        stop: end of the observed tokens.
        scale, sliding_window, chunk: see the public function.
        pos: not supported.
        sizes: `rows` (queries at a time), `block` (tokens at a time), `splits` (programs per head in the first kernel),
            `warps` and `stages`, instead of the tuned sizes.
        interpret: run the kernels in interpret mode.
    """
    first = jnp.zeros_like(stop) if first is None else first
    batch, length, kv_heads, dim = k.shape
    rows = pl.next_power_of_2(observers.q.shape[2]) * pl.next_power_of_2(observers.q.shape[3])
    sizes = sizes or _sizes(batch * kv_heads, rows, length, dim, k.dtype)
    return _call(
        observers,
        k,
        first,
        stop,
        scale=scale,
        sliding_window=sliding_window,
        chunk=chunk,
        sizes=tuple(sizes.items()),
        interpret=interpret,
    )


@partial(jax.jit, static_argnames=("scale", "sliding_window", "chunk", "sizes", "interpret"))
def _call(
    observers: Observers,
    k: Float[Array, "B T K H"],
    first: Int[Array, " B"],
    stop: Int[Array, " B"],
    *,
    scale: float,
    sliding_window: int | None,
    chunk: int,
    sizes: tuple[tuple[str, int], ...],
    interpret: bool,
) -> Float[Array, "B K M"]:
    """Call both kernels. They are traced and lowered once for all layers."""
    batch, length, kv_heads, dim = k.shape
    group = observers.q.shape[3]
    q, pos, wide = _rows(observers)
    rows, size = q.shape[2], dict(sizes)
    tile, block = min(max(size["rows"], wide), rows), max(size["block"], chunk)
    part = pl.cdiv(length, size["splits"] * block) * block
    splits = pl.cdiv(length, part)
    begin = first if sliding_window is None else jnp.maximum(first, observers.pos[:, 0] + 1 - sliding_window)
    begin = jnp.maximum(begin - first, 0) // block * block  # relative to `first`, in whole blocks
    bounds = jnp.stack([first, stop, begin], axis=-1).astype(jnp.int32)
    options: dict[str, Any] = {"warps": size["warps"], "stages": size["stages"], "interpret": interpret}
    see = partial(_see, scale=scale, sliding_window=sliding_window)
    tokens = pl.BlockSpec((None, length, None, dim), lambda b, h, *_: (b, 0, h, 0))
    three = pl.BlockSpec((None, 3), lambda b, *_: (b, 0))

    logsumexp = triton_call(
        partial(_normalise, see=see, block=block, part=part),
        grid=(batch, kv_heads, splits, rows // tile),
        in_specs=[
            pl.BlockSpec((None, None, tile, dim), lambda b, h, s, r: (b, h, r, 0)),
            pl.BlockSpec((None, tile), lambda b, h, s, r: (b, r)),
            tokens,
            three,
        ],
        out_specs=pl.BlockSpec((None, None, None, tile), lambda b, h, s, r: (b, h, s, r)),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, splits, rows), jnp.float32),
        name="window_normalisers",
        **options,
    )(q, pos, k, bounds)
    logsumexp = jax.nn.logsumexp(logsumexp, axis=2)

    columns = pl.cdiv(length, chunk)
    return triton_call(
        partial(_score, see=see, block=block, tile=tile, wide=wide, group=group, chunk=chunk),
        grid=(batch, kv_heads, pl.cdiv(length, block)),
        in_specs=[
            pl.BlockSpec((None, None, rows, dim), lambda b, h, t: (b, h, 0, 0)),
            pl.BlockSpec((None, rows), lambda b, h, t: (b, 0)),
            tokens,
            three,
            pl.BlockSpec((None, None, rows), lambda b, h, t: (b, h, 0)),
        ],
        out_specs=pl.BlockSpec((None, None, columns), lambda b, h, t: (b, h, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, columns), jnp.float32),
        name="window_scores",
        **options,
    )(q, pos, k, bounds, logsumexp)


def _sizes(fold: int, rows: int, length: int, dim: int, dtype: Any) -> dict[str, int]:
    """Return block sizes for `fold` sequences × KV heads with `rows` queries: enough programs to fill the device."""
    wide = jnp.dtype(dtype).itemsize > 2
    tile = min(rows, 32 if wide else 128)
    splits = max(1, min(256 // (fold * (rows // tile)), length // 256))
    case = {"heads": fold, "rows": rows, "tokens": length, "head_dim": dim, "dtype": jnp.dtype(dtype).name}
    return tuned(
        "window_scores",
        case,
        {"rows": tile, "block": 32 if wide else 64, "splits": splits, "warps": 4, "stages": 3},
    )


def _rows(observers: Observers) -> tuple[Float[Array, "B K R H"], Int[Array, "B R"], int]:
    """Return queries as rows, padded to powers of two by masked queries, and the number of rows per token."""
    batch, kv_heads, window, group, dim = observers.q.shape
    wide, tall = pl.next_power_of_2(group), pl.next_power_of_2(window)
    more = ((0, tall - window), (0, wide - group))
    q = jnp.pad(observers.q, ((0, 0), (0, 0), *more, (0, 0)))
    pos = jnp.broadcast_to(observers.pos[..., None], (batch, window, group))
    pos = jnp.pad(pos, ((0, 0), *more), constant_values=-1)
    return q.reshape(batch, kv_heads, tall * wide, dim), pos.reshape(batch, tall * wide), wide


def _see(
    q: Array,
    q_pos: Array,
    k_ref: Any,
    bounds_ref: Any,
    start: Array,
    block: int,
    scale: float,
    sliding_window: int | None,
) -> tuple[Array, Array]:
    """Return the logits of some queries with `block` tokens, and their mask. `start` counts from the first observed
    token.
    """
    pos = bounds_ref[0] + start + jnp.arange(block, dtype=jnp.int32)
    inside = pos < bounds_ref[1]
    dim = q.shape[-1]
    held = jnp.broadcast_to(inside[:, None], (block, dim))
    keys = backend.load(k_ref.at[pos[:, None], jnp.arange(dim, dtype=jnp.int32)[None]], mask=held, other=0.0)
    distance = q_pos[:, None] - pos[None]
    visible = (distance >= 0) & (q_pos >= 0)[:, None] & inside[None]
    if sliding_window is not None:
        visible &= distance < sliding_window
    return dot(q, keys, 1) * scale, visible


def _normalise(
    q_ref: Any, pos_ref: Any, k_ref: Any, bounds_ref: Any, out_ref: Any, *, see: Any, block: int, part: int
) -> None:
    """Compute the log-sum-exp of each query's logits with one part of the tokens."""
    q, q_pos = q_ref[...], pos_ref[...]
    begin = pl.program_id(2) * part
    end = jnp.minimum(begin + part, bounds_ref[1] - bounds_ref[0])

    def fold(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        top, total = carry
        logits, visible = see(q, q_pos, k_ref, bounds_ref, i * block, block)
        logits = jnp.where(visible, logits, MASKED)
        peak = jnp.maximum(top, jnp.max(logits, axis=1))
        weights = jnp.where(visible, jnp.exp(logits - peak[:, None]), 0.0)
        return peak, total * jnp.exp(top - peak) + jnp.sum(weights, axis=1)

    start = jnp.full(q_pos.shape, MASKED, jnp.float32), jnp.zeros(q_pos.shape, jnp.float32)
    top, total = jax.lax.fori_loop(jnp.maximum(begin, bounds_ref[2]) // block, pl.cdiv(end, block), fold, start)
    out_ref[...] = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)), MASKED)


def _score(
    q_ref: Any,
    pos_ref: Any,
    k_ref: Any,
    bounds_ref: Any,
    logsumexp_ref: Any,
    out_ref: Any,
    *,
    see: Any,
    block: int,
    tile: int,
    wide: int,
    group: int,
    chunk: int,
) -> None:
    """Compute the scores of one block of tokens."""
    start = pl.program_id(2) * block
    seen = (start >= bounds_ref[2]) & (start < bounds_ref[1] - bounds_ref[0])

    def add(i: Array, scores: Array) -> Array:
        span = pl.ds(i * tile, tile)
        logits, visible = see(q_ref[span, :], pos_ref[span], k_ref, bounds_ref, start, block)
        probs = jnp.where(visible, jnp.exp(logits - logsumexp_ref[span][:, None]), 0.0)
        if chunk > 1:
            probs = jnp.sum(probs.reshape(tile // wide, wide, block), axis=1)
            probs = jnp.max(probs.reshape(tile // wide, block // chunk, chunk), axis=2)
        return scores + jnp.sum(probs, axis=0)

    tiles = q_ref.shape[0] // tile * seen.astype(jnp.int32)
    scores = jax.lax.fori_loop(0, tiles, add, jnp.zeros((block // chunk,), jnp.float32))
    column = start // chunk + jnp.arange(block // chunk, dtype=jnp.int32)
    backend.store(out_ref.at[column], scores / group, mask=column < out_ref.shape[0])
