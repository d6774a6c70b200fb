"""Keys and values in 8-bit floats with one factor per vector. `kvjax.pallas_kernels.float8` has the format."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.pallas_kernels.float8 import codes_of, factor_of


@flax.struct.dataclass
class Float8:
    """Keys or values in 8-bit floats. B rows, K KV heads, C slots, H head dim.

    Attributes:
        codes: numbers divided by the factor of their slot, in float8_e4m3fn.
        factor: factor of each slot, in float32; 0 for the vector 0.
    """

    codes: Float[Array, "B K C H"]
    factor: Float[Array, "B K C"]

    @property
    def slot_axes(self) -> Any:
        """Slot axis of each array."""
        return jax.tree.map(lambda _: 2, self)

    def part(self, start: Any, size: int) -> "Float8":
        """Return `size` slots from `start` on."""
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=2), self)


def encode(x: Float[Array, "*B H"]) -> Float8:
    """Store vectors: keys or values of any leading axes."""
    factor = factor_of(x)
    return Float8(codes_of(x, factor), factor)


def decode(stored: Float8) -> Float[Array, "*B H"]:
    """Return the vectors in float32."""
    return stored.codes.astype(jnp.float32) * stored.factor[..., None]


def put(stored: Float8, x: Float[Array, "B K H"], slot: Int[Array, "B K"]) -> Float8:
    """Set one slot of each head. Slots out of bounds are dropped."""
    rows, heads = (jnp.arange(n, dtype=jnp.int32) for n in slot.shape)
    at = rows[:, None], heads[None, :], slot
    return jax.tree.map(lambda held, new: held.at[at].set(new, mode="drop"), stored, encode(x))


def put_run(stored: Float8, x: Float[Array, "B K W H"], start: Int[Array, "B K"], stop: Int[Array, "B K"]) -> Float8:
    """Set slots `start` to `stop` of each head to the first vectors of `x`."""
    slot = start[..., None] + jnp.arange(x.shape[2], dtype=jnp.int32)
    slot = jnp.where(slot < stop[..., None], slot, stored.factor.shape[2])
    rows, heads = (jnp.arange(n, dtype=jnp.int32) for n in start.shape)
    at = rows[:, None, None], heads[None, :, None], slot
    return jax.tree.map(lambda held, new: held.at[at].set(new, mode="drop"), stored, encode(x))
