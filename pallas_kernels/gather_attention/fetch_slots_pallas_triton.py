"""Triton kernel of `fetch_slots`: load selected slots that are missing on the device from stores in host memory.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must equal those of `reference.py`.

One program per run of slots loads only the missing ones.

A store can be in pinned host memory. XLA passes such an operand to the kernel unchanged, and loads from it cross the
bus. A slot of 128 bfloat16 channels is two requests of 128 bytes. Enough programs run at once to saturate the bus.
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
"""Slots per program."""


def unsupported_reason(stores: Sequence[Array], index: Array, missing: Array, got: Sequence[Array]) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    return triton_unsupported(dim=stores[0].shape[-1])


def fetch_slots(
    stores: Sequence[Array], index: Array, missing: Array, got: Sequence[Array], *, interpret: bool = False
) -> list[Array]:
    """Load the missing slots of each store; see the public function."""
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
    """Call the kernel. It is traced and lowered once for all layers of one shape.

    `each` consecutive entries of `index` belong to one head of the stores.
    """
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
    """Load one run of slots from all stores."""
    stores = refs[: len(refs) // 3]
    outs = refs[-len(stores) :]
    place = pl.program_id(0) * RUN + jnp.arange(RUN, dtype=jnp.int32)
    inside = place < count
    slot = backend.load(index_ref.at[place], mask=inside, other=-1)
    missing, slot = slot >= 0, jnp.maximum(slot, 0)
    head = jnp.where(inside, place // each, 0)
    channel = jnp.arange(stores[0].shape[-1], dtype=jnp.int32)[None]
    mask = jnp.broadcast_to(missing[:, None], (RUN, stores[0].shape[-1]))
    # Issue all loads before the first store.
    values = [backend.load(store.at[head[:, None], slot[:, None], channel], mask=mask, other=0.0) for store in stores]
    for out, value in zip(outs, values, strict=True):
        backend.store(out.at[place[:, None], channel], value, mask=mask)
