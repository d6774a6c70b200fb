"""Triton kernel of `decode_attention`: split-K flash decoding (Dao et al. 2023) over a compressed cache.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must match `reference.py` up to
rounding.

The slots of one sequence and KV head are split among programs. Each program loops over its part up to the last live
slot, with a running softmax for all query heads of the group. Keys and values are thus read from memory once, and free
slots at the end are not read. A second, small kernel combines the parts. With many sequences, a head is one part, and
its program writes the result.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ..device import float8_unsupported
from ..float8 import FLOAT8
from ..masking import MASKED
from ..products import dot
from ..rotary import DeferredRope, parts_of
from ..triton import backend, entry, load_heads, rotated_heads, store_heads, triton_call, triton_unsupported
from ..tuning import tuned
from . import float8
from .types import Attended, Factors, Rotation

Rotated = Literal["all", "queries", "nothing"]
"""Which inputs the kernel rotates."""

LONG_PART = 1280
"""Maximum slots of a part of a head, up to rounding."""

MOST_PARTS = 128
"""Maximum number of parts of a head by default. One program of the second kernel combines them, which takes long for more."""

LOOK = 1024
"""Weights loaded at a time to find the last live slot."""


def unsupported_reason(
    q: Array | DeferredRope,
    k: Array,
    v: Array,
    *_: Any,
    rotation: Rotation | None = None,
    factors: Factors | None = None,
    sinks: Array | None = None,
    **__: Any,
) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    if sinks is not None:
        return "probabilities beside attention sinks are requested"
    if factors is None:
        return unsupported(k, rotation)
    if rotation is not None:
        return "keys in 8-bit floats are rotated"
    for name, x in (("keys", k), ("values", v)):
        if x.dtype != FLOAT8:
            return f"{name} with factors are {x.dtype}, not float8_e4m3fn"
    if reason := float8_unsupported():
        return reason
    return unsupported(jax.ShapeDtypeStruct(k.shape, parts_of(q)[0].dtype), None)


def unsupported(k: Array | jax.ShapeDtypeStruct, rotation: Rotation | None) -> str | None:
    """Return why the kernel does not support such keys, or None if it does."""
    dim, slots = k.shape[-1], k.shape[-2]
    if reason := triton_unsupported(dim=dim):
        return reason
    if k.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"keys are {k.dtype}"
    if rotation is not None and 2 * rotation.inv_freq.shape[-1] != dim:
        return f"{2 * rotation.inv_freq.shape[-1]} of {dim} channels are rotated; the kernel only rotates all of them"
    if slots < 16:
        return f"{slots} slots are fewer than a block of 16"
    return None


def decode_attention(
    q: Float[Array, "B N H"] | DeferredRope,
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    weight: Float[Array, "B K C"],
    *,
    scale: float,
    rotation: Rotation | None = None,
    factors: Factors | None = None,
    probs: bool = False,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> Attended:
    """Softmax attention over cache slots; see the public function.

    Args:
        sizes: `block` (slots read at a time), `splits` (programs per head), `warps` and `stages`, instead of the tuned
            sizes.
    """
    batch, kv_heads, slots, dim = k.shape
    sizes = sizes or _sizes(batch * kv_heads, slots, dim, k.dtype, rotation is not None)
    return _attend(q, k, v, weight, rotation, factors, scale=scale, probs=probs, interpret=interpret, **sizes)


@functools.partial(jax.jit, static_argnames=("scale", "probs", "interpret", "block", "splits", "warps", "stages"))
def _attend(
    q: Float[Array, "B N H"] | DeferredRope,
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    weight: Float[Array, "B K C"],
    rotation: Rotation | None,
    factors: Factors | None,
    *,
    scale: float,
    probs: bool,
    interpret: bool,
    block: int,
    splits: int,
    warps: int,
    stages: int,
) -> Attended:
    """Call the kernels. They are traced and lowered once for all layers of one shape."""
    unrotated, *_ = parts_of(q)
    batch, heads, dim = unrotated.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    group = heads // kv_heads
    part = -(-slots // (splits * block)) * block
    splits = -(-slots // part)

    fold = batch * kv_heads
    inputs = [
        unrotated.reshape(fold, group, dim),
        k.reshape(fold, slots, dim),
        (v if factors is None else float8.paired(v)).reshape(fold, slots, -1),
        weight.reshape(fold, slots),
        *(factor.reshape(fold, slots) for factor in factors or ()),
    ]
    specs = [entry(x) for x in inputs]
    if rotation is not None:
        # Rotated keys are rounded to bfloat16's 8 significant bits. Tables in float16, with 11 bits, lose less than
        # that and halve the reads. (Two short tables that stay in the L1 cache, for the sum of two angles, take 16 us
        # longer on an H200 with 8 sequences of 3456 slots.)
        short = k.dtype == jnp.bfloat16
        tables = [table.astype(jnp.float16 if short else jnp.float32) for table in rotation.tables()]
        places = [rotation.query.reshape(fold, 1), rotation.place.reshape(fold, slots)]
        inputs += [*tables, *places]
        specs += [*(pl.BlockSpec(table.shape, lambda h, s: (0, 0)) for table in tables), *map(entry, places)]
    elif isinstance(q, DeferredRope):
        inputs += [q.cos, q.sin]
        specs += [pl.BlockSpec((1, dim // 2), lambda h, s: (h // kv_heads, 0))] * 2
    results = [
        jax.ShapeDtypeStruct((fold, group, dim), unrotated.dtype),
        jax.ShapeDtypeStruct((fold, group), jnp.float32),
    ]
    if splits == 1:
        shapes, out_specs = list(results), [entry(x) for x in results]
    else:
        shapes = [
            jax.ShapeDtypeStruct((fold, splits, group, dim), jnp.float32),
            jax.ShapeDtypeStruct((fold, splits, group), jnp.float32),
            jax.ShapeDtypeStruct((fold, splits, group), jnp.float32),
        ]
        out_specs = [
            pl.BlockSpec((None, None, group, dim), lambda h, s: (h, s, 0, 0)),
            pl.BlockSpec((None, None, group), lambda h, s: (h, s, 0)),
            pl.BlockSpec((None, None, group), lambda h, s: (h, s, 0)),
        ]
    parts = len(shapes)
    if probs:
        shapes.append(jax.ShapeDtypeStruct((fold, group, slots), jnp.float32))
        out_specs.append(entry(shapes[-1]))

    rotated: Rotated = "all" if rotation is not None else "queries" if isinstance(q, DeferredRope) else "nothing"

    def body(*refs: Any) -> None:
        options = {"scale": scale, "block": block, "part": part, "slots": slots, "rotated": rotated}
        options |= {"alone": splits == 1, "scaled": factors is not None, "interpret": interpret}
        attend_part(*refs, number=pl.program_id(1), **options)

    part_of = pl.BlockSpec((None, splits, None), lambda h, g: (h, 0, g))
    found = triton_call(
        body,
        grid=(fold, splits),
        in_specs=specs,
        out_specs=out_specs,
        out_shape=shapes,
        warps=warps,
        stages=stages,
        interpret=interpret,
        name="decode_attention",
    )(*inputs)
    joined, logits = found[:parts], found[parts:]
    if splits > 1:
        joined = triton_call(
            join_parts,
            grid=(fold, group),
            in_specs=[pl.BlockSpec((None, splits, None, dim), lambda h, g: (h, 0, g, 0)), part_of, part_of],
            out_specs=[
                pl.BlockSpec((None, None, dim), lambda h, g: (h, g, 0)),
                pl.BlockSpec((None, 1), lambda h, g: (h, g)),
            ],
            out_shape=results,
            warps=4,
            stages=1,
            interpret=interpret,
            name="decode_attention_join",
        )(*joined)
    out, logsumexp = joined
    mass = None
    if probs:
        # Logits of slots that no program reached were never written.
        seen = (weight.reshape(fold, 1, slots) > 0) & (logsumexp > MASKED)[..., None]
        mass = jnp.mean(jnp.where(seen, jnp.exp(logits[0] - logsumexp[..., None]), 0.0), axis=1)
        mass = mass.reshape(weight.shape)
    return Attended(out.reshape(unrotated.shape), logsumexp.reshape(batch, heads), mass)


def join_parts(acc_ref: Any, top_ref: Any, total_ref: Any, out_ref: Any, lse_ref: Any) -> None:
    """Combine one query head's parts, weighted by their shares of the softmax denominator."""
    splits, dim = acc_ref.shape
    at = jnp.arange(pl.next_power_of_2(splits), dtype=jnp.int32)
    inside = at < splits
    top = backend.load(top_ref.at[at], mask=inside, other=MASKED)
    total = backend.load(total_ref.at[at], mask=inside, other=0.0)
    whole_row = jnp.arange(dim, dtype=jnp.int32)[None]
    acc = backend.load(
        acc_ref.at[at[:, None], whole_row], mask=jnp.broadcast_to(inside[:, None], (at.size, dim)), other=0.0
    )
    best = jnp.max(top)
    share = jnp.where(total > 0, jnp.exp(top - best), 0.0)
    whole = jnp.sum(total * share)
    some = whole > 0
    divisor = jnp.where(some, whole, 1.0)
    out_ref[...] = (jnp.sum(acc * share[:, None], axis=0) / divisor).astype(out_ref.dtype)
    lse_ref[...] = jnp.full((1,), jnp.where(some, best + jnp.log(divisor), -jnp.inf), jnp.float32)


