"""Mosaic TPU kernel of `decode_attention`, attention of one query per head over a compressed cache.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must match `reference.py` up to
rounding.

The grid has sequences, KV heads and blocks of slots, with a running softmax in VMEM. The number of blocks with live
slots per head is known before the grid starts. Later blocks are not fetched: their index is that of the last live
block, and the pipeline does not fetch the same block twice in a row.

The compiler stores arrays whose last dimension is below 128 transposed, with slots along lanes, which wastes no memory.
Heads of fewer channels are therefore read as [H, C].
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ..interpreter import interpreter
from ..masking import MASKED
from ..products import dot
from ..rotary import DeferredRope, heads_of, parts_of
from ..tuning import tuned
from .types import Attended, Rotation

LANES = 128


def unsupported_reason(
    q: Array | DeferredRope,
    k: Array,
    *_: Any,
    rotation: Rotation | None = None,
    sinks: Array | None = None,
    **__: Any,
) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    if sinks is not None:
        return "probabilities beside attention sinks are requested"
    dim = k.shape[-1]
    if dim % 16 or dim > 256:
        return f"head dim {dim} is not a multiple of 16 up to 256"
    if k.dtype not in (jnp.bfloat16, jnp.float32):
        return f"keys are {k.dtype}"
    if rotation is not None and 2 * rotation.inv_freq.shape[-1] != dim:
        return f"{2 * rotation.inv_freq.shape[-1]} of {dim} channels are rotated; the kernel only rotates all of them"
    return None


def decode_attention(
    q: Float[Array, "B N H"] | DeferredRope,
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    weight: Float[Array, "B K C"],
    *,
    scale: float,
    rotation: Rotation | None = None,
    factors: None = None,
    probs: bool = False,
    interpret: bool = False,
    block: int | None = None,
) -> Attended:
    """Softmax attention over cache slots; see the public function.

    Args:
        block: slots read at a time, a multiple of 128, instead of the tuned number.
    """
    q = heads_of(q) if rotation is None else rotation.queries(parts_of(q)[0])
    batch, heads, dim = q.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    group = heads // kv_heads
    case = {"slots": slots, "head_dim": dim, "dtype": k.dtype.name, "rotated": rotation is not None}
    block = block or tuned("decode_attention", case, {"block": 1024})["block"]
    block = min(block, -(-slots // LANES) * LANES)
    blocks = pl.cdiv(slots, block)
    transposed = dim % LANES != 0  # slots are along lanes

    index = jnp.arange(1, slots + 1, dtype=jnp.int32)
    used = pl.cdiv(jnp.max(jnp.where(weight > 0, index, 0), axis=-1), block).astype(jnp.int32)  # [B, K]

    def at(b: Any, h: Any, j: Any, used: Any) -> Any:
        return jnp.minimum(j, jnp.maximum(used[b, h] - 1, 0))

    whole = pl.BlockSpec((None, None, group, dim), lambda b, h, j, used: (b, h, 0, 0))
    line = pl.BlockSpec((None, None, 1, block), lambda b, h, j, used: (b, h, 0, at(b, h, j, used)))
    if transposed:
        k, v = jnp.swapaxes(k, 2, 3), jnp.swapaxes(v, 2, 3)
        tile = pl.BlockSpec((None, None, dim, block), lambda b, h, j, used: (b, h, 0, at(b, h, j, used)))
    else:
        tile = pl.BlockSpec((None, None, block, dim), lambda b, h, j, used: (b, h, at(b, h, j, used), 0))
    inputs = [q.reshape(batch, kv_heads, group, dim), k, v, weight[:, :, None]]
    specs = [whole, tile, tile, line]
    if rotation is not None:
        frequency = rotation.inv_freq.astype(jnp.float32)[:, None]
        inputs += [rotation.place[:, :, None], frequency]
        specs += [line, pl.BlockSpec(frequency.shape, lambda b, h, j, used: (0, 0))]
    shapes = [
        jax.ShapeDtypeStruct((batch, kv_heads, group, dim), q.dtype),
        jax.ShapeDtypeStruct((batch, kv_heads, group, 1), jnp.float32),
    ]
    out_specs = [whole, pl.BlockSpec((None, None, group, 1), lambda b, h, j, used: (b, h, 0, 0))]
    if probs:
        shapes.append(jax.ShapeDtypeStruct((batch, kv_heads, group, slots), jnp.float32))
        out_specs.append(pl.BlockSpec((None, None, group, block), lambda b, h, j, used: (b, h, 0, at(b, h, j, used))))
    bytes_read = sum(x.size * x.dtype.itemsize for x in inputs)
    outs = pl.pallas_call(
        functools.partial(
            _body,
            scale=scale,
            slots=slots,
            transposed=transposed,
            amplitude=None if rotation is None else rotation.amplitude,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, blocks),
            in_specs=specs,
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((group, dim), jnp.float32),
                pltpu.VMEM((group, 1), jnp.float32),
                pltpu.VMEM((group, 1), jnp.float32),
            ],
        ),
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * heads * slots * dim, bytes_accessed=bytes_read, transcendentals=batch * heads * slots
        ),
        interpret=interpreter(interpret),
        name="decode_attention",
    )(used, *inputs)
    logsumexp = outs[1].reshape(batch, heads)
    mass = None
    if probs:
        # Logits of blocks without live slots were never written.
        seen = (weight > 0)[:, :, None]
        mass = jnp.mean(jnp.where(seen, jnp.exp(outs[2] - jnp.where(seen, outs[1], 0.0)), 0.0), axis=2)
    return Attended(outs[0].reshape(q.shape), logsumexp, mass)


def _body(
    used_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    weight_ref: Any,
    *refs: Any,
    scale: float,
    slots: int,
    transposed: bool,
    amplitude: float | None,
) -> None:
    rotation_refs: Any = refs[:2] if amplitude is not None else ()
    rest = refs[len(rotation_refs) :]
    out_ref, lse_ref, *logit_refs = rest[:-3]
    acc_ref, top_ref, total_ref = rest[-3:]
    row, head, j = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    block = weight_ref.shape[-1]

    @pl.when(j == 0)
    def _start() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)
        top_ref[...] = jnp.full_like(top_ref, MASKED)
        total_ref[...] = jnp.zeros_like(total_ref)

    @pl.when(j < used_ref[row, head])
    def _fold() -> None:
        weight = weight_ref[...]
        slot = j * block + jax.lax.broadcasted_iota(jnp.int32, weight.shape, 1)
        live = (weight > 0) & (slot < slots)  # a block's contents after the end of the cache are undefined
        if amplitude is None:
            logits = dot(q_ref[...], k_ref[...], 0 if transposed else 1)
        else:
            half = q_ref.shape[-1] // 2
            keys = k_ref[...] if transposed else k_ref[...].T
            angle = rotation_refs[1][...] * rotation_refs[0][...].astype(jnp.float32)
            cos, sin = jnp.cos(angle) * amplitude, jnp.sin(angle) * amplitude
            a, b = keys[:half].astype(jnp.float32), keys[half:].astype(jnp.float32)
            rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=0).astype(k_ref.dtype)
            logits = dot(q_ref[...], rotated, 0)
        logits = jnp.where(live, logits * scale + jnp.log(jnp.where(live, weight, 1.0)), MASKED)
        for logit_ref in logit_refs:
            logit_ref[...] = logits
        peak = jnp.maximum(top_ref[...], jnp.max(logits, axis=1, keepdims=True))
        shrink = jnp.exp(top_ref[...] - peak)
        share = jnp.where(live, jnp.exp(logits - peak), 0.0)
        values = v_ref[...]
        alive = live if transposed else _as_column(live)
        values = jnp.where(alive, values, jnp.zeros((), values.dtype))
        acc_ref[...] = acc_ref[...] * shrink + dot(share.astype(values.dtype), values, 1 if transposed else 0)
        top_ref[...] = peak
        total_ref[...] = total_ref[...] * shrink + jnp.sum(share, axis=1, keepdims=True)

    @pl.when(j == pl.num_programs(2) - 1)
    def _finish() -> None:
        total = total_ref[...]
        out_ref[...] = (acc_ref[...] / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)
        lse_ref[...] = jnp.where(total > 0, top_ref[...] + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)


def _as_column(live: Array) -> Array:
    """Return a row of flags as a column."""
    return live.astype(jnp.float32).reshape(-1, 1) > 0
