"""A new entry in one slot a head for GPUs, as a Triton body: one program a row and head, which writes to every array."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from ..dispatch import triton
from ..rotary import Turned


def refuses(arrays: Sequence[Array]) -> str | None:
    """Why this body does not serve a case, or None if it does."""
    if reason := triton():
        return reason
    for dim in (x.shape[3] for x in arrays if x.ndim == 4):
        if dim & (dim - 1) or dim < 16:
            return f"head dim {dim} is not a power of two from 16 on"
    return None


def write_slots(
    arrays: Sequence[Array],
    slot: Int[Array, "B K"],
    values: Sequence[Array | Turned | int | float],
    counters: Sequence[Array] = (),
    *,
    interpret: bool = False,
) -> list[Array]:
    """Arrays with a value in one slot a head, and counters one greater; see the public function."""
    batch, heads = slot.shape
    changed = [*arrays, *counters]
    folded = [x.reshape(batch * heads, *x.shape[2:]) for x in arrays] + [x.reshape(-1) for x in counters]
    # Where the slot is a counter, too, it is read where it is changed: given twice, it would be copied first.
    counted = next((i for i, x in enumerate(counters) if x is slot), None)
    inputs, parts = [slot.reshape(-1)] if counted is None else [], []
    for array, value in zip(arrays, values, strict=True):
        shape = (batch, heads, *array.shape[3:])
        if isinstance(value, Turned):
            new = [value.x.reshape(-1, shape[-1]), value.cos, value.sin]
        else:
            new = [jnp.broadcast_to(jnp.asarray(value, array.dtype), shape).reshape(-1, *shape[2:])]
        inputs += new
        parts.append(len(new))
    written = _call(
        inputs, folded, programs=batch * heads, parts=tuple(parts), heads=heads, counted=counted, interpret=interpret
    )
    return [new.reshape(x.shape) for new, x in zip(written, changed, strict=True)]


@functools.partial(jax.jit, static_argnames=("programs", "parts", "heads", "counted", "interpret"))
def _call(
    inputs: list[Array],
    folded: list[Array],
    *,
    programs: int,
    parts: tuple[int, ...],
    heads: int,
    counted: int | None,
    interpret: bool,
) -> list[Array]:
    """The kernel, traced and lowered once for all layers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas import triton as backend

        written = pl.pallas_call(
            functools.partial(_body, parts=parts, heads=heads, counted=counted),
            grid=(programs,),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in folded],
            input_output_aliases={len(inputs) + i: i for i in range(len(folded))},
            compiler_params=backend.CompilerParams(num_warps=1, num_stages=1),
            interpret=interpret,
            name="write_slots",
        )(*inputs, *folded)
    return list(written)


def _body(*refs: Any, parts: Sequence[int], heads: int, counted: int | None) -> None:
    """All arrays of one row and head."""
    from jax.experimental.pallas import triton as backend

    out_refs = refs[(len(refs) + sum(parts) + (counted is None)) // 2 :]
    out_refs, counter_refs = out_refs[: len(parts)], out_refs[len(parts) :]
    slot_ref, *value_refs = refs[: sum(parts) + 1] if counted is None else (counter_refs[counted], *refs[: sum(parts)])
    value_refs, here = iter(value_refs), pl.program_id(0)
    slot = slot_ref[here]
    # All is read before anything is written: what comes after a write would wait for what came before it.
    counts = []
    for counter_ref in counter_refs:
        each = heads if counter_ref.shape[0] * heads == pl.num_programs(0) else 1  # heads that share a number
        counts.append((here // each, here % each == 0, counter_ref[here // each] + 1))
    entries = [
        _entry([next(value_refs) for _ in range(part)], here, heads, out_ref)
        for part, out_ref in zip(parts, out_refs, strict=True)
    ]
    for counter_ref, (at, first, count) in zip(counter_refs, counts, strict=True):
        backend.store(
            counter_ref.at[at + jnp.arange(1)], jnp.broadcast_to(count, (1,)), mask=jnp.broadcast_to(first, (1,))
        )
    for out_ref, entry in zip(out_refs, entries, strict=True):
        exists = slot < out_ref.shape[1]
        at = jnp.where(exists, slot, 0)
        for span, value in entry:
            index = (here, at + jnp.arange(1)) if span is None else (here, at, span)
            mask = jnp.broadcast_to(exists, value.shape)
            backend.store(out_ref.at[*index], value.astype(out_ref.dtype), mask=mask)


def _entry(refs: Sequence[Any], here: Array, heads: int, out_ref: Any) -> list[tuple[Any, Array]]:
    """What an array gets, by span of channels; None where it has none."""
    if out_ref.ndim == 2:
        return [(None, jnp.broadcast_to(refs[0][here], (1,)))]
    dim = out_ref.shape[2]
    if len(refs) == 1:
        return [(pl.ds(0, dim), refs[0][here])]
    halves = pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)
    a, b = (refs[0][here, half].astype(jnp.float32) for half in halves)
    cos, sin = (table[here // heads] for table in refs[1:])
    turned = a * cos - b * sin, b * cos + a * sin
    return [(half, x.astype(refs[0].dtype)) for half, x in zip(halves, turned, strict=True)]
