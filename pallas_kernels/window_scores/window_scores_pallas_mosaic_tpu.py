"""Mosaic TPU kernels of `window_scores`: attention of a prompt's last queries to each token.

`Op` in `api.py` calls them for the cases that `unsupported_reason` permits. Results must match `reference.py` up to
rounding.

There are two grids over blocks of tokens: the first computes the softmax normalisers, the second the scores.

All of a window's queries that read one KV head are rows of one matrix. For heads of fewer than 128 channels, several KV
heads are read together to fill a register's lanes, and queries have zeros in the other heads' lanes. Blocks of tokens
that no query sees are not fetched.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ..interpreter import interpreter
from ..masking import MASKED
from ..products import dot
from ..tuning import tuned
from .types import Observers, from_first

LANES = 128

ROWS = 1024
"""Maximum number of queries whose scores with a block of tokens fit in vector memory."""


def unsupported_reason(
    observers: Observers, k: Array, *_: Any, chunk: int, pos: Array | None = None, **__: Any
) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    if pos is not None:
        return "positions are given by `pos`"
    if observers.sinks is not None:
        return "there are attention sinks"
    kv_heads, dim = k.shape[2:]
    window, group = observers.q.shape[2:4]
    if dim % LANES and (LANES % dim or kv_heads * dim % LANES):
        return f"{kv_heads} KV heads of {dim} channels do not fill registers of {LANES} lanes"
    if chunk & (chunk - 1) or chunk > LANES:
        return f"a chunk of {chunk} tokens is not a power of two up to {LANES}"
    if k.dtype not in (jnp.bfloat16, jnp.float32):
        return f"keys are {k.dtype}"
    if window * group > ROWS:
        return f"{window * group} queries per KV head are more than {ROWS}"
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
    interpret: bool = False,
) -> Float[Array, "B K M"]:
    """Sum the observers' attention to each chunk of the tokens from `first` (None for the first of all) to `stop`."""
    k, first = from_first(k, first), jnp.zeros_like(stop) if first is None else first
    batch, length, kv_heads, dim = k.shape
    group = observers.q.shape[3]
    q, q_pos = _rows(observers, max(LANES // dim, 1))
    rows, lanes = q.shape[2:]
    case = {"rows": rows, "tokens": length, "head_dim": dim, "dtype": k.dtype.name}
    block = tuned("window_scores", case, {"block": 512 if rows <= 256 else 256})["block"]
    block = min(block, -(-length // LANES) * LANES)

    # The range of blocks that each sequence sees.
    begin = first if sliding_window is None else jnp.maximum(first, observers.pos[:, 0] + 1 - sliding_window)
    bounds = jnp.stack([jnp.maximum(begin - first, 0) // block, pl.cdiv(stop - first, block)], axis=-1)

    def tokens(b: Any, h: Any, j: Any, bounds: Any) -> Any:
        low, high = bounds[2 * b], bounds[2 * b + 1]
        return b, jnp.minimum(jnp.maximum(j, low), jnp.maximum(high - 1, low)), h * dim // lanes

    inputs = [q, q_pos[..., None], (stop - first)[:, None, None], first[:, None, None], k.reshape(batch, length, -1)]
    specs = [
        pl.BlockSpec((None, None, rows, lanes), lambda b, h, j, bounds: (b, h, 0, 0)),
        pl.BlockSpec((None, rows, 1), lambda b, h, j, bounds: (b, 0, 0)),
        pl.BlockSpec((None, 1, 1), lambda b, h, j, bounds: (b, 0, 0)),
        pl.BlockSpec((None, 1, 1), lambda b, h, j, bounds: (b, 0, 0)),
        pl.BlockSpec((None, block, lanes), tokens),
    ]
    column = pl.BlockSpec((None, None, rows, 1), lambda b, h, j, bounds: (b, h, 0, 0))
    see = partial(_see, scale=scale, sliding_window=sliding_window)

    def call(body: Any, inputs: Any, specs: Any, out_spec: Any, out_shape: Any, scratch: Any, name: str) -> Array:
        return pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(batch, kv_heads, pl.cdiv(length, block)),
                in_specs=specs,
                out_specs=out_spec,
                scratch_shapes=scratch,
            ),
            out_shape=jax.ShapeDtypeStruct(out_shape, jnp.float32),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            interpret=interpreter(interpret),
            name=name,
        )(bounds.reshape(-1).astype(jnp.int32), *inputs)

    logsumexp = call(
        partial(_normalise, see=see),
        inputs,
        specs,
        column,
        (batch, kv_heads, rows, 1),
        [pltpu.VMEM((rows, 1), jnp.float32), pltpu.VMEM((rows, 1), jnp.float32)],
        "window_normalisers",
    )
    scores = call(
        partial(_score, see=see, group=group, chunk=chunk),
        [*inputs, logsumexp],
        [*specs, column],
        pl.BlockSpec((None, None, 1, block), lambda b, h, j, bounds: (b, h, 0, j)),
        (batch, kv_heads, 1, -(-length // LANES) * LANES),
        [],
        "window_scores",
    )
    return scores[:, :, 0, chunk - 1 :: chunk][..., : -(-length // chunk)]


def _rows(observers: Observers, together: int) -> tuple[Float[Array, "B K R L"], Int[Array, "B R"]]:
    """Return queries as rows, ordered by group member and then by token, each in the lanes of its KV head."""
    batch, kv_heads, window, group, dim = observers.q.shape
    more = -window % 8
    q = jnp.pad(jnp.swapaxes(observers.q, 2, 3), ((0, 0), (0, 0), (0, 0), (0, more), (0, 0)))
    pos = jnp.pad(observers.pos, ((0, 0), (0, more)), constant_values=-1)
    q, pos = q.reshape(batch, kv_heads, -1, 1, dim), jnp.tile(pos, (1, group))
    lane = jnp.arange(kv_heads, dtype=jnp.int32)[:, None] % together == jnp.arange(together, dtype=jnp.int32)
    q = jnp.where(lane[:, None, :, None], q, jnp.zeros((), q.dtype))
    return q.reshape(batch, kv_heads, -1, together * dim), pos


def _see(
    q_ref: Any, pos_ref: Any, size_ref: Any, first_ref: Any, k_ref: Any, scale: float, sliding_window: int | None
) -> tuple[Array, Array]:
    """Return the logits of all queries with one block of tokens, and their mask."""
    block, start = k_ref.shape[0], pl.program_id(2) * k_ref.shape[0]
    size, first = size_ref[...], first_ref[...]
    upright = start + jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0)
    keys = jnp.where(upright < size, k_ref[...], jnp.zeros((), k_ref.dtype))
    place = start + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
    q_pos = pos_ref[...]
    distance = q_pos - (first + place)
    visible = (distance >= 0) & (q_pos >= 0) & (place < size)
    if sliding_window is not None:
        visible &= distance < sliding_window
    return dot(q_ref[...], keys, 1) * scale, visible


def _seen(bounds_ref: Any) -> Array:
    """Return whether any query sees this block."""
    row, j = pl.program_id(0), pl.program_id(2)
    return (j >= bounds_ref[2 * row]) & (j < bounds_ref[2 * row + 1])


def _normalise(bounds_ref: Any, *refs: Any, see: Any) -> None:
    """Compute the log-sum-exp of each query's logits, block by block."""
    *inputs, out_ref, top_ref, total_ref = refs

    @pl.when(pl.program_id(2) == 0)
    def _start() -> None:
        top_ref[...] = jnp.full_like(top_ref, MASKED)
        total_ref[...] = jnp.zeros_like(total_ref)

    @pl.when(_seen(bounds_ref))
    def _fold() -> None:
        logits, visible = see(*inputs)
        logits = jnp.where(visible, logits, MASKED)
        peak = jnp.maximum(top_ref[...], jnp.max(logits, axis=1, keepdims=True))
        weights = jnp.where(visible, jnp.exp(logits - peak), 0.0)
        total_ref[...] = total_ref[...] * jnp.exp(top_ref[...] - peak) + jnp.sum(weights, axis=1, keepdims=True)
        top_ref[...] = peak

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _finish() -> None:
        total = total_ref[...]
        out_ref[...] = top_ref[...] + jnp.log(jnp.where(total > 0, total, 1.0))


def _score(bounds_ref: Any, *refs: Any, see: Any, group: int, chunk: int) -> None:
    """Compute the score of each token of a block. A chunk's score is in the lane of its last token."""
    *inputs, logsumexp_ref, out_ref = refs

    @pl.when(jnp.logical_not(_seen(bounds_ref)))
    def _unseen() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(_seen(bounds_ref))
    def _add() -> None:
        logits, visible = see(*inputs)
        probs = jnp.where(visible, jnp.exp(logits - logsumexp_ref[...]), 0.0)
        window = probs.shape[0] // group
        given = sum((probs[g * window : (g + 1) * window] for g in range(1, group)), probs[:window])
        reach = 1
        while reach < chunk:  # maximum over the `reach` tokens up to this one
            given = jnp.maximum(given, pltpu.roll(given, reach, 1))
            reach *= 2
        out_ref[...] = jnp.sum(given, axis=0, keepdims=True) / group
