"""The same in plain XLA: a scatter an array."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..rotary import DeferredRope
from .types import SlotUpdate


def write_slots(writings: Sequence[SlotUpdate]) -> list[list[Array]]:
    """Arrays of caches with a value in one slot a head, and counters one greater."""
    return [_written(writing) for writing in writings]


def _written(writing: SlotUpdate) -> list[Array]:
    slot = writing.slot
    rows, heads = np.ogrid[: slot.shape[0], : slot.shape[1]]
    written = [
        array.at[rows, heads, slot].set(jnp.asarray(_of(writing.heads, x), array.dtype), mode="drop")
        for array, x in zip(writing.arrays, writing.values, strict=True)
    ]
    return written + [counter + 1 for counter in writing.counters]


def _of(heads: tuple[int, ...], value: Any) -> Any:
    """The values of these heads, where they have values of their own."""
    value = value() if isinstance(value, DeferredRope) else value
    if np.ndim(value) < 2 or value.shape[1] == 1 or heads == tuple(range(value.shape[1])):
        return value
    return value[:, np.asarray(heads)]
