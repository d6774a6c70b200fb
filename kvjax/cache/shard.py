"""What one device computes of a model on a mesh, and the collectives between devices.

The whole program runs on every device, on the device's rows, KV heads and columns of the weights
(`kvjax.runtime.mesh`). Nearly all code therefore sees a smaller model and a smaller batch, and no mesh. Collectives go
through a layer's `Shard`. Without a mesh, its functions return their argument.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Int, Shaped

DATA, HEADS, COPIES, SLOTS = "data", "heads", "copies", "slots"
"""Axes of a mesh.

Rows are sharded along `data`, and KV heads along `heads`. Devices along `copies` and `slots` have the same heads. Along
`slots` they also shard the slots, where a layer's cache supports it (`kvjax.cache.sharded`).
"""

SAME_HEADS = COPIES, SLOTS
"""Axes along which devices have the same KV heads."""

MODEL = HEADS, COPIES, SLOTS
"""Axes along which the columns of matrices and the vocabulary are sharded."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """The mesh axes of a program, equal on all devices.

    Reductions use the same order on all devices, so all get the same bits.

    Attributes:
        mesh: mesh with the axes `data`, `heads`, `copies` and `slots`, abstract if only sizes are needed. None for one
            device.

    Example:
        >>> kvjax.cache.Shard().mesh is None  # one device
        True
    """

    mesh: Mesh | AbstractMesh | None = None

    @property
    def data(self) -> int:
        """Number of devices that shard rows."""
        return self._size(DATA)

    @property
    def heads(self) -> int:
        """Number of devices that shard KV heads."""
        return self._size(HEADS)

    @property
    def copies(self) -> int:
        """Number of devices with the same KV heads and all of their slots."""
        return self._size(COPIES)

    @property
    def slots(self) -> int:
        """Number of devices with the same KV heads that shard their slots, where supported."""
        return self._size(SLOTS)

    @property
    def same_heads(self) -> int:
        """Number of devices with the same KV heads."""
        return self.copies * self.slots

    @property
    def model(self) -> int:
        """Number of devices that shard the columns of matrices and the vocabulary."""
        return self.heads * self.same_heads

    @property
    def devices(self) -> int:
        """Number of all devices."""
        return self.data * self.model

    def sum_over_model(self, x: Shaped[Array, "*S"]) -> Shaped[Array, "*S"]:
        """All-reduce (sum) over the devices that shard a model's matrices."""
        return x if self.mesh is None or self.model == 1 else jax.lax.psum(x, MODEL)

    def gather_over_model(self, x: Shaped[Array, "*S"]) -> Shaped[Array, "..."]:
        """All-gather over these devices along the last axis."""
        if self.mesh is None or self.model == 1:
            return x
        return jax.lax.all_gather(x, MODEL, axis=x.ndim - 1, tiled=True)

    def gather_over_same_heads(self, x: Shaped[Array, "*S"]) -> Shaped[Array, "..."]:
        """All-gather over the devices with the same KV heads along the last axis."""
        return x if self.same_heads == 1 else jax.lax.all_gather(x, SAME_HEADS, axis=x.ndim - 1, tiled=True)

    def model_index(self) -> Int[Array, ""]:
        """Index of this device along `MODEL`."""
        return jnp.zeros((), jnp.int32) if self.model == 1 else jax.lax.axis_index(MODEL).astype(jnp.int32)

    def own_columns(self, x: Shaped[Array, "*B A"]) -> Shaped[Array, "*B _"]:
        """The part of a replicated array that this device's columns of a matrix multiply."""
        if self.same_heads == 1:
            return x
        width = x.shape[-1] // self.same_heads
        return jax.lax.dynamic_slice_in_dim(x, self.same_heads_index() * width, width, axis=-1)

    def same_heads_index(self) -> Int[Array, ""]:
        """Index of this device among those with the same KV heads."""
        return jnp.zeros((), jnp.int32) if self.same_heads == 1 else jax.lax.axis_index(SAME_HEADS).astype(jnp.int32)

    def sum_over_heads(self, x: Shaped[Array, "*S"]) -> Shaped[Array, "*S"]:
        """All-reduce (sum) over the devices that shard a layer's KV heads.

        A layer that calls it in a step declares `CacheLayer.reduces_heads`.
        """
        return x if self.mesh is None or self.heads == 1 else jax.lax.psum(x, HEADS)

    def head_ids(self, count: int) -> Int[Array, " K"]:
        """Indices in the layer of the `count` KV heads of this device."""
        own = jnp.arange(count, dtype=jnp.int32)
        return own if self.heads == 1 else jax.lax.axis_index(HEADS).astype(jnp.int32) * count + own

    def max_over_data(self, x: Shaped[Array, "*S"]) -> Shaped[Array, "*S"]:
        """Maximum over the devices that shard rows."""
        return x if self.data == 1 else jax.lax.pmax(x, DATA)

    def gather_over_data(self, x: Shaped[Array, "B *S"]) -> Shaped[Array, "_ *S"]:
        """All-gather of rows."""
        return x if self.data == 1 else jax.lax.all_gather(x, DATA, axis=0, tiled=True)

    def _size(self, axis: str) -> int:
        return 1 if self.mesh is None else self.mesh.shape[axis]


ONE_DEVICE = Shard()
"""The shard of a program without a mesh."""
