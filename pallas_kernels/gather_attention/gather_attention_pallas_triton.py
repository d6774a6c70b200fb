"""Triton kernel of `gather_attention`, attention over selected slots of a cache.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must match `reference.py` up to
rounding.

It is split-K flash decoding over lists of slots.

A head's selection is split among programs. Each loops over its part with a running softmax, and loads keys and values
row by row from their slots. XLA combines the partial results.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from ..decode_attention import Attended
from ..masking import MASKED
from ..products import dot
from ..rotary import DeferredRope, parts_of
from ..triton import backend, entry, rotated_heads, store_heads, triton_call, triton_unsupported
from ..tuning import tuned


def unsupported_reason(q: Array | DeferredRope, k: Array, v: Array, index: Array, *_: Any, **__: Any) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    if reason := triton_unsupported(dim=k.shape[-1]):
        return reason
    if k.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"keys are {k.dtype}"
    return None


def gather_attention(
    q: Float[Array, "B N H"] | DeferredRope,
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    index: Int[Array, "B R P"],
    live: Bool[Array, "B R L"],
    *,
    scale: float,
    page: int = 1,
    tokens: Int[Array, " B"] | None = None,
    sizes: dict[str, int] | None = None,
    interpret: bool = False,
) -> Attended:
    """Softmax attention of each head over the slots that it selected; see the public function.

    Args:
        sizes: `block` (slots read at a time), `splits` (programs per head), `warps` and `stages`, instead of the tuned
            sizes.
    """
    batch, heads, dim = parts_of(q)[0].shape
    selecting, size = index.shape[1], index.shape[2] * page
    sizes = sizes or _sizes(batch * selecting, size, heads // selecting, dim, k.dtype)
    return _attend(q, k, v, index, live, tokens, scale=scale, page=page, interpret=interpret, **sizes)


@partial(jax.jit, static_argnames=("scale", "page", "interpret", "block", "splits", "warps", "stages"))
def _attend(
    q: Float[Array, "B N H"] | DeferredRope,
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    index: Int[Array, "B R P"],
    live: Bool[Array, "B R L"],
    tokens: Int[Array, " B"] | None,
    *,
    scale: float,
    page: int,
    interpret: bool,
    block: int,
    splits: int,
    warps: int,
    stages: int,
) -> Attended:
    """Call the kernel. It is traced and lowered once for all layers."""
    x, *tables = parts_of(q)
    batch, heads, dim = x.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    selecting, size = index.shape[1], index.shape[2] * page
    group, shared = heads // selecting, selecting // kv_heads
    part = pl.cdiv(size, splits * block) * block
    splits = pl.cdiv(size, part)

    queries, lists = x.reshape(-1, group, dim), [chosen.reshape(-1, chosen.shape[2]) for chosen in (index, live)]
    keys, values = (cached.reshape(-1, slots, dim) for cached in (k, v))
    out, logsumexp = triton_call(
        partial(_body, len(tables), scale=scale, page=page, block=block, part=part),
        grid=(batch * selecting, splits),
        in_specs=[
            entry(queries),
            *[pl.BlockSpec((1, dim // 2), lambda r, s: (r // selecting, 0)) for _ in tables],
            *[entry(cached, each=shared) for cached in (keys, values)],
            *map(entry, lists),
            pl.BlockSpec((1,), lambda r, s: (r // selecting,)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, group, dim), lambda r, s: (r, s, 0, 0)),
            pl.BlockSpec((None, None, group), lambda r, s: (r, s, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch * selecting, splits, group, dim), x.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((batch * selecting, splits, group), jnp.float32),
        ],
        warps=warps,
        stages=stages,
        interpret=interpret,
        name="gather_attention",
    )(queries, *tables, keys, values, *lists, jnp.full((batch,), slots, jnp.int32) if tokens is None else tokens)
    if splits > 1:
        out, logsumexp = _joined(out, logsumexp)
    return Attended(out.reshape(x.shape).astype(x.dtype), logsumexp.reshape(batch, heads), None)


def _joined(out: Float[Array, "F S G H"], logsumexp: Float[Array, "F S G"]) -> tuple[Array, Array]:
    """Combine the results of S programs."""
    best = jnp.max(logsumexp, axis=1, keepdims=True)
    share = jnp.where(logsumexp > -jnp.inf, jnp.exp(logsumexp - best), 0.0)
    total = jnp.sum(share, axis=1)
    out = jnp.sum(out * share[..., None], axis=1) / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    return out, jnp.where(total > 0, best[:, 0] + jnp.log(total), -jnp.inf)


def _sizes(fold: int, size: int, group: int, dim: int, dtype: Any) -> dict[str, int]:
    """Return block sizes for `fold` sequences × selecting heads: enough programs to fill the device, with at least one
    block each.
    """
    block = min(128 if jnp.dtype(dtype).itemsize == 2 else 64, max(pl.next_power_of_2(size), 16))
    splits = max(1, min(256 // fold, size // block))
    case = {"heads": fold, "selected": size, "group": group, "head_dim": dim, "dtype": jnp.dtype(dtype).name}
    return tuned("gather_attention", case, {"block": block, "splits": splits, "warps": 4, "stages": 2})


def _body(
    tables: int,
    q_ref: Any,
    *refs: Any,
    scale: float,
    page: int,
    block: int,
    part: int,
) -> None:
    k_ref, v_ref, index_ref, live_ref, tokens_ref, out_ref, logsumexp_ref = refs[tables:]
    begin = pl.program_id(1) * part
    size, tokens = index_ref.shape[0] * page, tokens_ref[0]
    run = size // live_ref.shape[0]
    q = rotated_heads(q_ref, *refs[:tables])
    group, dim = q.shape
    channel = jnp.arange(dim, dtype=jnp.int32)[None]

    def fold(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, top, total = carry
        place = begin + i * block + jnp.arange(block, dtype=jnp.int32)
        inside = place < size
        slot = backend.load(index_ref.at[place // page], mask=inside, other=0) * page + place % page
        live = backend.load(live_ref.at[place // run], mask=inside, other=False) & (slot < tokens)
        # Masked slots are not read.
        held = jnp.broadcast_to(live[:, None], (block, dim))
        keys = backend.load(k_ref.at[slot[:, None], channel], mask=held, other=0.0)
        values = backend.load(v_ref.at[slot[:, None], channel], mask=held, other=0.0)
        logits = jnp.where(live, dot(q, keys, 1) * scale, MASKED)
        peak = jnp.maximum(top, jnp.max(logits, axis=1))
        shrink = jnp.exp(top - peak)
        weights = jnp.where(live, jnp.exp(logits - peak[:, None]), 0.0)
        acc = acc * shrink[:, None] + dot(weights.astype(values.dtype), values, 0)
        return acc, peak, total * shrink + jnp.sum(weights, axis=1)

    start = (
        jnp.zeros((group, dim), jnp.float32),
        jnp.full((group,), MASKED, jnp.float32),
        jnp.zeros((group,), jnp.float32),
    )
    blocks = pl.cdiv(jnp.minimum(part, size - begin), block)
    acc, top, total = jax.lax.fori_loop(0, blocks, fold, start)
    any_live = total > 0
    total = jnp.where(any_live, total, 1.0)
    store_heads(out_ref, (acc / total[:, None]).astype(out_ref.dtype))
    store_heads(logsumexp_ref, jnp.where(any_live, top + jnp.log(total), -jnp.inf))
