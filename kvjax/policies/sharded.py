"""Layers whose slots are sharded over devices: wrappers around a policy's own layer.

A policy chooses from a prompt as on one device, with the whole prompt present. Each device then keeps its shard of the
slots (`kvjax.cache.sharded`). Functions of `kvjax.cache` append new tokens and attend to all shards.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
from jaxtyping import Array, Float, Int

from kvjax import cache
from kvjax.cache import PromptKV, Token, TokenBlock

from .families.sparse import SparseLayer
from .layer import CacheLayer, Carry, State, WrappedLayer, held_bytes


def sharded(layer: CacheLayer[Any]) -> CacheLayer[Any]:
    """Return the layer with its slots sharded by `spec.shard`.

    A layer stays as it is if its slots cannot be sharded (`CacheLayer.shards_slots`) or are too few for all devices.
    """
    return layer if layer.spec.shard.slots == 1 else layer.map_parts(_sharded)


def _sharded(layer: CacheLayer[Any]) -> CacheLayer[Any]:
    devices = layer.spec.shard.slots
    if not layer.shards_slots:
        return layer
    if layer.attention == "sparse" and layer.has_own_store:
        of_store = ShardedStoreLayer(layer.policy, layer.spec, inner=cast(SparseLayer[Any], layer))
        enough = all(cache.local_slots(n, devices) < n for n in of_store.sizes)
        # In chunked prefill the policy's own `read_block` writes to an unsharded store.
        return of_store if enough and not layer.spec.block else layer
    if cache.local_slots(layer.capacity, devices) >= layer.capacity:
        return layer
    return ShardedLayer(layer.policy, layer.spec, inner=layer)


@dataclasses.dataclass(frozen=True)
class ShardedLayer(WrappedLayer[Any]):
    """A layer whose slots are sharded over devices."""

    @property
    def bytes_read(self) -> int:
        """Bytes that one device reads in a decoding step.

        With sparse attention as many as on one device, because all selected slots may be in one shard.
        """
        return self.inner.bytes_read if self.attention == "sparse" else sum(held_bytes(self))

    def init(self, total: Int[Array, " B"] | None = None) -> State:
        return cache.sharded_empty(self.inner.init(total), self._devices)

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[State, Carry]:
        state, carry = self.inner.prefill(prompt, carry)
        return cache.shard_slots(state, self._devices), carry

    def read_block(self, state: State, block: TokenBlock, carry: Carry) -> tuple[Float[Array, "B S N H"], State, Carry]:
        """The policy's own `read_block`.

        A policy that chooses from kept tokens and the block gets all shards gathered.
        """
        chooses = self.attention == "kept"
        whole = cache.gathered(state) if chooses else state
        out, new, carry = self.inner.read_block(whole, block, carry)
        return out, cache.shard_slots(new, self._devices), carry

    @property
    def _devices(self) -> int:
        return self.spec.shard.slots


@dataclasses.dataclass(frozen=True)
class ShardedStoreLayer(ShardedLayer):
    """A sparse layer whose own store is sharded by slots. The selected entries are sent to all devices."""

    inner: SparseLayer[Any] = dataclasses.field(kw_only=True)

    @property
    def sizes(self) -> list[int]:
        """Number of slots of each array of the store."""
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
            slots = index.reshape(index.shape[0], heads, -1)  # selections of one KV head's query heads together
            return cache.rows_at(x, slots, self._devices).reshape(*index.shape, x.shape[-1])

        store = tuple(map(fetched, self.inner.store(state)))
        return self.inner.attend_to(state, token, index, valid, store), state, carry

    def _changed(self, state: State, change: Callable[[Array], Array]) -> State:
        return self.inner.with_store(state, tuple(map(change, self.inner.store(state))))
