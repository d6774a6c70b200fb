"""Offloading: a policy whose keys and values lie in the host's memory, and come to the device when they are read."""

import dataclasses
from typing import Any, ClassVar, Literal, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Token, host_memory
from kvjax.config import ModelConfig
from kvjax.pallas_kernels.gradients import without_gradient

from ..base import Attention, CacheLayer, Carry, Policy, Reads, State, WrappedLayer
from ..families.sparse import SparseLayer
from ..fields import check_fields
from ..info import PolicyError
from .wrapper import Wrapper

KV = tuple[Array, ...]
"""Keys and values, or whatever a policy has in its store."""


@dataclasses.dataclass(frozen=True)
class Offloaded(Wrapper):
    """A policy with its keys and values in host memory; made by `offloaded`.

    Attributes:
        policy: whose cache it is.
        steps: R in ClusterKV's section IV-D, how many of the latest queries' selections a sparse layer keeps on the device; with 0
            all that is selected travels.
        fetch: "selected" moves only what a query selects and the device does not have; "layer" moves a layer at a time even
            so, for devices that read a whole layer faster than its host finds the parts.
    """

    transform: ClassVar[str] = "offloaded"

    steps: int = 1
    fetch: Literal["selected", "layer"] = "selected"

    def __post_init__(self) -> None:
        check_fields(self, steps=0)

    def bind(self, config: ModelConfig) -> Policy:
        """Every part of the policy offloaded by itself, so that each layer's functions are those of one method."""
        if not host_memory.available():
            raise PolicyError(
                f"{self.info.name}: {jax.devices()[0].platform} devices have no memory of kind pinned_host in this JAX; use the "
                "policy without offloading"
            )
        return super().bind(config)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        inner = self.policy.layer(spec)
        if inner.attention == "sparse":
            return OffloadedSparseLayer(self, spec, inner=cast(SparseLayer[Any], inner))
        if inner.has_own_store:
            raise PolicyError(
                f"{self.info.name}: {self.policy.info.name!r} has its keys and values in a store of its own, which is not moved; "
                "use it without offloading"
            )
        return OffloadedLayer(self, spec, inner=inner)


@dataclasses.dataclass(frozen=True)
class OffloadedLayer(WrappedLayer[Offloaded]):
    """One layer, all of whose keys and values come to the device when they are read."""

    @property
    def reads(self) -> Reads:
        return "whole"

    @property
    def has_own_store(self) -> bool:
        return True

    def init(self, total: Int[Array, " B"] | None = None) -> State:
        return self._placed(self.inner.init(total))

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[State, Carry]:
        state, carry = self.inner.prefill(prompt, carry)
        return self._placed(state), carry

    def attend(self, state: State, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], State, Carry]:
        near = cache.map_kv(host_memory.to_device, state)
        out, after, carry = self.inner.attend(near, token, carry)
        return out, _returned(after, near, state), carry

    def compress(self, state: State) -> State:
        if not self.compress_reads_kv:
            return self.inner.compress(state)
        near = cache.map_kv(host_memory.to_device, state)
        return _returned(self.inner.compress(near), near, state)

    def view(self, state: State) -> LayerCache:
        return self.inner.view(cache.map_kv(host_memory.to_device, state))

    def _placed(self, state: State) -> State:
        """A state that the policy has made, with its keys and values on the host."""
        return cache.map_kv(self._on_host, state)

    def _on_host(self, kv: KV) -> KV:
        none = "keys and values are in the host's memory, through which there is no gradient"
        error = PolicyError(f"{self.policy.info.name}: {none}; take it of the policy without offloading")
        return host_memory.to_host(without_gradient(kv, error))


@flax.struct.dataclass
class OffloadedSparseCache:
    """A sparse layer whose store is on the host. B rows, K KV heads, R heads that select S slots each, E slots read by all.

    Attributes:
        inner: the policy's own state, its keys and values on the host and all else on the device.
        kept: [B, K, E, H], the first tokens and a ring of the latest ones, on the device; nothing if the policy has none.
        recent: [B, R, steps · S, H], what the latest queries selected, the last one's first.
        slot: which slots these are, -1 where none.
        queries: how many each row has had.
        chosen, found: tokens that they chose, first tokens included, and those of them that were on the device; the first query
            of a row, which finds nothing, is not counted.
    """

    inner: Any
    kept: KV
    recent: KV
    slot: Int[Array, "B R F"]
    queries: Int[Array, " B"]
    chosen: Int[Array, "B R"]
    found: Int[Array, "B R"]


