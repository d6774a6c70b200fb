"""Recall: policies that keep every token, and have each query read a selection of them."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerSpec, Slots
from kvjax.pallas_kernels import DeferredRope, gather_attention

from .base import Carry, Due, Memory, Policy, State


@dataclasses.dataclass(frozen=True)
class Recalling(Policy):
    """Base of policies that recall: token p is in slot p, with its key rotated, and a query reads three kinds of slots.

    These are what it selects, the first `ends(spec)[0]` tokens, and a tail of latest ones, up to `ends(spec)[1]` of them. In layers
    that recall, the state has its store in a field `slots`. `offloaded` then moves only what is selected.

    One that keeps its store in another way says so by `store`, `with_store` and `read`.
    """

    memory: ClassVar[Memory] = "bandwidth"

    def recalls(self, spec: LayerSpec) -> bool:
        raise NotImplementedError

    def ends(self, spec: LayerSpec) -> tuple[int, int]:
        """How many first tokens every query reads, and how long the tail can be that it reads too."""
        raise NotImplementedError

    def tail(self, state: Any) -> Int[Array, " B"]:
        """The position that each row's tail begins at, no less than the number of first tokens."""
        raise NotImplementedError

    def selects(self, spec: LayerSpec) -> tuple[int, int]:
        """How many heads select for themselves (R: the query heads or the KV heads), and how many slots (S)."""
        raise NotImplementedError

    def reads(self, spec: LayerSpec) -> int:
        """Slots that one of the selecting heads gathers in a decoding step."""
        return (
            self.capacity(spec)
            if not self.recalls(spec)
            else cache.round_slots(self.selects(spec)[1] + sum(self.ends(spec)))
        )

    def asking(self, q: Float[Array, "B N H"] | DeferredRope, carry: Carry) -> Float[Array, "B N H"] | DeferredRope:
        """The rotated queries that it selects by: those that attend, or such as an earlier layer has foreseen."""
        return q

    def run_of(self, spec: LayerSpec) -> int:
        """All that is read comes in runs of so many slots, each beginning at a multiple of it: pages that are read as one."""
        return 1

    def selected(
        self, spec: LayerSpec, state: Any, q: Float[Array, "B N H"] | DeferredRope
    ) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        """What queries select: slots for each selecting head, and which of them are meant. `heads_of` gives the rotated queries.

        Keys and values are not looked at: they may be out of reach.
        """
        raise NotImplementedError

    def store(self, state: Any) -> tuple[Array, ...]:
        """What is gathered by slot, and may be out of reach: keys and values [B, K, C, H]."""
        return state.slots.k, state.slots.v

    def with_store(self, state: Any, store: tuple[Array, ...]) -> State:
        """The state with its store elsewhere."""
        return dataclasses.replace(state, slots=dataclasses.replace(state.slots, k=store[0], v=store[1]))

    def read(
        self,
        spec: LayerSpec,
        state: Any,
        q: Float[Array, "B N H"],
        pos: Int[Array, " B"],
        index: Int[Array, "B R S"],
        live: Bool[Array, "B R S"],
        got: tuple[Array, ...],
    ) -> Float[Array, "B N H"]:
        """Attention of rotated queries, given all of the store that they read.

        Args:
            index, live: slots, and which of them are meant.
            got: what the store has there, [B, R, S, H] each.
        """
        return cache.attend(spec, gathered(got[0], got[1], index, live, state.slots.seen), q, pos)[0]

    def regroup(self, spec: LayerSpec, state: State, keys: Callable[[Array], Array]) -> State:
        """`compress`, given a function from positions [B, W] in the tail to their keys [B, K, W, H]."""
        return state

    def due(self, spec: LayerSpec, state: State) -> Due:
        return "never" if type(self).regroup is Recalling.regroup else "always"

    def compress(self, spec: LayerSpec, state: State) -> State:
        if not self.recalls(spec):
            return state
        return self.regroup(
            spec, state, lambda pos: jnp.take_along_axis(state.slots.k, pos[:, None, :, None], axis=2, mode="clip")
        )

    def append(
        self, spec: LayerSpec, state: State, k: Float[Array, "B K H"], v: Float[Array, "B K H"], pos: Int[Array, " B"]
    ) -> State:
        if not self.recalls(spec):
            return super().append(spec, state, k, v, pos)
        return dataclasses.replace(state, slots=super().append(spec, state.slots, k, v, pos))

    def attend(
        self, spec: LayerSpec, state: State, q: Float[Array, "B N H"], pos: Int[Array, " B"], carry: Carry
    ) -> tuple[Float[Array, "B N H"], State, Carry]:
        if not self.recalls(spec):
            return super().attend(spec, state, q, pos, carry)
        heads = cache.turned(spec.rope, q, pos)
        runs, live = self.runs(spec, state, self.asking(heads, carry), pos)
        k, v, seen = state.slots.k, state.slots.v, state.slots.seen
        attended = gather_attention(heads, k, v, runs, live, scale=spec.scale, page=self.run_of(spec), tokens=seen)
        return attended.out, state, carry

    def runs(
        self, spec: LayerSpec, state: Any, q: Float[Array, "B N H"] | DeferredRope, pos: Int[Array, " B"]
    ) -> tuple[Int[Array, "B R P"], Bool[Array, "B R L"]]:
        """All that rotated queries at `pos` read, as runs of `run_of` slots, and which of the runs, or of the slots in them, are meant.

        Slots that hold no token yet need not be left out.
        """
        index, live = self.recall(spec, state, q)
        if spec.window is not None:
            live &= index > pos[:, None, None] - spec.window
        page = self.run_of(spec)
        return index[..., ::page] // page, live

    def recall(
        self, spec: LayerSpec, state: Any, q: Float[Array, "B N H"] | DeferredRope
    ) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        """All that rotated queries read, as for `selected`: the selection, the first tokens, the tail, and padding."""
        index, live = self.selected(spec, state, q)
        rest, held = (jnp.broadcast_to(x[:, None], (*index.shape[:2], x.shape[-1])) for x in self.resident(spec, state))
        index, live = jnp.concatenate([index, rest], axis=-1), jnp.concatenate([live, held], axis=-1)
        index = jnp.minimum(index, self.capacity(spec) - 1)
        unused = ((0, 0), (0, 0), (0, self.reads(spec) - index.shape[-1]))
        return jnp.pad(index, unused), jnp.pad(live, unused)

    def resident(self, spec: LayerSpec, state: Any) -> tuple[Int[Array, "B E"], Bool[Array, "B E"]]:
        """Positions that every query reads: first tokens and tail, and which of them exist."""
        first, latest = self.ends(spec)
        pos = jnp.arange(first + latest, dtype=jnp.int32)
        pos = jnp.where(pos < first, pos, self.tail(state)[:, None] + pos - first)
        return pos, pos < state.slots.seen[:, None]


def gathered(
    k: Float[Array, "B R S H"],
    v: Float[Array, "B R S H"],
    index: Int[Array, "B R S"],
    live: Bool[Array, "B R S"],
    seen: Int[Array, " B"],
) -> Slots:
    """A small cache of R heads, of what they have recalled."""
    return Slots(
        k=k,
        v=v,
        pos=jnp.where(live, index, -1),
        weight=live.astype(jnp.float32),
        next=jnp.zeros(index.shape[:2], jnp.int32),
        seen=seen,
    )
