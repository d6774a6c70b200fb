"""Offloading: a policy's keys and values stay in host memory, and move to the device when they are read."""

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

from ..base import Policy
from ..families.sparse import SparseLayer
from ..fields import check_fields
from ..info import PolicyError
from ..layer import Attention, CacheLayer, Carry, Reads, State, WrappedLayer
from .wrapper import Wrapper

KV = tuple[Array, ...]
"""Keys and values, or all arrays of a policy's store."""


@dataclasses.dataclass(frozen=True)
class Offloaded(Wrapper):
    """A policy with its keys and values in host memory, made by `offloaded`.

    Attributes:
        policy: the policy.
        steps: R in section IV-D of ClusterKV, number of latest queries whose selections a sparse layer caches on the
            device. With 0, all selected tokens are fetched.
        fetch: "selected" fetches only selected tokens that the device does not have. "layer" fetches a whole layer, for
            devices that read it faster than the host gathers its parts.

    Example:
        >>> policy = kvjax.policies.Offloaded(kvjax.Quest(budget=64, dense_layers=0))
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> str(policy), policy.host_nbytes(*sizes) > policy.nbytes(*sizes)  # most bytes are in host memory
        ('offloaded(quest:budget=64,dense_layers=0)', True)
    """

    transform: ClassVar[str] = "offloaded"

    steps: int = 1
    fetch: Literal["selected", "layer"] = "selected"

    def __post_init__(self) -> None:
        check_fields(self, steps=0)

    def bind(self, config: ModelConfig) -> Policy:
        """Offload every part of the policy separately, so that each layer has the functions of one method."""
        if not host_memory.available():
            raise PolicyError(
                f"{self.info.name}: {jax.devices()[0].platform} devices have no memory of kind pinned_host in this JAX. Use the "
                "policy without offloading."
            )
        return super().bind(config)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        inner = self.policy.layer(spec)
        if inner.attention == "sparse":
            return OffloadedSparseLayer(self, spec, inner=cast(SparseLayer[Any], inner))
        if inner.has_own_store:
            raise PolicyError(
                f"{self.info.name}: the store of {self.policy.info.name!r} cannot be offloaded, because it is not a LayerCache. "
                "Use it without offloading."
            )
        if inner.compresses_together:
            raise PolicyError(
                f"{self.info.name}: the layers of {self.policy.info.name!r} choose together, which needs their keys on the device. Give it "
                "sets='each'."
            )
        return OffloadedLayer(self, spec, inner=inner)


@dataclasses.dataclass(frozen=True)
class OffloadedLayer(WrappedLayer[Offloaded]):
    """A layer whose keys and values all move to the device when they are read."""

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
        """Return a state of the policy with its keys and values on the host."""
        return cache.map_kv(self._on_host, state)

    def _on_host(self, kv: KV) -> KV:
        none = "keys and values in host memory have no gradient"
        error = PolicyError(f"{self.policy.info.name}: {none}. Use the policy without offloading.")
        return host_memory.to_host(without_gradient(kv, error))


@flax.struct.dataclass
class OffloadedSparseCache:
    """State of a sparse layer whose store is on the host.

    B rows, K KV heads, R heads that select S slots each, E slots that every query reads.

    Attributes:
        inner: the policy's state, with keys and values on the host and all other arrays on the device.
        kept: [B, K, E, H], the first tokens and a ring of the latest ones, on the device. Empty if the policy has none.
        recent: [B, R, steps · S, H], entries that the latest queries selected, the last query's first.
        slot: slots of these entries, -1 for none.
        queries: number of queries of each row so far.
        chosen, found: number of tokens that queries selected, including first tokens, and number of those that were on
            the device. The first query of a row, which finds nothing, is not counted.
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
    """A layer that moves only selected entries of its store to the device."""

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
            # For each place of the ring, the last position of the prompt that belongs there.
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
        """Index in `kept` of the token at a position, if it is there."""
        first, latest = self.inner.always_kept
        return jnp.where(pos < first, pos, first + pos % max(latest, 1))

    def _fetch(
        self, state: OffloadedSparseCache, index: Int[Array, "B R S"], valid: Bool[Array, "B R S"]
    ) -> tuple[OffloadedSparseCache, KV]:
        """Return the selected keys and values, [B, R, S, H], and the state in which they are the most recent."""
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

    Outputs do not change. A new token is written into the host store in place. Data that attention reads moves to the
    device one layer at a time:

    - A policy that reads its whole cache: the layer's whole cache moves. The device has the keys and values of one
      layer, and a step moves those of all layers. If `compress` computes with keys or values (`chelsea`), they move
      again for it, and changed ones move back, after every step.
    - A policy with sparse attention (a `SparseLayer`, such as `clusterkv` has): selected tokens move, unless one of the
      head's last `steps` queries selected them, too. Those selections stay on the device (section IV-D of ClusterKV),
      as do the first tokens and the tail, which every query reads. This works per token: tokens of a cluster that was
      cut to fit the budget are not on the device. Missing tokens move in rounds of `host_memory.BLOCK` slots for each
      head of each row. The head with the most misses determines the number of rounds, so a step moves more than its
      misses, and nothing if there are none. A GPU whose kernels read host memory moves only the misses.

    `nbytes` and `host_nbytes` return the bytes in both memories. `hit_rate` and the stats of `kvjax.generate` return
    the share of selected tokens that were on the device.

    Args:
        policy: any policy, compositions included, whose keys and values are in `LayerCache`s that `kvjax.cache` writes.
        steps, fetch: see `Offloaded`.

    Raises:
        PolicyError: `steps` is negative. Once a model is known, also if the default device has no such memory, or if the
            policy has keys and values outside of a `LayerCache`, as `adakv` and quantised policies do.

    Example:
        >>> str(kvjax.offloaded(kvjax.Quest(budget=512)))
        'offloaded(quest:budget=512)'
    """
    return Offloaded(policy, steps, fetch)


def hits(caches: Any) -> tuple[int, int]:
    """Number of tokens that queries selected in the offloaded sparse layers of `caches`, and number of device hits."""
    layers = [x for x in jax.tree.leaves(caches, is_leaf=_counts) if _counts(x)]
    chosen, found = ([np.asarray(getattr(x, name), np.int64).sum() for x in layers] for name in ("chosen", "found"))
    return int(sum(chosen)), int(sum(found))


def fetched_bytes(caches: Any, steps: int) -> int:
    """Bytes of keys and values that `steps` decoding steps needed from host memory.

    Sparse layers need the selected tokens that were not on the device. (The first query, which finds nothing, is not
    counted, as in `hits`.) Other layers need their whole cache in each step.
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
    """Share of selected tokens that were on the device, over all rows, heads and layers. None if none were selected."""
    chosen, found = hits(caches)
    return found / chosen if chosen else None


def _counts(part: Any) -> bool:
    """Whether this is the state of an offloaded sparse layer."""
    return hasattr(part, "chosen") and hasattr(part, "found")


def _returned(after: State, near: State, far: State) -> State:
    """Move a state back to the host. Keys and values that are unchanged since `near` are reused from `far`."""

    def back(after: KV, near: KV, far: KV) -> KV:
        return tuple(f if a is n else host_memory.to_host(a) for a, n, f in zip(after, near, far, strict=True))

    return cache.map_kv(back, after, near, far)
