"""Missing slots for GPUs, as a Triton kernel: one program per run of slots, which loads those that are missing and nothing else.

A store may lie in pinned host memory. XLA hands such an operand to a kernel as it is, and loads from it go over the bus: a slot of
128 channels in bfloat16 is two requests of 128 bytes, and enough programs run at once to keep the bus busy.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from ..triton import backend, triton_call, triton_unsupported

RUN = 16
"""Slots of a program."""


def unsupported_reason(stores: Sequence[Array], index: Array, missing: Array, got: Sequence[Array]) -> str | None:
    """Why this kernel does not serve a case, or None if it does."""
    return triton_unsupported(dim=stores[0].shape[-1])


def fetch_slots(
    stores: Sequence[Array], index: Array, missing: Array, got: Sequence[Array], *, interpret: bool = False
) -> list[Array]:
    """Slots of each store; see the public function."""
    rows, heads = index.shape[:2]
    folded = [x.reshape(-1, *x.shape[2:]) for x in stores]
    found = _call(
        jnp.where(missing, index, -1).reshape(-1),
        folded,
        [x.reshape(-1, x.shape[-1]) for x in got],
        each=(heads // stores[0].shape[1]) * index.shape[2],
        interpret=interpret,
    )
    return [x.reshape(rows, heads, -1, x.shape[-1]) for x in found]


@functools.partial(jax.jit, static_argnames=("each", "interpret"))
def _call(index: Array, stores: list[Array], got: list[Array], *, each: int, interpret: bool) -> list[Array]:
    """The kernel, traced and lowered once for all layers of one shape; `each` entries of `index` are of one head of the stores."""
    found = triton_call(
        functools.partial(_body, each=each, count=index.shape[0]),
        grid=(pl.cdiv(index.shape[0], RUN),),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in got],
        input_output_aliases={1 + len(stores) + i: i for i in range(len(got))},
        warps=4,
        stages=1,
        interpret=interpret,
        name="fetch_slots",
    )(index, *stores, *got)
    return list(found)


def _body(index_ref: Any, *refs: Any, each: int, count: int) -> None:
    """One run of slots, of all stores."""
    stores = refs[: len(refs) // 3]
    outs = refs[-len(stores) :]
    place = pl.program_id(0) * RUN + jnp.arange(RUN, dtype=jnp.int32)
    inside = place < count
    slot = backend.load(index_ref.at[place], mask=inside, other=-1)
    missing, slot = slot >= 0, jnp.maximum(slot, 0)
    head = jnp.where(inside, place // each, 0)
    channel = jnp.arange(stores[0].shape[-1], dtype=jnp.int32)[None]
    mask = jnp.broadcast_to(missing[:, None], (RUN, stores[0].shape[-1]))
    # All is asked for before anything is written.
    values = [backend.load(store.at[head[:, None], slot[:, None], channel], mask=mask, other=0.0) for store in stores]
    for out, value in zip(outs, values, strict=True):
        backend.store(out.at[place[:, None], channel], value, mask=mask)
