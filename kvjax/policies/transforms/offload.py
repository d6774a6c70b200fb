"""Offloading: a policy whose keys and values lie in the host's memory, and come to the device when they are read."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache, host_memory
from kvjax.cache import LayerSpec, Slots
from kvjax.models.config import ModelConfig

from .base import Carry, Policy, PolicyError, State
from .recalling import Recalling
from .wrapper import Wrapper

BLOCK = 128
"""Slots of a head that are fetched at a time."""

KV = tuple[Array, ...]
"""Keys and values, or whatever a policy has in its store."""


@flax.struct.dataclass
class Recalled:
    """A recalling layer whose store is on the host. B rows, K KV heads, R heads that select S slots each, E slots read by all.

    Attributes:
        inner: the policy's own state, its keys and values on the host and all else on the device.
        ends: [B, K, E, H], the first tokens and a ring of the latest ones, on the device; nothing if the policy has none.
        recent: [B, R, steps · S, H], what the latest queries selected, the last one's first.
        slot: which slots these are, -1 where none.
        queries: how many each row has had.
        chosen, found: tokens that they chose, first tokens included, and those of them that were at hand; the first query
            of a row, which finds nothing, is not counted.
    """

    inner: Any
    ends: KV
    recent: KV
    slot: Int[Array, "B R F"]
    queries: Int[Array, " B"]
    chosen: Int[Array, "B R"]
    found: Int[Array, "B R"]


@dataclasses.dataclass(frozen=True)
class Offloaded(Wrapper):
    """A policy with its keys and values in host memory; made by `offloaded`.

    Attributes:
        policy: whose cache it is.
        steps: R in ClusterKV's section IV-D, how many of the latest queries' selections a recalling policy keeps on the device.
        fetch: "selected" moves only what a query selects and the device does not have; "layer" moves a layer at a time even
            so, for devices that read a whole layer faster than its host finds the parts.
    """

    verb: ClassVar[str] = "offloaded"

    steps: int = 1
    fetch: Literal["selected", "layer"] = "selected"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise PolicyError(f"{self.name}: steps={self.steps}; give 1 or more")
        if self.fetch not in ("selected", "layer"):
            raise PolicyError(f"{self.name}: fetch={self.fetch!r}; give one of 'selected', 'layer'")

    def bind(self, config: ModelConfig) -> Policy:
        """Every part of the policy offloaded by itself, so that those that recall are known."""
        if not host_memory.available():
            raise PolicyError(
                f"{self.name}: {jax.devices()[0].platform} devices have no memory of kind pinned_host in this JAX; use the "
                "policy without offloading"
            )
        return super().bind(config)

    def layer_bytes_read(self, spec: LayerSpec) -> int:
        return self.policy.layer_bytes_read(spec)

    def init(self, spec: LayerSpec) -> State:
        return self._placed(spec, self.policy.init(spec))

    def prefill(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
        carry: Carry,
    ) -> tuple[State, Carry]:
        state, carry = self.policy.prefill(spec, q, k, v, lengths, carry)
        return self._placed(spec, state), carry

    def append(
        self, spec: LayerSpec, state: State, k: Float[Array, "B K H"], v: Float[Array, "B K H"], pos: Int[Array, " B"]
    ) -> State:
        if not isinstance(state, Recalled):
            return self.policy.append(spec, state, k, v, pos)
        inner, ends = self.policy.append(spec, state.inner, k, v, pos), state.ends
        if ends:
            place = self._place(spec, pos)[:, None]
            rows, heads = np.ogrid[: spec.batch, : spec.num_kv_heads]
            new = spec.rope.rotate(k, pos[:, None]), v
            ends = jax.tree.map(lambda x, new: x.at[rows, heads, place].set(new.astype(x.dtype)), ends, new)
        return dataclasses.replace(state, inner=inner, ends=ends)

    def attend(
        self, spec: LayerSpec, state: State, q: Float[Array, "B N H"], pos: Int[Array, " B"], carry: Carry
    ) -> tuple[Float[Array, "B N H"], State, Carry]:
        if not isinstance(state, Recalled):
            near = _moved(state, host_memory.to_device)
            out, after, carry = self.policy.attend(spec, near, q, pos, carry)
            return out, _returned(after, near, state), carry
        q = spec.rope.rotate(q, pos[:, None])
        index, live = self._recalling.selected(spec, state.inner, self._recalling.asking(q, carry))
        state, selected = self._fetch(spec, state, index, live)

        if state.ends:
            rest, held = self._recalling.resident(spec, state.inner)
            heads = index.shape[1] // spec.num_kv_heads
            place = self._place(spec, rest)[:, None, :, None]
            ends = jax.tree.map(lambda x: jnp.repeat(jnp.take_along_axis(x, place, axis=2), heads, axis=1), state.ends)
            rest, held = (jnp.broadcast_to(x[:, None], (*index.shape[:2], x.shape[-1])) for x in (rest, held))
            selected = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=2), selected, ends)
            index, live = (jnp.concatenate(x, axis=2) for x in ((index, rest), (live, held)))
        unused = [(0, 0), (0, 0), (0, self._recalling.reads(spec) - index.shape[-1]), (0, 0)]
        selected = tuple(jnp.pad(x, unused) for x in selected)
        index, live = (jnp.pad(x, unused[:3]) for x in (index, live))
        out = self._recalling.read(spec, state.inner, q, pos, index, live, selected)
        return out, state, carry

    def foresee(
        self, spec: LayerSpec, queries: Callable[[], Float[Array, "B N H"]], pos: Int[Array, " B"], carry: Carry
    ) -> Carry:
        return self.policy.foresee(spec, queries, pos, carry)

    def compress(self, spec: LayerSpec, state: State) -> State:
        if not isinstance(state, Recalled):
            compress = partial(self.policy.compress, spec)
            if not _uses_kv(compress, state):
                return compress(state)
            near = _moved(state, host_memory.to_device)
            return _returned(compress(near), near, state)

        def tail(pos: Int[Array, "B W"]) -> Float[Array, "B K W H"]:
            return jnp.take_along_axis(state.ends[0], self._place(spec, pos)[:, None, :, None], axis=2)

        return dataclasses.replace(state, inner=self._recalling.regroup(spec, state.inner, tail))

    def slots(self, spec: LayerSpec, state: State) -> Slots:
        if not isinstance(state, Recalled):
            return self.policy.slots(spec, _moved(state, host_memory.to_device))
        store = host_memory.to_device(self._recalling.store(state.inner))
        return self.policy.slots(spec, self._recalling.with_store(state.inner, store))

    @property
    def _recalling(self) -> Recalling:
        """The policy, in layers that recall."""
        return cast(Recalling, self.policy)

    def _placed(self, spec: LayerSpec, state: State) -> State:
        """A state that the policy has made, with its keys and values on the host."""
        if not self.policy.recalls(spec):
            moved = _moved(state, host_memory.to_host)
            if not any(map(host_memory.on_host, jax.tree.leaves(moved))):
                raise PolicyError(
                    f"{self.name}: {self.policy.name!r} has its keys and values in a store of its own, which is not moved; use "
                    "it without offloading"
                )
            return moved
        store, ends = self._recalling.store(state), ()
        first, latest = self._recalling.ends(spec)
        if first + latest > 0:
            place = jnp.arange(first + latest, dtype=jnp.int32)
            # Of the ring, the last position of the prompt that belongs at each place.
            newest = state.slots.seen[:, None] - 1
            pos = jnp.where(place < first, place, newest - (newest - (place - first)) % max(latest, 1))
            pos = jnp.maximum(pos, 0)[:, None, :, None]
            ends = jax.tree.map(lambda x: jnp.take_along_axis(x, pos, axis=2, mode="clip"), store)

        heads, size = self._recalling.selects(spec)
        slot = jnp.full((spec.batch, heads, self.steps * size), -1, jnp.int32)
        recent = tuple(jnp.zeros((*slot.shape, spec.head_dim), spec.dtype) for _ in store)
        zeros = jnp.zeros((spec.batch, heads), jnp.int32)
        queries = jnp.zeros((spec.batch,), jnp.int32)
        inner = self._recalling.with_store(state, host_memory.to_host(store))
        return Recalled(inner, ends, recent, slot, queries, zeros, zeros)

    def _place(self, spec: LayerSpec, pos: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """Where in `ends` the token at a position is, if it is there."""
        first, latest = self._recalling.ends(spec)
        return jnp.where(pos < first, pos, first + pos % max(latest, 1))

    def _fetch(
        self, spec: LayerSpec, state: Recalled, index: Int[Array, "B R S"], live: Bool[Array, "B R S"]
    ) -> tuple[Recalled, KV]:
        """Keys and values of what is selected, [B, R, S, H], and the state in which they are the most recent."""
        place, there = _find(state.slot, index)
        there &= live
        missing = live & ~there
        got: KV = jax.tree.map(
            lambda x: jnp.where(
                there[..., None], jnp.take_along_axis(x, place[..., None], axis=2), jnp.zeros((), x.dtype)
            ),
            state.recent,
        )
        store = self._recalling.store(state.inner)
        if self.fetch == "layer":
            store = host_memory.to_device(store)
        got = _filled(got, store, index, missing)

        def latest(new: Array, old: Array) -> Array:
            return jnp.concatenate([new, old[:, :, : old.shape[2] - new.shape[2]]], axis=2)

        first, counted = self._recalling.ends(spec)[0], state.queries > 0
        seen = state.inner.slots.seen

        def count(tokens: Bool[Array, "B R S"], sinks: Int[Array, " B"]) -> Int[Array, "B R"]:
            total = jnp.sum(tokens, axis=-1, dtype=jnp.int32) + jnp.minimum(sinks, first)[:, None]
            return jnp.where(counted[:, None], total, 0)

        state = dataclasses.replace(
            state,
            recent=jax.tree.map(latest, got, state.recent),
            slot=latest(jnp.where(live, index, -1), state.slot),
            queries=state.queries + 1,
            chosen=state.chosen + count(live, seen),
            found=state.found + count(there, seen - 1),
        )
        return state, got


def offloaded(policy: Policy, steps: int = 1, fetch: Literal["selected", "layer"] = "selected") -> Offloaded:
    """Keep a policy's keys and values in host memory (JAX's memory kind `pinned_host`), and all else on the device.

    The policy gives what it gives otherwise. A new token is written into the host's store in place. What attention reads comes to
    the device one layer at a time:

    - Of a policy that reads all it holds, that is the layer's whole cache: the device holds the keys and values of one layer, and a
      step moves those of all layers. If `compress` looks at keys or values (`chelsea`), they come once more for it, and what
      it has changed goes back, after every step.
    - Of one that recalls (a `Recalling`, such as `clusterkv`), it is what a query selects and none of its head's last `steps` queries
      did: their selections stay on the device (ClusterKV, section IV-D), and so do the first tokens and the tail, which every
      query reads. This goes by tokens: of a cluster that was cut to fit the budget, those left out are not at hand. What is
      missing travels in rounds of `BLOCK` slots for each head of each row, as many rounds as the head that misses most needs;
      so a step moves more than its misses, though nothing if there are none.

    `nbytes` and `host_nbytes` tell the bytes in the two memories; `hit_rate`, and the stats of `kvjax.generate`, the share of
    tokens that were at hand.

    Args:
        policy: any, compositions included. Keys and values are those of the `Slots` in its state, and are written by `kvjax.cache`.
        steps, fetch: see `Offloaded`.

    Raises:
        PolicyError: `steps` is less than 1, or (once a model is known) the default device has no such memory, or (when it runs) the
            policy has no `Slots`, as `adakv` and quantised ones.
    """
    return Offloaded(policy, steps, fetch)


def hits(caches: Any) -> tuple[int, int]:
    """Tokens that queries chose in the recalling layers of `caches`, and how many of them were on the device; see `Recalled`."""
    layers = [x for x in jax.tree.leaves(caches, is_leaf=_is_recalled) if _is_recalled(x)]
    chosen, found = ([np.asarray(getattr(x, name), np.int64).sum() for x in layers] for name in ("chosen", "found"))
    return int(sum(chosen)), int(sum(found))


def hit_rate(caches: Any) -> float | None:
    """The share of the tokens chosen that were on the device, all rows, heads and layers together; None where none were chosen."""
    chosen, found = hits(caches)
    return found / chosen if chosen else None


def _is_recalled(x: Any) -> bool:
    return isinstance(x, Recalled)


def _moved(state: State, move: Callable[[Any], Any]) -> State:
    """A state with the keys and values of all its slots in another memory."""

    def one(x: Any) -> Any:
        if not isinstance(x, Slots):
            return x
        k, v = move((x.k, x.v))
        return dataclasses.replace(x, k=k, v=v)

    return jax.tree.map(one, state, is_leaf=lambda x: isinstance(x, Slots))


def _returned(after: State, near: State, far: State) -> State:
    """A state on the device back on the host. Keys and values that are still those of `near` are in `far`, and stay there."""

    def one(x: Any, near: Any, far: Any) -> Any:
        if not isinstance(x, Slots):
            return x
        k, v = (f if a is n else host_memory.to_host(a) for a, n, f in ((x.k, near.k, far.k), (x.v, near.v, far.v)))
        return dataclasses.replace(x, k=k, v=v)

    return jax.tree.map(one, after, near, far, is_leaf=lambda x: isinstance(x, Slots))


def _uses_kv(step: Callable[[State], State], state: State) -> bool:
    """Whether a step computes anything with keys and values, and does not just pass them on.

    Asked beforehand, since XLA would not remove a transfer whose result nothing uses.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    marked = _moved(jax.tree.map(lambda x: False, state), lambda kv: (True, True))
    jaxpr = jax.make_jaxpr(step)(shapes).jaxpr
    kv = [id(var) for var, is_kv in zip(jaxpr.invars, jax.tree.leaves(marked), strict=True) if is_kv]
    return any(id(var) in kv for equation in jaxpr.eqns for var in equation.invars)


