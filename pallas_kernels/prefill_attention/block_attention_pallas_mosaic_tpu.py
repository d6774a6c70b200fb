"""Mosaic TPU kernel of `block_attention` and `partial_block_attention`: attention of a block of tokens over slots.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must match `reference.py` up to
rounding.

The grid has sequences, KV heads, tiles of queries and tiles of slots, with a running softmax in VMEM.

All queries of a group are rows of one matrix. The smallest and largest positions of each tile determine, before the
grid starts, which tiles of slots each tile of queries can see. Other tiles are neither computed nor fetched: their
index is that of the nearest visible tile, and the pipeline does not fetch the same tile twice in a row.
"""

import functools
from typing import Any

import einops
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ..interpreter import interpreter
from ..masking import MASKED
from ..products import dot
from .types import Run, Stripes

ROWS, SLOTS = 512, 512
"""Queries and slots per tile."""

SCALARS = 65536
"""Maximum number of tiles of slots, over all sequences and heads. Their bounds are in scalar memory."""

FAR = jnp.iinfo(jnp.int32).max


def unsupported_reason(q: Array, k: Array, *_: Any, **__: Any) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    dim = k.shape[-1]
    if dim % 64 or dim > 256:
        return f"head dim {dim} is not a multiple of 64 up to 256"
    if k.dtype not in (jnp.bfloat16, jnp.float32):
        return f"keys are {k.dtype}"
    if (tiles := k.shape[0] * k.shape[1] * pl.cdiv(k.shape[2], SLOTS)) > SCALARS:
        return f"{tiles} tiles of slots are more than {SCALARS}"
    return None


def block_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    q_pos: Int[Array, "B S"],
    pos: Int[Array, "B K T"],
    weight: Float[Array, "B K T"] | None = None,
    *,
    scale: float,
    window: int | None,
    run: Run | None = None,
    interpret: bool = False,
) -> Float[Array, "B S N H"]:
    """Softmax attention of a block of tokens over slots; see the public function."""
    return _over_slots(q, k, v, q_pos, pos, weight, scale=scale, window=window, interpret=interpret)[0]


def partial_block_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    q_pos: Int[Array, "B S"],
    pos: Int[Array, "B K T"],
    weight: Float[Array, "B K T"] | None = None,
    *,
    scale: float,
    window: int | None,
    run: Run | None = None,
    stripes: Stripes | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N"]]:
    """Also return the log-sum-exp; see the public function."""
    out, sums = _over_slots(q, k, v, q_pos, pos, weight, scale=scale, window=window, interpret=interpret, sums=True)
    group = q.shape[2] // k.shape[1]
    return out, einops.rearrange(sums[:, :, 0, : q.shape[1] * group], "b k (s g) -> b s (k g)", g=group)