@dataclasses.dataclass(frozen=True)
class OffloadedSparseLayer(OffloadedLayer):
    """One layer, of whose store only what a query selects comes to the device."""

    inner: SparseLayer[Any] = dataclasses.field(kw_only=True)

    @property
    def attention(self) -> Attention:
        return "kept"

    def append(self, state: OffloadedSparseCache, token: Token) -> OffloadedSparseCache:
        inner, kept = self.inner.append(state.inner, token), state.kept
        if kept:
            place = self._place(token.position)[:, None]
            rows, heads = np.ogrid[: self.spec.batch, : self.spec.num_kv_heads]
            new = token.k_rotated, token.v
            kept = jax.tree.map(lambda x, new: x.at[rows, heads, place].set(new.astype(x.dtype)), kept, new)
        return dataclasses.replace(state, inner=inner, kept=kept)

    def attend(
        self, state: OffloadedSparseCache, token: Token, carry: Carry
    ) -> tuple[Float[Array, "B N H"], OffloadedSparseCache, Carry]:
        index, valid = self.inner.select(state.inner, self.inner.query(token, carry))
        state, fetched = self._fetch(state, index, valid)

        if state.kept:
            rest, exists = self.inner.always_kept_slots(state.inner)
            heads = index.shape[1] // self.spec.num_kv_heads
            place = self._place(rest)[:, None, :, None]
            kept = jax.tree.map(lambda x: jnp.repeat(jnp.take_along_axis(x, place, axis=2), heads, axis=1), state.kept)
            rest, exists = (jnp.broadcast_to(x[:, None], (*index.shape[:2], x.shape[-1])) for x in (rest, exists))
            fetched = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=2), fetched, kept)
            index, valid = (jnp.concatenate(x, axis=2) for x in ((index, rest), (valid, exists)))
        padding = [(0, 0), (0, 0), (0, self.inner.slots_read - index.shape[-1]), (0, 0)]
        fetched = tuple(jnp.pad(x, padding) for x in fetched)
        index, valid = (jnp.pad(x, padding[:3]) for x in (index, valid))
        return self.inner.attend_to(state.inner, token, index, valid, fetched), state, carry

    def compress(self, state: OffloadedSparseCache) -> OffloadedSparseCache:
        def keys(pos: Int[Array, "B W"]) -> Float[Array, "B K W H"]:
            return jnp.take_along_axis(state.kept[0], self._place(pos)[:, None, :, None], axis=2)

        return dataclasses.replace(state, inner=self.inner.regroup(state.inner, keys))

    def is_due(self, state: OffloadedSparseCache) -> Bool[Array, " B"]:
        return self.inner.is_due(state.inner)

    def view(self, state: OffloadedSparseCache) -> LayerCache:
        store = host_memory.to_device(self.inner.store(state.inner))
        return self.inner.view(self.inner.with_store(state.inner, store))

    def _placed(self, state: State) -> OffloadedSparseCache:
        store, kept = self.inner.store(state), ()
        first, latest = self.inner.always_kept
        if first + latest > 0:
            place = jnp.arange(first + latest, dtype=jnp.int32)
            # Of the ring, the last position of the prompt that belongs at each place.
            newest = state.cache.seen[:, None] - 1
            pos = jnp.where(place < first, place, newest - (newest - (place - first)) % max(latest, 1))
            pos = jnp.maximum(pos, 0)[:, None, :, None]
            kept = jax.tree.map(lambda x: jnp.take_along_axis(x, pos, axis=2, mode="clip"), store)

        batch, (heads, size) = self.spec.batch, self.inner.selection_shape
        slot = jnp.full((batch, heads, self.policy.steps * size), -1, jnp.int32)
        recent = tuple(jnp.zeros((*slot.shape, self.spec.head_dim), self.spec.dtype) for _ in store)
        zeros = jnp.zeros((batch, heads), jnp.int32)
        queries = jnp.zeros((batch,), jnp.int32)
        inner = self.inner.with_store(state, self._on_host(store))
        return OffloadedSparseCache(inner, kept, recent, slot, queries, zeros, zeros)

    def _place(self, pos: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """Where in `kept` the token at a position is, if it is there."""
        first, latest = self.inner.always_kept
        return jnp.where(pos < first, pos, first + pos % max(latest, 1))

    def _fetch(
        self, state: OffloadedSparseCache, index: Int[Array, "B R S"], valid: Bool[Array, "B R S"]
    ) -> tuple[OffloadedSparseCache, KV]:
        """Keys and values of what is selected, [B, R, S, H], and the state in which they are the most recent."""
        place, cached = host_memory.find(state.slot, index)
        cached &= valid
        missing = valid & ~cached
        got: KV = jax.tree.map(
            lambda x: (
                jnp.where(cached[..., None], jnp.take_along_axis(x, place[..., None], axis=2), jnp.zeros((), x.dtype))
                if x.shape[2]
                else jnp.zeros((*index.shape, x.shape[-1]), x.dtype)
            ),
            state.recent,
        )
        store = self.inner.store(state.inner)
        if self.policy.fetch == "layer":
            store = host_memory.to_device(store)
        got = host_memory.read_missing(store, index, missing, got)

        def latest(new: Array, old: Array) -> Array:
            return jnp.concatenate([new, old], axis=2)[:, :, : old.shape[2]]

        first, counted = self.inner.always_kept[0], state.queries > 0
        seen = state.inner.cache.seen

        def count(tokens: Bool[Array, "B R S"], sinks: Int[Array, " B"]) -> Int[Array, "B R"]:
            total = jnp.sum(tokens, axis=-1, dtype=jnp.int32) + jnp.minimum(sinks, first)[:, None]
            return jnp.where(counted[:, None], total, 0)

        state = dataclasses.replace(
            state,
            recent=jax.tree.map(latest, got, state.recent),
            slot=latest(jnp.where(valid, index, -1), state.slot),
            queries=state.queries + 1,
            chosen=state.chosen + count(valid, seen),
            found=state.found + count(cached, seen - 1),
        )
        return state, got


def offloaded(policy: Policy, steps: int = 1, fetch: Literal["selected", "layer"] = "selected") -> Offloaded:
    """Keep a policy's keys and values in host memory (JAX's memory kind `pinned_host`), and all else on the device.

    The policy gives what it gives otherwise. A new token is written into the host's store in place. What attention reads comes to
    the device one layer at a time:

    - Of a policy that reads all it holds, that is the layer's whole cache: the device holds the keys and values of one layer, and a
      step moves those of all layers. If `compress` looks at keys or values (`chelsea`), they come once more for it, and what
      it has changed goes back, after every step.
    - Of one with sparse attention (a `SparseLayer`, such as `clusterkv` has), it is what a query selects and none of its head's last `steps` queries
      did: their selections stay on the device (ClusterKV, section IV-D), and so do the first tokens and the tail, which every
      query reads. This goes by tokens: of a cluster that was cut to fit the budget, those left out are not on the device. What is
      missing travels in rounds of `host_memory.BLOCK` slots for each head of each row, as many rounds as the head that misses most needs;
      so a step moves more than its misses, though nothing if there are none. A GPU whose kernels read the host's memory moves the misses
      alone.

    `nbytes` and `host_nbytes` tell the bytes in the two memories; `hit_rate`, and the stats of `kvjax.generate`, the share of
    tokens that were there.

    Args:
        policy: any, compositions included. Keys and values are those of the `LayerCache`s in its state, and are written by `kvjax.cache`.
        steps, fetch: see `Offloaded`.

    Raises:
        PolicyError: `steps` is negative, or (once a model is known) the default device has no such memory, or (with
            its layers) the policy has keys and values in no `LayerCache`, as `adakv` and quantised ones.
    """
    return Offloaded(policy, steps, fetch)


def hits(caches: Any) -> tuple[int, int]:
    """Tokens that queries chose in the offloaded sparse layers of `caches`, and how many of them were on the device."""
    layers = [x for x in jax.tree.leaves(caches, is_leaf=_counts) if _counts(x)]
    chosen, found = ([np.asarray(getattr(x, name), np.int64).sum() for x in layers] for name in ("chosen", "found"))
    return int(sum(chosen)), int(sum(found))


def fetched_bytes(caches: Any, steps: int) -> int:
    """Bytes of keys and values that `steps` decoding steps have needed from the host's memory.

    Those are, of layers with sparse attention, the selected tokens that were not on the device (the first query's, which finds nothing, are
    not counted, as in `hits`), and of others all that they hold, once a step.
    """
    size = 0
    for part in jax.tree.leaves(caches, is_leaf=_counts):
        if _counts(part):
            missed = np.sum(np.asarray(part.chosen, np.int64) - np.asarray(part.found, np.int64))
            stores = [x for x in jax.tree.leaves(part) if host_memory.on_host(x)]
            size += int(missed) * sum(x.shape[-1] * x.dtype.itemsize for x in stores)
        elif host_memory.on_host(part):
            size += part.nbytes * steps
    return size


def hit_rate(caches: Any) -> float | None:
    """The share of the tokens chosen that were on the device, all rows, heads and layers together; None where none were chosen."""
    chosen, found = hits(caches)
    return found / chosen if chosen else None


def _counts(part: Any) -> bool:
    """Whether it is a layer's state that counts what its queries chose."""
    return hasattr(part, "chosen") and hasattr(part, "found")


def _returned(after: State, near: State, far: State) -> State:
    """A state on the device back on the host. Keys and values that are still those of `near` are in `far`, and stay there."""

    def back(after: KV, near: KV, far: KV) -> KV:
        return tuple(f if a is n else host_memory.to_host(a) for a, n, f in zip(after, near, far, strict=True))

    return cache.map_kv(back, after, near, far)
