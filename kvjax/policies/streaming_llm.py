"""StreamingLLM: attention sinks and a rolling window of recent tokens."""

import dataclasses
from typing import ClassVar, Literal

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerSpec, Slots

from .base import Carry, Memory, Policy, PolicyError, Stage, budget_rows, budget_tokens, check_fields
from .registry import register


@flax.struct.dataclass
class Stream:
    """Slots with unrotated keys, and each row's budget."""

    slots: Slots
    budget: Int[Array, " B"]


@register
@dataclasses.dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keep the first `sinks` tokens and the most recent ones (Xiao et al. 2023, section 3.2).

    Keys are kept unrotated; a token's position is its place in the cache, so that a sequence of any length never leaves the
    trained window.

    Attributes:
        budget: slots in all, sinks included: a number of tokens, or a fraction of prompt + new tokens.
        sinks: first tokens that are never evicted.
    """

    name: ClassVar[str] = "streaming_llm"
    paper: ClassVar[str] = "Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks"
    keeps: ClassVar[str] = "the first tokens and the most recent ones, at positions within the cache"
    memory: ClassVar[Memory] = "freed"
    stage: ClassVar[Stage] = "both"
    positions: ClassVar[Literal["original", "cache"]] = "cache"

    budget: int | float = 1024
    sinks: int = 4

    def __post_init__(self) -> None:
        check_fields(self, sinks=0)
        if isinstance(self.budget, int):
            self.check(0)

    def check(self, tokens: int) -> None:
        budget = budget_tokens(self.budget, tokens)
        if budget <= self.sinks:
            raise PolicyError(
                f"{self.name}: a budget of {self.budget} gives {budget} slots, but {self.sinks} sinks and at least one recent "
                f"token need {self.sinks + 1}; raise budget or lower sinks"
            )

    def capacity(self, spec: LayerSpec) -> int:
        return cache.round_slots(min(budget_tokens(self.budget, spec.max_tokens), spec.max_tokens) + 1)

    def init(self, spec: LayerSpec) -> Stream:
        tokens = jnp.full((spec.batch,), spec.new_tokens, jnp.int32)
        return Stream(cache.empty(spec, self.capacity(spec)), budget_rows(self.budget, tokens))

    def prefill(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
        carry: Carry,
    ) -> tuple[Stream, Carry]:
        budget = budget_rows(self.budget, lengths + spec.new_tokens)
        pos = jnp.arange(k.shape[1], dtype=jnp.int32)
        keep = (pos < self.sinks) | (pos >= (lengths - budget + self.sinks)[:, None])
        keep = jnp.broadcast_to(keep[:, None], (spec.batch, spec.num_kv_heads, k.shape[1]))
        slots, _ = cache.select(spec, self.capacity(spec), k, v, keep, lengths)
        return Stream(slots, budget), carry

    def append(
        self, spec: LayerSpec, state: Stream, k: Float[Array, "B K H"], v: Float[Array, "B K H"], pos: Int[Array, " B"]
    ) -> Stream:
        return dataclasses.replace(state, slots=cache.insert(state.slots, k, v, pos))

    def attend(
        self, spec: LayerSpec, state: Stream, q: Float[Array, "B N H"], pos: Int[Array, " B"], carry: Carry
    ) -> tuple[Float[Array, "B N H"], Stream, Carry]:
        out, _ = self.read(spec, state.slots, q, pos)
        return out, state, carry

    def read(
        self, spec: LayerSpec, slots: Slots, q: Float[Array, "B N H"], pos: Int[Array, " B"], probs: bool = False
    ) -> tuple[Float[Array, "B N H"], Float[Array, "B K C"] | None]:
        """Attention of the newest token with keys and query rotated to their places in the cache; see `cache.attend`."""
        evicted = slots.seen[:, None] - slots.count  # of the tokens between sinks and window
        place = jnp.where(slots.pos < self.sinks, slots.pos, slots.pos - evicted[..., None])
        at = jnp.maximum(place, 0), pos[:, None] - evicted
        return cache.attend(spec, slots, q, pos, place=at, probs=probs)

    def compress(self, spec: LayerSpec, state: Stream) -> Stream:
        return dataclasses.replace(state, slots=cache.evict(state.slots, *self.evicted(state)))

    def evicted(self, state: Stream) -> tuple[Int[Array, "B K"], Bool[Array, "B K"]]:
        """The slot of the oldest token after the sinks, and whether it has to go."""
        slots = state.slots
        window = slots.live & (slots.pos >= self.sinks)
        oldest = jnp.argmin(jnp.where(window, slots.pos, jnp.iinfo(jnp.int32).max), axis=-1)
        return oldest.astype(jnp.int32), slots.count > state.budget[:, None]