def _over_slots(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    q_pos: Int[Array, "B S"],
    pos: Int[Array, "B K T"],
    weight: Float[Array, "B K T"] | None,
    *,
    scale: float,
    window: int | None,
    interpret: bool,
    sums: bool = False,
) -> list[Array]:
    """Return the attended values and, if requested, the log-sum-exp [B, K, 1, queries of a group]."""
    batch, size, heads, dim = q.shape
    kv_heads, slots = k.shape[1:3]
    group = heads // kv_heads
    rows = min(ROWS, -(-size * group // 16) * 16)
    width = min(SLOTS, -(-slots // 128) * 128)
    row_tiles, slot_tiles = pl.cdiv(size * group, rows), pl.cdiv(slots, width)

    padding = row_tiles * rows - size * group
    queries = einops.rearrange(q, "b s (k g) h -> b k (s g) h", k=kv_heads)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, padding), (0, 0)))
    q_rows = jnp.pad(jnp.repeat(q_pos, group, axis=1), ((0, 0), (0, padding)), constant_values=-1)

    # The first and the last tile of slots that each tile of queries sees.
    def tiled(x: Array, fill: int, tiles: int, width: int) -> Array:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, tiles * width - x.shape[-1])], constant_values=fill)
        return x.reshape(*x.shape[:-1], tiles, width)

    newest = jnp.max(tiled(q_rows, -1, row_tiles, rows), axis=-1)  # [B, row tiles]
    oldest = jnp.min(tiled(jnp.where(q_rows >= 0, q_rows, FAR), FAR, row_tiles, rows), axis=-1)
    low = jnp.min(tiled(jnp.where(pos >= 0, pos, FAR), FAR, slot_tiles, width), axis=-1)  # [B, K, slot tiles]
    high = jnp.max(tiled(pos, -1, slot_tiles, width), axis=-1)
    sees = low[:, :, None] <= newest[:, None, :, None]
    if window is not None:
        sees &= high[:, :, None] > oldest[:, None, :, None] - window
    tile = jnp.arange(slot_tiles, dtype=jnp.int32)
    first = jnp.min(jnp.where(sees, tile, slot_tiles), axis=-1)  # [B, K, row tiles]
    last = jnp.max(jnp.where(sees, tile, -1), axis=-1)

    def at(b: Any, h: Any, i: Any, j: Any, first: Any, last: Any) -> Any:
        return jnp.clip(j, jnp.minimum(first[b, h, i], slot_tiles - 1), jnp.maximum(last[b, h, i], 0))

    mine = pl.BlockSpec((None, None, rows, dim), lambda b, h, i, j, *_: (b, h, i, 0))
    held = pl.BlockSpec((None, None, width, dim), lambda b, h, i, j, *s: (b, h, at(b, h, i, j, *s), 0))
    line = pl.BlockSpec((None, None, 1, width), lambda b, h, i, j, *s: (b, h, 0, at(b, h, i, j, *s)))
    inputs = [queries, q_rows[..., None], k, v, pos[:, :, None]]
    specs = [mine, pl.BlockSpec((None, rows, 1), lambda b, h, i, j, *_: (b, i, 0)), held, held, line]
    if weight is not None:
        inputs.append(jnp.log(jnp.maximum(weight, 1.0))[:, :, None])
        specs.append(line)
    results, places = [jax.ShapeDtypeStruct(queries.shape, q.dtype)], [mine]
    if sums:
        # Along lanes: a column would use one lane in 128.
        results.append(jax.ShapeDtypeStruct((batch, kv_heads, 1, row_tiles * rows), jnp.float32))
        places.append(pl.BlockSpec((None, None, 1, rows), lambda b, h, i, j, *_: (b, h, 0, i)))
    out, *others = pl.pallas_call(
        functools.partial(_body, scale=scale, slots=slots, window=window, results=len(results)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads, row_tiles, slot_tiles),
            in_specs=specs,
            out_specs=places,
            scratch_shapes=[
                pltpu.VMEM((rows, dim), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
            ],
        ),
        out_shape=results,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * queries.size * slots,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (q, q, k, v)),
            transcendentals=queries.size // dim * slots,
        ),
        interpret=interpreter(interpret),
        name="block_attention",
    )(first, last, *inputs)
    return [einops.rearrange(out[:, :, : size * group], "b k (s g) h -> b s (k g) h", g=group), *others]


def _body(
    first_ref: Any,
    last_ref: Any,
    q_ref: Any,
    q_pos_ref: Any,
    k_ref: Any,
    v_ref: Any,
    pos_ref: Any,
    *refs: Any,
    scale: float,
    slots: int,
    window: int | None,
    results: int,
) -> None:
    *bias_refs, acc_ref, top_ref, total_ref = refs
    bias_refs, (out_ref, *sums_refs) = bias_refs[:-results], bias_refs[-results:]
    row, head, i, j = (pl.program_id(axis) for axis in range(4))

    @pl.when(j == 0)
    def _start() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)
        top_ref[...] = jnp.full_like(top_ref, MASKED)
        total_ref[...] = jnp.zeros_like(total_ref)

    @pl.when((j >= first_ref[row, head, i]) & (j <= last_ref[row, head, i]))
    def _fold() -> None:
        pos = pos_ref[...]
        slot = j * pos.shape[1] + jax.lax.broadcasted_iota(jnp.int32, pos.shape, 1)
        live = (pos >= 0) & (slot < slots)  # a tile's contents after the last slot are undefined
        distance = q_pos_ref[...] - pos
        seen = live & (distance >= 0)
        if window is not None:
            seen &= distance < window
        logits = dot(q_ref[...], k_ref[...], 1) * scale
        for bias_ref in bias_refs:
            logits += bias_ref[...]
        logits = jnp.where(seen, logits, MASKED)
        peak = jnp.maximum(top_ref[...], jnp.max(logits, axis=1, keepdims=True))
        shrink = jnp.exp(top_ref[...] - peak)
        share = jnp.where(seen, jnp.exp(logits - peak), 0.0)
        values = v_ref[...]
        alive = live.astype(jnp.float32).reshape(-1, 1) > 0
        values = jnp.where(alive, values, jnp.zeros((), values.dtype))
        acc_ref[...] = acc_ref[...] * shrink + dot(share.astype(values.dtype), values, 0)
        top_ref[...] = peak
        total_ref[...] = total_ref[...] * shrink + jnp.sum(share, axis=1, keepdims=True)

    @pl.when(j == pl.num_programs(3) - 1)
    def _finish() -> None:
        total = total_ref[...]
        out_ref[...] = (acc_ref[...] / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)
        for sums_ref in sums_refs:
            sums = jnp.where(total > 0, top_ref[...] + jnp.log(total), -jnp.inf)
            sums_ref[...] = jnp.broadcast_to(sums, (sums.shape[0], 128)).T[:1]