def _find(slot: Int[Array, "B R F"], index: Int[Array, "B R S"]) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
    """Where in `slot` each of `index` is, and whether it is there."""
    order = jnp.argsort(slot, axis=-1)
    ranked = jnp.take_along_axis(slot, order, axis=-1)
    rank = jax.vmap(jax.vmap(jnp.searchsorted))(ranked, index)
    rank = jnp.minimum(rank, slot.shape[-1] - 1)
    found = jnp.take_along_axis(ranked, rank, axis=-1) == index
    return jnp.take_along_axis(order, rank, axis=-1), found


def _filled(got: KV, store: KV, index: Int[Array, "B R S"], missing: Bool[Array, "B R S"]) -> KV:
    """`got` with what is missing from it read from the store, block by block."""
    size = index.shape[-1]
    block = min(BLOCK, size)
    places, exists = cache.compact(missing, -(-size // block) * block)
    places = jnp.where(exists, places, size)  # out of range, hence dropped
    most = jnp.max(jnp.sum(missing, axis=-1, dtype=jnp.int32))
    rows, heads, _ = np.ogrid[: index.shape[0], : index.shape[1], :1]

    def unfinished(loop: tuple[Array, KV]) -> Array:
        return loop[0] < most

    def step(loop: tuple[Array, KV]) -> tuple[Array, KV]:
        start, got = loop
        place = jax.lax.dynamic_slice_in_dim(places, start, block, axis=2)
        new = host_memory.read(store, jnp.take_along_axis(index, place, axis=2, mode="clip"))
        return start + block, jax.tree.map(lambda x, y: x.at[rows, heads, place].set(y, mode="drop"), got, new)

    return jax.lax.while_loop(unfinished, step, (jnp.zeros((), jnp.int32), got))[1]
