"""XLA reference of `write_slots`: one scatter per array.

`Op` in `api.py` calls it if the kernel does not support the case. The kernel must match it.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..float8 import Float8Codes, Float8Factor, codes_of, factor_of
from ..rotary import DeferredRope
from .types import SlotUpdate


def write_slots(writings: Sequence[SlotUpdate]) -> list[list[Array]]:
    """Write a value into one slot per head of each cache, and increment the counters."""
    return [_written(writing) for writing in writings]


def _written(writing: SlotUpdate) -> list[Array]:
    slot, live, step = writing.slot, writing.live, 1
    if live is not None:
        slot, step = jnp.where(live[:, None], slot, np.iinfo(np.int32).max), live.astype(jnp.int32)
    rows, heads = np.ogrid[: slot.shape[0], : slot.shape[1]]
    written = [
        array.at[rows, heads, slot].set(jnp.asarray(_of(writing.heads, x), array.dtype), mode="drop")
        for array, x in zip(writing.arrays, writing.values, strict=True)
    ]
    return written + [counter + _by_row(step, counter) for counter in writing.counters]


def _by_row(step: Any, counter: Array) -> Any:
    return step if isinstance(step, int) else step.reshape(-1, *[1] * (counter.ndim - 1))


def _of(heads: tuple[int, ...], value: Any) -> Any:
    """Return the values of these heads, if each head has its own."""
    if isinstance(value, Float8Codes | Float8Factor):
        x = _of(heads, value.x)
        factor = factor_of(x)
        return factor if isinstance(value, Float8Factor) else codes_of(x, factor)
    value = value() if isinstance(value, DeferredRope) else value
    if np.ndim(value) < 2 or value.shape[1] == 1 or heads == tuple(range(value.shape[1])):
        return value
    return value[:, np.asarray(heads)]