def block_size(slots: int, dim: int, dtype: Any) -> int:
    """Return the slots read at a time: 16 KB of keys, between 16 and 128 slots, and at most `slots`."""
    in_bytes = 16384 // (dim * jnp.dtype(dtype).itemsize)
    return max(16, min(128, *(1 << (size.bit_length() - 1) for size in (in_bytes, slots))))


def _sizes(fold: int, slots: int, dim: int, dtype: Any, rotated: bool) -> dict[str, int]:
    """Return block sizes for `fold` sequences × KV heads.

    The default is about 512 programs with at least one block each, and 768 for 8-bit floats. If that gives one part per
    head, heads are split into parts of about `LONG_PART` slots. Lengths can differ, and the longest part determines the
    time. A program with a single block reads it as two halves.

    Measured on an H200 with 8 KV heads of 128 channels, in bfloat16:

    - 32 sequences of 8192 slots: four parts per head instead of two gain 9 % if lengths are ragged, and lose 5 % if
      they are equal.
    - 40 sequences of up to 9216 slots, of ragged lengths (H100): 335 us with one part per head, 287 us with eight.
    - One sequence of 3712 slots: 58 parts of two half blocks take 12.3 us, and 29 parts of two blocks 13.7 us.
    """
    block = block_size(slots, dim, dtype)
    programs = 768 if jnp.dtype(dtype).itemsize == 1 else 512
    splits = max(1, min(programs // fold, MOST_PARTS, slots // block))
    if splits == 1:
        splits = max(1, slots // LONG_PART)
    if slots // splits <= block:
        block = max(16, block // 2)
    case = {"heads": fold, "slots": slots, "head_dim": dim, "dtype": jnp.dtype(dtype).name, "rotated": rotated}
    return tuned(
        "decode_attention", case, {"block": block, "splits": splits, "warps": 4, "stages": 2 if block > 64 else 3}
    )


def attend_part(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    weight_ref: Any,
    *refs: Any,
    number: Array,
    scale: float,
    block: int,
    part: int,
    slots: int,
    rotated: Rotated,
    alone: bool = False,
    scaled: bool = False,
    interpret: bool = False,
) -> None:
    """Attend over one part of one head: unnormalised values, the largest logit, and the sum of exponentials.

    Args:
        q_ref, k_ref, v_ref, weight_ref: queries, keys, values and weights of the head.
        refs: factors of keys and of values, if `scaled`; inputs of the rotation, according to `rotated`; then the outputs; then the logits, if requested.
        number: index of the part.
        scale: factor on the logits.
        block: slots read at a time.
        part, slots: slots per part, and in total.
        rotated: which inputs are rotated.
        alone: whether the part is the whole head. The outputs are then the attended values and the log-sum-exp.
        scaled: whether keys and values are 8-bit floats with factors. Values are then given as pairs of channels.
        interpret: whether the kernel runs in interpret mode.
    """
    factor_refs, refs = refs[: 2 * scaled], refs[2 * scaled :]
    rotation_refs, rest = refs[: (count := {"all": 4, "queries": 2, "nothing": 0}[rotated])], refs[count:]
    outputs = 2 if alone else 3
    part_refs, logit_refs = rest[:outputs], rest[outputs:]
    dim = q_ref.shape[1]
    begin = number * part
    end = jnp.minimum(begin + part, slots)
    even = slots % block == 0

    def load(ref: Any, inside: Array, *index: Any) -> Array:
        """Load the entries of a block that are inside the cache."""
        if even:
            return backend.load(ref.at[*index])
        mask = inside if len(index) == 1 else jnp.broadcast_to(inside[:, None], (block, index[1].size))
        return backend.load(ref.at[*index], mask=mask, other=jnp.zeros((), ref.dtype))

    halves = pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)
    if rotated == "all":
        cos_ref, sin_ref, query_ref, _ = rotation_refs
        at = jnp.clip(query_ref[0], 0, slots - 1)
        channel = jnp.arange(dim // 2, dtype=jnp.int32)
        first, second = (load_heads(q_ref, channel + begin) for begin in (0, dim // 2))
        q: Any = _halves(first, second, cos_ref[at][None], sin_ref[at][None])
    else:
        q = rotated_heads(q_ref, *rotation_refs)

    undo: Any = None
    if scaled and q.dtype != jnp.float32:
        q, undo = float8.in_float16(q)
    group = len(q[0] if rotated == "all" else q)
    width = min(LOOK, pl.next_power_of_2(part))

    def look(i: Any, last: Array) -> Array:
        at = begin + i * width + jnp.arange(width, dtype=jnp.int32)
        weight = backend.load(weight_ref.at[at], mask=at < end, other=0.0)
        return jnp.maximum(last, jnp.max(jnp.where(weight > 0, at + 1, 0)))

    # A short part loads queries and weights together, and waits for memory once instead of twice.
    last = look(0, begin) if part <= width else jax.lax.fori_loop(0, pl.cdiv(part, width), look, begin)

    def fold(i: Array, carry: tuple[tuple[Array, ...], Array, Array]) -> tuple[tuple[Array, ...], Array, Array]:
        accs, top, total = carry
        at = begin + i * block + jnp.arange(block, dtype=jnp.int32)
        span, inside = pl.ds(begin + i * block, block), at < slots
        weight = load(weight_ref, inside, span)
        live = weight > 0
        if rotated == "all":
            cos_ref, sin_ref, _, place_ref = rotation_refs
            angle = (
                jnp.clip(load(place_ref, inside, span), 0, slots - 1)[:, None],
                jnp.arange(dim // 2, dtype=jnp.int32)[None],
            )
            cos, sin = backend.load(cos_ref.at[*angle]), backend.load(sin_ref.at[*angle])
            first, second = (load(k_ref, inside, span, half) for half in halves)
            keys = _halves(first, second, cos, sin)
            logits = sum(dot(queries, key, 1) for queries, key in zip(q, keys, strict=True))
        else:
            keys = load(k_ref, inside, span, pl.ds(0, dim))
            logits = dot(q, keys.astype(q.dtype), 1)
        factor = None
        count = jnp.where(live, weight, 1.0)
        if scaled:
            k_factor_ref, v_factor_ref = factor_refs
            logits *= (
                load(k_factor_ref, inside, span) if undo is None else undo[:, None] * load(k_factor_ref, inside, span)
            )
            # Shares are of values as they are stored, so that the largest one is 1.
            factor = jnp.maximum(backend.load(v_factor_ref.at[span], mask=live, other=1.0), float8.SMALLEST)
            count *= factor
        bias = float8.log(count, interpret) if scaled else jnp.log(count)
        logits = jnp.where(live, logits * scale + bias, MASKED)
        for logit_ref in logit_refs:
            shown = logits if factor is None else logits - jnp.log(factor)
            if group == logit_ref.shape[0]:
                mask = None if even else jnp.broadcast_to(inside, logits.shape)
                backend.store(logit_ref.at[:, span], shown, mask=mask)
            else:
                head = jnp.arange(group, dtype=jnp.int32)[:, None]
                backend.store(logit_ref.at[head, at[None]], shown, mask=(head < logit_ref.shape[0]) & inside)
        peak = jnp.maximum(top, jnp.max(logits, axis=1))
        shrink = jnp.exp(top - peak)
        shares = jnp.where(live, jnp.exp(logits - peak[:, None]), 0.0)
        # Values of free slots, which can be NaN, are not read.
        values = backend.load(
            v_ref.at[span],
            mask=jnp.broadcast_to(live[:, None], (block, v_ref.shape[1])),
            other=jnp.zeros((), v_ref.dtype),
        )
        parts = [part.astype(q.dtype) for part in float8.split(values, interpret)] if scaled else [values]
        accs = tuple(
            acc * shrink[:, None] + dot(shares.astype(part.dtype), part, 0)
            for acc, part in zip(accs, parts, strict=True)
        )
        probs = shares if factor is None else shares * (1 / factor)
        return accs, peak, total * shrink + jnp.sum(probs, axis=1)

    # Of pairs of channels, the first and the second ones are apart.
    columns = v_ref.shape[1]
    nothing = (
        (jnp.zeros((group, columns), jnp.float32),) * (dim // columns),
        jnp.full((group,), MASKED, jnp.float32),
        jnp.zeros((group,), jnp.float32),
    )
    accs, top, total = jax.lax.fori_loop(0, pl.cdiv(last - begin, block), fold, nothing)
    if alone:
        some = total > 0
        divisor = jnp.where(some, total, 1.0)
        accs = tuple((acc / divisor[:, None]).astype(part_refs[0].dtype) for acc in accs)
        others = (jnp.where(some, top + jnp.log(divisor), -jnp.inf),)
    else:
        others = top, total
    for first, acc in enumerate(accs):
        channel = None if len(accs) == 1 else first + len(accs) * jnp.arange(acc.shape[1], dtype=jnp.int32)
        store_heads(part_refs[0], acc, channel)
    for ref, value in zip(part_refs[1:], others, strict=True):
        store_heads(ref, value)


def _halves(first: Array, second: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    """Rotate heads [R, H/2], given as two halves of their channels, in float32."""
    a, b, cos, sin = (x.astype(jnp.float32) for x in (first, second, cos, sin))
    return (a * cos - b * sin).astype(first.dtype), (b * cos + a * sin).astype(first.dtype)
