"""Triton kernel of `packed_decode_attention`: attention of one query per head over a quantised cache.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must match `reference.py` up to
rounding.

It reads the quantised codes and makes no dequantised copies.

Slots are split among programs as in `decode_attention_pallas_triton`, whose second kernel combines the parts. A program
reads a block of bytes, each with the codes of n slots. It then loops over the n bit positions, so that codes are never
reordered.

The matrix units multiply by the codes alone:

- The scales of keys are multiplied into the queries: one set of queries per group of tokens in the block.
- The scales of values are multiplied into the softmax shares: one set of shares per group of channels.
- The zeros contribute separate sums.

One more program attends over the latest slots, which are not quantised.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from ..masking import MASKED
from ..products import dot
from ..triton import backend, entry, rotated_heads, store_heads, triton_call, triton_unsupported
from ..tuning import tuned
from .decode_attention_pallas_triton import join_parts
from .packed import Bits
from .types import PackedSlots

LEAST = 16
"""Minimum number of slots per matmul."""

LATE = 32
"""Latest slots that are read at a time."""


def unsupported_reason(q: Array, slots: PackedSlots, visible: Array, *, bits: Bits, **_: Any) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    if bits == 3:
        return "codes of 3 bits are in several bytes"
    dim, size = q.shape[-1], visible.shape[2]
    if reason := triton_unsupported(dim=dim):
        return reason
    types = {x.dtype for x in (q, slots.k_recent, slots.v_recent)}
    if len(types) > 1 or types.isdisjoint(jnp.dtype(name) for name in ("bfloat16", "float16", "float32")):
        return f"queries and recent keys and values are {', '.join(sorted(str(x) for x in types))}, not one float type"
    tokens, channels = size // slots.k.scale.shape[2], dim // slots.v.scale.shape[2]
    if tokens & (tokens - 1) or tokens < 8 // bits:
        return f"groups of {tokens} tokens are not a power of two of at least the {8 // bits} tokens that share a byte"
    if channels & (channels - 1):
        return f"groups of {channels} channels are not a power of two"
    return None


def packed_decode_attention(
    q: Float[Array, "B N H"],
    slots: PackedSlots,
    visible: Bool[Array, "B K C"],
    *,
    bits: Bits,
    scale: float,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> Float[Array, "B N H"]:
    """Softmax attention over quantised slots; see the public function.

    Args:
        sizes: `block` (slots read at a time), `splits` (programs per head, without that of the latest slots), `warps`
            and `stages`, instead of the tuned sizes.
    """
    batch, kv_heads, size = visible.shape
    sizes = sizes or _sizes(batch * kv_heads, size, q.shape[-1], bits, q.dtype)
    return _attend(q, slots, visible, bits=bits, scale=scale, interpret=interpret, **sizes)


@functools.partial(jax.jit, static_argnames=("bits", "scale", "interpret", "block", "splits", "warps", "stages"))
def _attend(
    q: Float[Array, "B N H"],
    slots: PackedSlots,
    visible: Bool[Array, "B K C"],
    *,
    bits: Bits,
    scale: float,
    interpret: bool,
    block: int,
    splits: int,
    warps: int,
    stages: int,
) -> Float[Array, "B N H"]:
    """Call the kernels. They are traced and lowered once for all layers of one shape."""
    batch, heads, dim = q.shape
    kv_heads, size = visible.shape[1:]
    fold, group = batch * kv_heads, heads // kv_heads
    part = -(-size // (splits * block)) * block
    splits = -(-size // part)

    inputs = [
        q.reshape(fold, group, dim),
        *(
            x.reshape(fold, *x.shape[2:])
            for packed in (slots.k, slots.v)
            for x in (packed.codes, packed.scale, packed.zero)
        ),
        *(x.reshape(fold, *x.shape[2:]) for x in (slots.k_recent, slots.v_recent)),
        *(x.reshape(fold, 1) for x in (slots.k_packed, slots.next)),
        visible.reshape(fold, size).astype(jnp.int8),
    ]
    shapes = [jax.ShapeDtypeStruct((fold, splits + 1, group, *rest), jnp.float32) for rest in ((dim,), (), ())]

    def body(*refs: Any) -> None:
        _attend_part(*refs, number=pl.program_id(1), bits=bits, scale=scale, block=block, part=part, splits=splits)

    parts = triton_call(
        body,
        grid=(fold, splits + 1),
        in_specs=[entry(x) for x in inputs],
        out_specs=[
            pl.BlockSpec((None, None, group, dim), lambda h, s: (h, s, 0, 0)),
            *[pl.BlockSpec((None, None, group), lambda h, s: (h, s, 0))] * 2,
        ],
        out_shape=shapes,
        warps=warps,
        stages=stages,
        interpret=interpret,
        name="packed_decode_attention",
    )(*inputs)
    of_head = pl.BlockSpec((None, splits + 1, None), lambda h, g: (h, 0, g))
    out, _ = triton_call(
        join_parts,
        grid=(fold, group),
        in_specs=[pl.BlockSpec((None, splits + 1, None, dim), lambda h, g: (h, 0, g, 0)), of_head, of_head],
        out_specs=[
            pl.BlockSpec((None, None, dim), lambda h, g: (h, g, 0)),
            pl.BlockSpec((None, 1), lambda h, g: (h, g)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((fold, group, dim), q.dtype),
            jax.ShapeDtypeStruct((fold, group), jnp.float32),
        ],
        warps=4,
        stages=1,
        interpret=interpret,
        name="packed_decode_attention_join",
    )(*parts)
    return out.reshape(q.shape)


def _sizes(fold: int, size: int, dim: int, bits: int, dtype: Any) -> dict[str, int]:
    """Return block sizes for `fold` sequences × KV heads.

    The default is about 512 programs with at least one block each, which has as many slots as fit in registers.
    Compiled for an H200, 32 slots of 128 channels in 16 bits per bit position take the fewest instructions per number
    without spilling. These sizes have not been timed.
    """
    block = max(LEAST, min(32, 8192 // (dim * jnp.dtype(dtype).itemsize))) * (8 // bits)
    splits = max(1, min(512 // fold, size // block))
    case = {"heads": fold, "slots": size, "head_dim": dim, "bits": bits, "dtype": jnp.dtype(dtype).name}
    return tuned("packed_decode_attention", case, {"block": block, "splits": splits, "warps": 4, "stages": 3})


def _attend_part(
    q_ref: Any,
    k_codes: Any,
    k_scale: Any,
    k_zero: Any,
    v_codes: Any,
    v_scale: Any,
    v_zero: Any,
    k_recent: Any,
    v_recent: Any,
    k_packed_ref: Any,
    next_ref: Any,
    visible_ref: Any,
    out_ref: Any,
    top_ref: Any,
    total_ref: Any,
    *,
    number: Array,
    bits: int,
    scale: float,
    block: int,
    part: int,
    splits: int,
) -> None:
    """Attend over one part of one head: unnormalised values, the largest logit, and the sum of exponentials.

    The last part is that of the latest slots.

    Args:
        number: index of the part.
        bits: bits per code.
        scale: factor on the logits.
        block: slots read at a time.
        part: slots per part, except the last.
        splits: number of parts, without the last.
    """
    q = rotated_heads(q_ref)
    group, dim = q.shape
    count, mask, size = 8 // bits, 2**bits - 1, visible_ref.shape[0]
    tokens, groups = size // k_scale.shape[0], v_scale.shape[0]
    together = min(tokens, block)  # tokens of one group per block
    sharing, rows = block // together, block // count
    channel = jnp.arange(dim, dtype=jnp.int32)[None]
    k_packed, filled = k_packed_ref[0], next_ref[0]
    late = jnp.maximum(filled - v_recent.shape[0], 0)
    even = size % block == 0

    def within(at: Array, end: int) -> Array:
        """Clip the indices of a block that can extend past the last slot."""
        return at if even else jnp.minimum(at, end - 1)

    def softmax(logits: Array, live: Array, top: Array, total: Array) -> tuple[Array, Array, Array, Array]:
        """Return the new slots' shares, the factor on previous shares, and the running maximum and sum."""
        logits = jnp.where(live, logits * scale, MASKED)
        peak = jnp.maximum(top, jnp.max(logits, axis=1))
        shrink = jnp.exp(top - peak)
        share = jnp.where(live, jnp.exp(logits - peak[:, None]), 0.0)
        return share, shrink, peak, total * shrink + jnp.sum(share, axis=1)

    begin = number * part
    stop = jnp.where(number < splits, jnp.minimum(begin + part, late), begin)
    wide = q.astype(jnp.float32)
    of_row = jnp.arange(rows, dtype=jnp.int32) // (together // count)
    mine = (of_row[None] == jnp.arange(sharing, dtype=jnp.int32)[:, None])[:, None]
    which = jnp.arange(groups, dtype=jnp.int32)[:, None]

    def packed(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        acc, zeros, top, total = carry
        first = begin + i * block
        row = within(first // count + jnp.arange(rows, dtype=jnp.int32), size // count)[:, None]
        keys, values = (backend.load(x.at[row, channel]).astype(jnp.int32) for x in (k_codes, v_codes))
        of_keys = within(first // tokens + jnp.arange(sharing, dtype=jnp.int32), size // tokens)[:, None]
        key_scale, key_zero = (
            backend.load(x.at[of_keys, channel]).astype(jnp.float32)[:, None] for x in (k_scale, k_zero)
        )
        scaled_queries = (wide[None] * key_scale).reshape(sharing * group, dim).astype(q.dtype)
        added = jnp.sum(wide[None] * key_zero, axis=2)
        for position in range(count):
            slot = first + position + count * jnp.arange(rows, dtype=jnp.int32)
            at = within(slot, size)
            live = (slot < stop) & (backend.load(visible_ref.at[at]) > 0)
            logits = dot(scaled_queries, _codes(keys, position * bits, mask, q.dtype), 1).reshape(sharing, group, rows)
            logits = jnp.sum(jnp.where(mine, logits + added[:, :, None], 0.0), axis=0)
            share, shrink, top, total = softmax(logits, live, top, total)
            # Scales of masked slots, which can be NaN, are not read.
            there = jnp.broadcast_to(live[None], (groups, rows))
            value_scale, value_zero = (
                backend.load(x.at[which, at[None]], mask=there, other=jnp.zeros((), x.dtype)).astype(jnp.float32)
                for x in (v_scale, v_zero)
            )
            weights = (value_scale[:, None] * share[None]).reshape(groups * group, rows).astype(q.dtype)
            sums = dot(weights, _codes(values, position * bits, mask, q.dtype), 0).reshape(groups, group, dim)
            acc = acc * shrink[None, :, None] + sums
            zeros = zeros * shrink[None] + jnp.sum(value_zero[:, None] * share[None], axis=2)
        return acc, zeros, top, total

    def exact(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        acc, top, total = carry
        slot = late + i * LATE + jnp.arange(LATE, dtype=jnp.int32)
        at = jnp.minimum(slot, size - 1)
        live = (slot < filled) & (backend.load(visible_ref.at[at]) > 0)
        there, own = (jnp.broadcast_to(x[:, None], (LATE, dim)) for x in (live, live & (slot >= k_packed)))
        place = jax.lax.rem(at, k_recent.shape[0])[:, None], jax.lax.rem(at, v_recent.shape[0])[:, None]
        keys = backend.load(k_recent.at[place[0], channel], mask=own, other=jnp.zeros((), k_recent.dtype))
        values = backend.load(v_recent.at[place[1], channel], mask=there, other=jnp.zeros((), v_recent.dtype))
        # Some of the slots with unquantised values have quantised keys.
        codes = backend.load(k_codes.at[(at // count)[:, None], channel]).astype(jnp.int32)
        key_scale, key_zero = (
            backend.load(x.at[(at // tokens)[:, None], channel]).astype(jnp.float32) for x in (k_scale, k_zero)
        )
        unpacked = _codes(codes, (at % count * bits)[:, None], mask, jnp.float32) * key_scale + key_zero
        logits = dot(q, jnp.where(own, keys, unpacked.astype(q.dtype)), 1)
        share, shrink, top, total = softmax(logits, live, top, total)
        return acc * shrink[:, None] + dot(share.astype(values.dtype), values, 0), top, total

    nothing = (
        jnp.zeros((groups, group, dim), jnp.float32),
        jnp.zeros((groups, group), jnp.float32),
        jnp.full((group,), MASKED, jnp.float32),
        jnp.zeros((group,), jnp.float32),
    )
    acc, zeros, top, total = jax.lax.fori_loop(0, pl.cdiv(jnp.maximum(stop - begin, 0), block), packed, nothing)
    own_group = channel // (dim // groups) == which
    acc = jnp.sum(jnp.where(own_group[:, None], acc + zeros[:, :, None], 0.0), axis=0)
    latest = jnp.where(number < splits, 0, filled - late)
    results = jax.lax.fori_loop(0, pl.cdiv(latest, LATE), exact, (acc, top, total))
    for ref, value in zip((out_ref, top_ref, total_ref), results, strict=True):
        store_heads(ref, value)


def _codes(joined: Array, shift: Any, mask: int, dtype: Any) -> Float[Array, "R H"]:
    """Extract one code from each byte. Codes are exact in every float type."""
    return ((joined >> shift) & mask).astype(dtype)
