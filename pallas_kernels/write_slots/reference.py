"""The same in plain XLA: a scatter an array."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..rotary import Turned


def write_slots(
    arrays: Sequence[Array],
    slot: Int[Array, "B K"],
    values: Sequence[Array | Turned | int | float],
    counters: Sequence[Array] = (),
) -> list[Array]:
    """Arrays with a value in one slot a head, and counters one greater; see the public function."""
    rows, heads = np.ogrid[: slot.shape[0], : slot.shape[1]]
    plain = [x() if isinstance(x, Turned) else x for x in values]
    written = [
        array.at[rows, heads, slot].set(jnp.asarray(x, array.dtype), mode="drop")
        for array, x in zip(arrays, plain, strict=True)
    ]
    return written + [counter + 1 for counter in counters]
