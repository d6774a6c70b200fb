"""Layers whose keys and values are dealt by slots among the devices that have the same KV heads: what is done around a policy's own functions.

A policy chooses from a prompt as it does on one device, with all of it there; then each device keeps its part of the slots
(`kvjax.cache.dealt`). New tokens are written, and attended to, by functions of `kvjax.cache`, which look across.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import Prompt, Token, TokenBlock

from . import capabilities
from .base import Carry, Layer, State, held_bytes
from .capabilities import Queries
from .families.sparse import SparseLayer


def dealt(layer: Layer[Any]) -> Layer[Any]:
    """The layer with its slots dealt, as its `spec.shard` has it, where they can be (`Traits.deals_slots`) and are enough for all devices."""
    devices = layer.spec.shard.slots
    if devices == 1:
        return layer
    if layer.traits.in_parts:
        return cast(capabilities.InParts, layer).map_parts(dealt)
    if not layer.traits.deals_slots:
        return layer
    if layer.traits.sparse and layer.traits.has_own_store:
        of_store = DealtStoreLayer(
            layer.policy, layer.spec, layer.traits, inner=layer, sparse=cast(SparseLayer[Any], layer)
        )
        enough = all(cache.local_slots(n, devices) < n for n in of_store.sizes)
        # A block would be read by the policy itself, into a store that is whole.
        return of_store if enough and not layer.spec.block else layer
    if cache.local_slots(layer.capacity, devices) >= layer.capacity:
        return layer
    return DealtLayer(layer.policy, layer.spec, layer.traits, inner=layer)


@dataclasses.dataclass(frozen=True)
class DealtLayer(Layer[Any]):
    """One layer, of whose keys and values each device has some slots.

    Attributes:
        inner: the policy's own functions.
    """

    inner: Layer[Any] = dataclasses.field(kw_only=True)

    @property
    def max_kept(self) -> int:
        return self.inner.max_kept

    @property
    def capacity(self) -> int:
        return self.inner.capacity

    @property
    def bytes_read(self) -> int:
        """Bytes that a device reads in a decoding step; with sparse attention as on one device, where all that is selected may be."""
        return self.inner.bytes_read if self.traits.sparse else sum(held_bytes(self))

    def init(self, total: Int[Array, " B"] | None = None) -> State:
        return cache.dealt_empty(self.inner.init(total), self._devices)

    def prefill(self, prompt: Prompt, carry: Carry) -> tuple[State, Carry]:
        state, carry = self.inner.prefill(prompt, carry)
        return cache.deal(state, self._devices), carry

    def append(self, state: State, token: Token) -> State:
        return self.inner.append(state, token)

    def attend(self, state: State, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], State, Carry]:
        return self.inner.attend(state, token, carry)

    def compress(self, state: State) -> State:
        return self.inner.compress(state)

    def read_block(self, state: State, block: TokenBlock, carry: Carry) -> tuple[Float[Array, "B S N H"], State, Carry]:
        """As the policy reads it; one that chooses from what is kept and the block as from a prompt is given all of what is kept."""
        chooses = not (self.traits.dense or self.traits.sparse)
        whole = cache.gathered(state) if chooses else state
        out, new, carry = capabilities.read_block(self.inner, whole, block, carry)
        return out, cache.deal(new, self._devices), carry

    def needs_compression(self, state: State) -> Bool[Array, " B"]:
        return capabilities.needs_compression(self.inner, state)

    def look_ahead(self, queries: Queries, position: Int[Array, " B"], carry: Carry) -> Carry:
        return capabilities.look_ahead(self.inner, queries, position, carry)

    @property
    def _devices(self) -> int:
        return self.spec.shard.slots


@dataclasses.dataclass(frozen=True)
class DealtStoreLayer(DealtLayer):
    """One sparse layer with a store of its own, of which each device has some slots, and all are sent what is selected.

    Attributes:
        sparse: the policy's own functions.
    """

    sparse: SparseLayer[Any] = dataclasses.field(kw_only=True)

    @property
    def sizes(self) -> list[int]:
        """Slots of the store's arrays."""
        return [x.shape[2] for x in jax.eval_shape(lambda: self.sparse.store(self.sparse.init()))]

    def init(self, total: Int[Array, " B"] | None = None) -> State:
        def part(x: Array) -> Array:
            return x[:, :, : cache.local_slots(x.shape[2], self._devices)]

        return self._changed(self.sparse.init(total), part)

    def prefill(self, prompt: Prompt, carry: Carry) -> tuple[State, Carry]:
        state, carry = self.sparse.prefill(prompt, carry)
        return self._changed(state, lambda x: cache.own(x, self._devices)), carry

    def attend(self, state: State, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], State, Carry]:
        index, valid = self.sparse.select(state, self.sparse.query(token, carry))
        heads = self.spec.num_kv_heads

        def fetched(x: Array) -> Array:
            slots = index.reshape(index.shape[0], heads, -1)  # of all that read from a KV head
            return cache.rows_at(x, slots, self._devices).reshape(*index.shape, x.shape[-1])

        store = tuple(map(fetched, self.sparse.store(state)))
        return self.sparse.attend_to(state, token, index, valid, store), state, carry

    def _changed(self, state: State, change: Callable[[Array], Array]) -> State:
        return self.sparse.with_store(state, tuple(map(change, self.sparse.store(state))))
