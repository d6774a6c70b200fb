"""Layers whose keys and values are sharded by slots among the devices that have the same KV heads: what is done around a policy's own functions.

A policy chooses from a prompt as it does on one device, with all of it there; then each device keeps its part of the slots
(`kvjax.cache.sharded`). New tokens are written, and attended to, by functions of `kvjax.cache`, which look across.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
from jaxtyping import Array, Float, Int

from kvjax import cache
from kvjax.cache import PromptKV, Token, TokenBlock

from .base import CacheLayer, Carry, State, WrappedLayer, held_bytes
from .families.sparse import SparseLayer


def sharded(layer: CacheLayer[Any]) -> CacheLayer[Any]:
    """The layer with its slots sharded as `spec.shard` says, where they can be (`CacheLayer.shards_slots`) and are enough for all devices."""
    return layer if layer.spec.shard.slots == 1 else layer.map_parts(_sharded)


def _sharded(layer: CacheLayer[Any]) -> CacheLayer[Any]:
    devices = layer.spec.shard.slots
    if not layer.shards_slots:
        return layer
    if layer.attention == "sparse" and layer.has_own_store:
        of_store = ShardedStoreLayer(layer.policy, layer.spec, inner=cast(SparseLayer[Any], layer))
        enough = all(cache.local_slots(n, devices) < n for n in of_store.sizes)
        # A block would be read by the policy itself, into a store that is whole.
        return of_store if enough and not layer.spec.block else layer
    if cache.local_slots(layer.capacity, devices) >= layer.capacity:
        return layer
    return ShardedLayer(layer.policy, layer.spec, inner=layer)


@dataclasses.dataclass(frozen=True)
class ShardedLayer(WrappedLayer[Any]):
    """One layer, of whose keys and values each device has some slots."""

    @property
    def bytes_read(self) -> int:
        """Bytes that a device reads in a decoding step; with sparse attention as on one device, where all that is selected may be."""
        return self.inner.bytes_read if self.attention == "sparse" else sum(held_bytes(self))

    def init(self, total: Int[Array, " B"] | None = None) -> State:
        return cache.sharded_empty(self.inner.init(total), self._devices)

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[State, Carry]:
        state, carry = self.inner.prefill(prompt, carry)
        return cache.shard_slots(state, self._devices), carry

    def read_block(self, state: State, block: TokenBlock, carry: Carry) -> tuple[Float[Array, "B S N H"], State, Carry]:
        """As the policy reads it; one that chooses from what is kept and the block as from a prompt is given all of what is kept."""
        chooses = self.attention == "kept"
        whole = cache.gathered(state) if chooses else state
        out, new, carry = self.inner.read_block(whole, block, carry)
        return out, cache.shard_slots(new, self._devices), carry

    @property
    def _devices(self) -> int:
        return self.spec.shard.slots


@dataclasses.dataclass(frozen=True)
class ShardedStoreLayer(ShardedLayer):
    """One sparse layer with a store of its own, of which each device has some slots, and all are sent what is selected."""

    inner: SparseLayer[Any] = dataclasses.field(kw_only=True)

    @property
    def sizes(self) -> list[int]:
        """Slots of the store's arrays."""
        return [x.shape[2] for x in jax.eval_shape(lambda: self.inner.store(self.inner.init()))]

    def init(self, total: Int[Array, " B"] | None = None) -> State:
        def part(x: Array) -> Array:
            return x[:, :, : cache.local_slots(x.shape[2], self._devices)]

        return self._changed(self.inner.init(total), part)

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[State, Carry]:
        state, carry = self.inner.prefill(prompt, carry)
        return self._changed(state, lambda x: cache.local_part(x, self._devices)), carry

    def attend(self, state: State, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], State, Carry]:
        index, valid = self.inner.select(state, self.inner.query(token, carry))
        heads = self.spec.num_kv_heads

        def fetched(x: Array) -> Array:
            slots = index.reshape(index.shape[0], heads, -1)  # of all that read from a KV head
            return cache.rows_at(x, slots, self._devices).reshape(*index.shape, x.shape[-1])

        store = tuple(map(fetched, self.inner.store(state)))
        return self.inner.attend_to(state, token, index, valid, store), state, carry

    def _changed(self, state: State, change: Callable[[Array], Array]) -> State:
        return self.inner.with_store(state, tuple(map(change, self.inner.store(state))))
