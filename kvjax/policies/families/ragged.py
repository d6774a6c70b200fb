"""Heads of unequal sizes: one store per layer, in which each head has a segment of its size."""

import dataclasses
from typing import Self, TypeVar

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Token
from kvjax.pallas_kernels import partial_ragged_attention
from kvjax.pallas_kernels.sinks import with_sinks

from ..layer import Carry
from .scoring import PromptScorer, PromptScorerLayer

P = TypeVar("P", bound=PromptScorer)


@flax.struct.dataclass
class Ragged:
    """One store for all heads of a layer, each with a segment of its size. B rows, K KV heads, S slots, H head dim.

    A segment has the head's kept tokens, followed by room for new ones. The store has the layout of a single head.

    Attributes:
        k, v: rotated keys, and values.
        pos: original position of the token in a slot, -1 if free.
        start: first slot of each head's segment.
        next: slot of the head's next token. Its tokens are in slots `start` to `next` - 1.
        seen: tokens that have passed through this cache, kept or not.
        slot_shards: number of devices that shard keys and values by slots, as in `LayerCache`.
    """

    k: Float[Array, "B 1 _ H"]
    v: Float[Array, "B 1 _ H"]
    pos: Int[Array, "B 1 S"]
    start: Int[Array, "B K"]
    next: Int[Array, "B K"]
    seen: Int[Array, " B"]
    slot_shards: int = flax.struct.field(pytree_node=False, default=1, kw_only=True)

    @property
    def live(self) -> Bool[Array, "B 1 S"]:
        """Slots that contain a token."""
        return self.pos >= 0

    @property
    def cache(self) -> Self:
        """The store itself, for code that reads the `cache` of a state."""
        return self

    @property
    def slot_axes(self) -> tuple[int, int]:
        """Slot axes of keys and values."""
        return 2, 2


@dataclasses.dataclass(frozen=True)
class RaggedLayer(PromptScorerLayer[P]):
    """A layer of a `PromptScorer` whose heads keep unequal numbers of the prompt's tokens, `max_kept` on average."""

    @property
    def shards_own_store(self) -> bool:
        return True

    @property
    def capacity(self) -> int:
        """Slots of the layer's store, for all heads together."""
        return cache.round_slots(self.spec.num_kv_heads * self.max_kept)

    def init(self, total: Int[Array, " B"] | None = None) -> Ragged:
        spec, size = self.spec, self.capacity
        start = jnp.arange(spec.num_kv_heads, dtype=jnp.int32) * spec.new_tokens
        start = jnp.broadcast_to(start, (spec.batch, spec.num_kv_heads))
        return Ragged(
            k=jnp.zeros((spec.batch, 1, size, spec.head_dim), spec.dtype),
            v=jnp.zeros((spec.batch, 1, size, spec.head_dim), spec.dtype),
            pos=jnp.full((spec.batch, 1, size), -1, jnp.int32),
            start=start,
            next=start,
            seen=jnp.zeros((spec.batch,), jnp.int32),
        )

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[Ragged, Carry]:
        keep, carry = self.chosen(prompt, carry)
        return _stored(self.spec, self.capacity, prompt, keep), carry

    def append(self, state: Ragged, token: Token) -> Ragged:
        rows = jnp.arange(token.k.shape[0], dtype=jnp.int32)[:, None]
        slot = token.slot(state.next)
        at = rows, 0, slot if state.slot_shards == 1 else cache.local_slot(state, slot)
        return dataclasses.replace(
            state,
            k=state.k.at[at].set(token.k_rotated.astype(state.k.dtype), mode="drop"),
            v=state.v.at[at].set(token.v.astype(state.v.dtype), mode="drop"),
            pos=state.pos.at[rows, 0, slot].set(token.position[:, None], mode="drop"),
            next=state.next + token.count(state.next),
            seen=state.seen + token.count(state.seen),
        )

    def attend(self, state: Ragged, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], Ragged, Carry]:
        window, (k, v) = self.spec.window, (x[:, 0] for x in (state.k, state.v))
        visible = None if window is None else state.pos > token.position[:, None, None] - window
        if state.slot_shards == 1:
            seen = None if visible is None else visible[:, 0]
            segments = state.start, state.next
            part = partial_ragged_attention(token.q_rotated, k, v, *segments, scale=self.spec.scale, visible=seen)
            return with_sinks(*part, token.sinks), state, carry
        seen = None if visible is None else cache.local_part(visible, state.slot_shards)[:, 0]
        segments = map(cache.stripes(state.slot_shards).below, (state.start, state.next))
        part = partial_ragged_attention(token.q_rotated, k, v, *segments, scale=self.spec.scale, visible=seen)
        return cache.merged(*part, state.slot_shards, token.sinks), state, carry

    def view(self, state: Ragged) -> LayerCache:
        k, v, positions = (x[:, 0] for x in (state.k, state.v, state.pos))
        width = min(self.spec.max_tokens, positions.shape[-1])
        index = state.start[..., None] + jnp.arange(width, dtype=jnp.int32)
        live = index < state.next[..., None]
        flat = jnp.where(live, index, 0).reshape(self.spec.batch, -1)

        def segments(x: Float[Array, "B S H"]) -> Float[Array, "B K C H"]:
            rows = jnp.take_along_axis(x, flat[..., None], axis=1)
            return jnp.where(live[..., None], rows.reshape(*live.shape, -1), jnp.zeros((), x.dtype))

        pos = jnp.where(live, jnp.take_along_axis(positions, flat, axis=1).reshape(live.shape), -1)
        return LayerCache(segments(k), segments(v), pos, live.astype(jnp.float32), state.next - state.start, state.seen)


def _stored(spec: LayerSpec, size: int, prompt: PromptKV, keep: Bool[Array, "B K T"]) -> Ragged:
    """Return the kept tokens of a prompt in a store of `size` slots: head after head, each with room for new tokens."""
    kept = jnp.sum(keep, axis=-1, dtype=jnp.int32)
    before = jnp.cumsum(kept, axis=-1) - kept  # kept tokens of the previous heads
    start = before + jnp.arange(spec.num_kv_heads, dtype=jnp.int32) * spec.new_tokens
    source, _ = cache.compact_indices(keep.reshape(spec.batch, -1), size)  # head · T + position, in order

    slots = jnp.arange(size, dtype=jnp.int32)
    head = jnp.sum(slots >= start[..., None], axis=1, dtype=jnp.int32) - 1  # head of each slot's segment
    place = slots - jnp.take_along_axis(start, head, axis=1)
    live = place < jnp.take_along_axis(kept, head, axis=1)
    which = jnp.take_along_axis(before, head, axis=1) + place
    token = jnp.take_along_axis(source, jnp.where(live, which, 0), axis=1) % keep.shape[-1]
    rows = jnp.arange(spec.batch, dtype=jnp.int32)[:, None]

    def gathered(x: Float[Array, "B T K H"]) -> Float[Array, "B 1 S H"]:
        return jnp.where(live[..., None], x[rows, token, head], jnp.zeros((), x.dtype)).astype(spec.dtype)[:, None]

    pos = token if prompt.places is None else prompt.places[rows, head, token]
    return Ragged(
        k=gathered(prompt.k_rotated),
        v=gathered(prompt.v),
        pos=jnp.where(live, pos, -1)[:, None],
        start=start,
        next=start + kept,
        seen=prompt.seen.astype(jnp.int32),
    )
