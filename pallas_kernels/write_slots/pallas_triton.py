"""Triton kernel of `write_slots`: write a new token into one slot per head, in all arrays of a cache.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must match `reference.py`; only
rotated keys may differ, by rounding.

One program per sequence and head writes to all arrays.

It is separate from the attention kernel, since writing the token there saves nothing. Measured on an H200, for an
eighth of a step of 8 layers and the vocabulary head: 156.7 us in the attention kernel and 156.6 us in this one for 3712
slots per sequence, and 214.9 and 214.3 us for 65856 slots.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from ..device import float8_unsupported
from ..float8 import LARGEST, Float8Codes, Float8Factor
from ..head_shards import is_among, place_among
from ..rotary import DeferredRope, parts_of
from ..triton import backend, triton_call, triton_unsupported
from .types import SlotUpdate, Value

Kind = Literal["given", "codes", "factor"]
"""What is written of a value: itself, its 8-bit floats, or their factor."""


class Layout(NamedTuple):
    """Static properties of one cache.

    Attributes:
        heads: the layer's KV heads that are in this cache.
        parts: number of inputs per array's value: one, or three if it is rotated.
        kinds: per array, what is written of its value.
        counted: index of the counter that is also the slot, None if none is.
        masked: whether only some rows are written.
        counters: number of counters.
    """

    heads: tuple[int, ...]
    parts: tuple[int, ...]
    kinds: tuple[Kind, ...]
    counted: int | None
    masked: bool
    counters: int

    @property
    def inputs(self) -> int:
        """Number of arrays that are only read."""
        return sum(self.parts) + (self.counted is None) + self.masked

    @property
    def outputs(self) -> int:
        """Number of arrays that are changed."""
        return len(self.parts) + self.counters


def unsupported_reason(writings: Sequence[SlotUpdate]) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    if reason := triton_unsupported():
        return reason
    coded = [x for writing in writings for x in writing.values if isinstance(x, Float8Codes | Float8Factor)]
    if coded and (reason := float8_unsupported()):
        return reason
    vectors = [x for writing in writings for x in writing.arrays if x.ndim == 4]
    for dim in [x.shape[3] for x in vectors] + [parts_of(value.x)[0].shape[-1] for value in coded]:
        if dim & (dim - 1) or dim < 16:
            return f"head dim {dim} is not a power of two of at least 16"
    return None


def write_slots(writings: Sequence[SlotUpdate], *, interpret: bool = False) -> list[list[Array]]:
    """Write a value into one slot per head of each cache, and increment the counters; see the public function."""
    batch, layer_heads = writings[0].slot.shape[0], sum(len(writing.heads) for writing in writings)
    inputs, folded, layouts = [], [], []
    for writing in writings:
        # If the slot is also a counter, the kernel reads it from the counter. Passing it twice would require a copy.
        counted = next((i for i, x in enumerate(writing.counters) if x is writing.slot), None)
        mine = [writing.slot.reshape(-1)] if counted is None else []
        parts, kinds = [], []
        if writing.live is not None:
            mine.append(writing.live.astype(jnp.int32))
        for array, value in zip(writing.arrays, writing.values, strict=True):
            new, kind = _inputs(array, value, batch, layer_heads)
            mine += new
            parts.append(len(new))
            kinds.append(kind)
        inputs.append(mine)
        folded.append([x.reshape(-1, *x.shape[2:]) for x in writing.arrays] + [x.reshape(-1) for x in writing.counters])
        layouts.append(
            Layout(
                heads=tuple(writing.heads),
                parts=tuple(parts),
                kinds=tuple(kinds),
                counted=counted,
                masked=writing.live is not None,
                counters=len(writing.counters),
            )
        )
    written = _call(inputs, folded, batch=batch, heads=layer_heads, layouts=tuple(layouts), interpret=interpret)
    return [
        [new.reshape(x.shape) for new, x in zip(news, (*writing.arrays, *writing.counters), strict=True)]
        for news, writing in zip(written, writings, strict=True)
    ]


def _inputs(array: Array, value: Value, batch: int, heads: int) -> tuple[list[Array], Kind]:
    """Arrays that the kernel reads for a new value, and what it writes of it."""
    if isinstance(value, Float8Codes | Float8Factor | DeferredRope):
        vector = value if isinstance(value, DeferredRope) else value.x
        x, *tables = parts_of(vector)
        x = jnp.broadcast_to(x, (batch, heads, x.shape[-1]))
        kind = "codes" if isinstance(value, Float8Codes) else "factor" if isinstance(value, Float8Factor) else "given"
        return [x.reshape(-1, x.shape[-1]), *tables], kind
    shape = (batch, heads, *array.shape[3:])
    return [jnp.broadcast_to(jnp.asarray(value, array.dtype), shape).reshape(-1, *shape[2:])], "given"


@functools.partial(jax.jit, static_argnames=("batch", "heads", "layouts", "interpret"))
def _call(
    inputs: list[list[Array]],
    folded: list[list[Array]],
    *,
    batch: int,
    heads: int,
    layouts: tuple[Layout, ...],
    interpret: bool,
) -> list[list[Array]]:
    """Call the kernel. It is traced and lowered once for all layers of one shape."""
    given, changed = ([x for mine in of_all for x in mine] for of_all in (inputs, folded))
    written = triton_call(
        functools.partial(_body, batch=batch, heads=heads, layouts=layouts),
        grid=(batch * heads,),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in changed],
        input_output_aliases={len(given) + i: i for i in range(len(changed))},
        warps=1,
        stages=1,
        interpret=interpret,
        name="write_slots",
    )(*given, *changed)
    rest = iter(written)
    return [[next(rest) for _ in mine] for mine in folded]


def _body(*refs: Any, batch: int, heads: int, layouts: Sequence[Layout]) -> None:
    """Write one head of one sequence, in the cache that has it."""
    given, out_refs = iter(refs), iter(refs[-sum(layout.outputs for layout in layouts) :])
    row, head = pl.program_id(0) // heads, pl.program_id(0) % heads
    for layout in layouts:
        own = functools.partial(
            _write,
            [next(given) for _ in range(layout.inputs)],
            [next(out_refs) for _ in range(layout.outputs)],
            layout,
            row=row,
            head=head,
            rows=batch,
            layer_heads=heads,
        )
        if len(layouts) == 1:
            own()
        else:
            pl.when(is_among(head, layout.heads))(own)


def _write(
    refs: Sequence[Any],
    out_refs: Sequence[Any],
    layout: Layout,
    *,
    row: Array,
    head: Array,
    rows: int,
    layer_heads: int,
) -> None:
    """Write to all arrays for one sequence and head of a cache."""
    here, place = row * layer_heads + head, place_among(head, layout.heads)
    at = row * len(layout.heads) + place
    out_refs, counter_refs = out_refs[: len(layout.parts)], out_refs[len(layout.parts) :]
    slot_ref, *value_refs = refs if layout.counted is None else (counter_refs[layout.counted], *refs)
    value_refs = iter(value_refs)
    step = next(value_refs)[row] if layout.masked else 1
    slot = slot_ref[at]
    # Issue all loads before the first store: loads after a store would wait for the loads before it.
    counts = []
    for counter_ref in counter_refs:
        of_rows = counter_ref.shape[0] == rows  # heads share a counter
        index = row if of_rows else at
        counts.append((index, place == 0 if of_rows else place >= 0, counter_ref[index] + step))
    entries = [
        _entry([next(value_refs) for _ in range(part)], kind, here, row, out_ref)
        for part, kind, out_ref in zip(layout.parts, layout.kinds, out_refs, strict=True)
    ]
    for counter_ref, (index, first, count) in zip(counter_refs, counts, strict=True):
        backend.store(
            counter_ref.at[index + jnp.arange(1)], jnp.broadcast_to(count, (1,)), mask=jnp.broadcast_to(first, (1,))
        )
    for out_ref, entry in zip(out_refs, entries, strict=True):
        exists = (slot < out_ref.shape[1]) & (step > 0) if layout.masked else slot < out_ref.shape[1]
        slot_at = jnp.where(exists, slot, 0)
        for span, value in entry:
            index = (at, slot_at + jnp.arange(1)) if span is None else (at, slot_at, span)
            mask = jnp.broadcast_to(exists, value.shape)
            backend.store(out_ref.at[*index], value.astype(out_ref.dtype), mask=mask)


def _entry(refs: Sequence[Any], kind: Kind, here: Array, row: Array, out_ref: Any) -> list[tuple[Any, Array]]:
    """Return an array's new values by span of channels; the span is None for arrays without channels."""
    if refs[0].ndim == 1:
        return [(None, jnp.broadcast_to(refs[0][here], (1,)))]
    vector = _vector(refs, here, row)
    if kind == "given":
        return vector
    wide = [(span, x.astype(jnp.float32)) for span, x in vector]
    factor = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(x)) for _, x in wide)) / LARGEST
    if kind == "factor":
        return [(None, jnp.broadcast_to(factor, (1,)))]
    divisor = jnp.where(factor > 0, factor, 1.0)
    return [(span, x / divisor) for span, x in wide]


def _vector(refs: Sequence[Any], here: Array, row: Array) -> list[tuple[Any, Array]]:
    """A vector by span of channels, rotated if there are cosines and sines."""
    dim = refs[0].shape[1]
    if len(refs) == 1:
        return [(pl.ds(0, dim), refs[0][here])]
    halves = pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)
    a, b = (refs[0][here, half].astype(jnp.float32) for half in halves)
    cos, sin = (table[row] for table in refs[1:])
    turned = a * cos - b * sin, b * cos + a * sin
    return [(half, x.astype(refs[0].dtype)) for half, x in zip(halves, turned, strict=True)]
