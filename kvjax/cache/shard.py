"""What one device computes of a model that runs over a mesh, and the few things that devices tell each other.

A whole program runs on every device, on the device's own rows, KV heads and columns of the weights (`kvjax.runtime.mesh`). So nearly all
code sees a smaller model and a smaller batch and nothing of a mesh. What has to look across goes through a layer's `Shard`; without
a mesh each of its functions gives back what it is given.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Int, Shaped

DATA, HEADS, COPIES, SLOTS = "data", "heads", "copies", "slots"
"""Axes of a mesh: rows are sharded along the first, KV heads along the second; along the third devices hold the same heads, and along the
fourth they hold the same heads and share their slots, where a layer's cache can be sharded so (`kvjax.cache.sharded`)."""

SAME_HEADS = COPIES, SLOTS
"""Axes along which devices have the same KV heads."""

MODEL = HEADS, COPIES, SLOTS
"""Axes along which the columns of matrices and the vocabulary are sharded."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """Where devices stand to each other; the same value on all of them.

    Sums are over devices in an order that is one for all of them, so all have the same bits.

    Attributes:
        mesh: of the axes `data`, `heads`, `copies` and `slots`, abstract where sizes are asked for and nothing runs; None for one device.
    """

    mesh: Mesh | AbstractMesh | None = None

    @property
    def data(self) -> int:
        """Devices among which rows are sharded."""
        return self._size(DATA)

    @property
    def heads(self) -> int:
        """Devices among which KV heads are sharded."""
        return self._size(HEADS)

    @property
    def copies(self) -> int:
        """Devices that hold the same KV heads, and all slots of them."""
        return self._size(COPIES)

    @property
    def slots(self) -> int:
        """Devices that hold the same KV heads, and share their slots where these can be sharded."""
        return self._size(SLOTS)

    @property
    def same_heads(self) -> int:
        """Devices that hold the same KV heads."""
        return self.copies * self.slots

    @property
    def model(self) -> int:
        """Devices among which the matrices' columns and the vocabulary are sharded."""
        return self.heads * self.same_heads

    @property
    def devices(self) -> int:
        """All of them."""
        return self.data * self.model

    def sum_over_model(self, x: Shaped[Array, "*S"]) -> Shaped[Array, "*S"]:
        """The sum over the devices that share a model's matrices."""
        return x if self.mesh is None or self.model == 1 else jax.lax.psum(x, MODEL)

    def gather_over_model(self, x: Shaped[Array, "*S"]) -> Shaped[Array, "..."]:
        """Their arrays one after the other along the last axis."""
        if self.mesh is None or self.model == 1:
            return x
        return jax.lax.all_gather(x, MODEL, axis=x.ndim - 1, tiled=True)

    def gather_over_same_heads(self, x: Shaped[Array, "*S"]) -> Shaped[Array, "..."]:
        """Arrays of the devices that hold the same KV heads, one after the other along the last axis."""
        return x if self.same_heads == 1 else jax.lax.all_gather(x, SAME_HEADS, axis=x.ndim - 1, tiled=True)

    def model_index(self) -> Int[Array, ""]:
        """Which of them this device is."""
        return jnp.zeros((), jnp.int32) if self.model == 1 else jax.lax.axis_index(MODEL).astype(jnp.int32)

    def own_columns(self, x: Shaped[Array, "*B A"]) -> Shaped[Array, "*B _"]:
        """Of numbers that several devices have alike, the ones that this device's columns of a matrix multiply."""
        if self.same_heads == 1:
            return x
        width = x.shape[-1] // self.same_heads
        return jax.lax.dynamic_slice_in_dim(x, self.same_heads_index() * width, width, axis=-1)

    def same_heads_index(self) -> Int[Array, ""]:
        """Which of the devices that hold the same KV heads this one is."""
        return jnp.zeros((), jnp.int32) if self.same_heads == 1 else jax.lax.axis_index(SAME_HEADS).astype(jnp.int32)

    def sum_over_heads(self, x: Shaped[Array, "*S"]) -> Shaped[Array, "*S"]:
        """The sum over the devices that hold a layer's KV heads. A layer that calls it in a step declares `CacheLayer.reduces_heads`."""
        return x if self.mesh is None or self.heads == 1 else jax.lax.psum(x, HEADS)

    def head_ids(self, count: int) -> Int[Array, " K"]:
        """Which of a layer's KV heads the `count` of this device are."""
        own = jnp.arange(count, dtype=jnp.int32)
        return own if self.heads == 1 else jax.lax.axis_index(HEADS).astype(jnp.int32) * count + own

    def max_over_data(self, x: Shaped[Array, "*S"]) -> Shaped[Array, "*S"]:
        """The highest on any of the devices among which rows are sharded."""
        return x if self.data == 1 else jax.lax.pmax(x, DATA)

    def gather_over_data(self, x: Shaped[Array, "B *S"]) -> Shaped[Array, "_ *S"]:
        """All rows."""
        return x if self.data == 1 else jax.lax.all_gather(x, DATA, axis=0, tiled=True)

    def _size(self, axis: str) -> int:
        return 1 if self.mesh is None else self.mesh.shape[axis]


ONE_DEVICE = Shard()
"""No mesh."""
