"""CaM: what leaves a rolling window is merged into the tokens that come after it."""

import dataclasses
from typing import ClassVar

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerSpec

from .base import Carry, State, check_fields, rotated
from .noise import uniform
from .registry import register
from .scoring import attention_mass
from .streaming_llm import Stream, StreamingLLM


@flax.struct.dataclass
class Merging(Stream):
    """A stream whose tokens know the attention that they have got.

    Attributes:
        mass: attention of all queries so far, averaged over the query group; of free slots it does not matter.
    """

    mass: Float[Array, "B K C"]


@register
@dataclasses.dataclass(frozen=True)
class CaM(StreamingLLM):
    """StreamingLLM that keeps something of the values it drops (Zhang et al. 2024, Algorithm 1).

    A token i that leaves the window is merged into the m tokens that follow it, V_j += V_i / m, with probability
    p = min(1, a_i / mean of their a_j), where a is the attention that a token has got from all queries so far; else it is
    dropped. Keys stay as they are. Where fewer than m tokens follow, these are the m.

    This is the published streaming form; its other one takes the current query's attention, and the mean over the whole window.
    A prompt is cut as StreamingLLM does, without merging: merging begins with the first token that is decoded.

    Attributes:
        budget: slots in all, sinks included: a number of tokens, or a fraction of prompt + new tokens.
        sinks: first tokens that are never evicted.
        merge: m, tokens that a value is divided among.
        seed: of the draws, which depend on nothing else but layer, head and position.
    """

    name: ClassVar[str] = "cam"
    paper: ClassVar[str] = "Zhang et al. 2024, CaM: Cache Merging for Memory-efficient LLMs Inference"
    keeps: ClassVar[str] = "as StreamingLLM, with values that leave the window often merged into those that follow"
    adds: ClassVar[bool] = True

    merge: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, merge=1)
        super().__post_init__()

    def init(self, spec: LayerSpec) -> Merging:
        stream = super().init(spec)
        return Merging(stream.slots, stream.budget, jnp.zeros_like(stream.slots.weight))

    def prefill(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
        carry: Carry,
    ) -> tuple[Merging, Carry]:
        stream, carry = super().prefill(spec, q, k, v, lengths, carry)
        mass = attention_mass(rotated(spec, q), rotated(spec, k), lengths, scale=spec.scale, sliding_window=spec.window)
        mass = jnp.take_along_axis(mass, jnp.maximum(stream.slots.pos, 0), axis=-1)
        return Merging(stream.slots, stream.budget, jnp.where(stream.slots.live, mass, 0.0)), carry

    def append(
        self, spec: LayerSpec, state: State, k: Float[Array, "B K H"], v: Float[Array, "B K H"], pos: Int[Array, " B"]
    ) -> Merging:
        slots, (mass,) = cache.insert_with(state.slots, k, v, pos, [(state.mass, 0.0)])
        return dataclasses.replace(state, slots=slots, mass=mass)

    def attend(
        self, spec: LayerSpec, state: State, q: Float[Array, "B N H"], pos: Int[Array, " B"], carry: Carry
    ) -> tuple[Float[Array, "B N H"], Merging, Carry]:
        out, probs = self.read(spec, state.slots, q, pos, probs=True)
        assert probs is not None
        # A zero that comes of the output: values must have been read before `compress` changes them, and where the compiler does
        # not see that they have, it copies the cache. (An optimization barrier is taken away too early to tell it.)
        read = 0.0 * out[:, 0, 0].astype(jnp.float32)
        mass = state.mass + probs + read[:, None, None]
        return out, dataclasses.replace(state, mass=mass), carry

    def compress(self, spec: LayerSpec, state: State) -> Merging:
        slots, (slot, full) = state.slots, self.evicted(state)
        pos = jnp.take_along_axis(slots.pos, slot[..., None], axis=-1)
        steps = slots.pos[:, :, None] - pos[..., None] == jnp.arange(1, self.merge + 1, dtype=jnp.int32)[:, None]
        follows = jnp.any(steps, axis=-1)  # [B, K, m]: whether there are so many tokens after it
        after = jnp.where(follows, jnp.argmax(steps, axis=-1), slots.pos.shape[-1]).astype(jnp.int32)
        merged = full & self._drawn(spec, state.mass, slot, pos, after)

        count = jnp.maximum(jnp.sum(follows, axis=-1), 1).astype(jnp.float32)
        value = jnp.take_along_axis(slots.v, slot[..., None, None], axis=2).astype(jnp.float32)
        part = jnp.where(merged[..., None, None], value / count[..., None, None], 0.0)
        there = jnp.where(follows, after, 0)[..., None]
        sums = jnp.take_along_axis(slots.v, there, axis=2).astype(jnp.float32) + part
        rows, heads = (jnp.arange(size, dtype=jnp.int32) for size in after.shape[:2])
        at = rows[:, None, None], heads[None, :, None], after
        v = slots.v.at[at].set(sums.astype(slots.v.dtype), mode="drop")
        return dataclasses.replace(state, slots=cache.evict(dataclasses.replace(slots, v=v), slot, full))

    def _drawn(
        self,
        spec: LayerSpec,
        mass: Float[Array, "B K C"],
        slot: Int[Array, "B K"],
        pos: Int[Array, "B K 1"],
        after: Int[Array, "B K m"],
    ) -> Bool[Array, "B K"]:
        """Whether the token in `slot`, at `pos`, is merged into those in the slots `after`, which are C where there is none."""
        there = after < mass.shape[-1]
        others = jnp.where(there, jnp.take_along_axis(mass, jnp.where(there, after, 0), axis=-1), 0.0)
        mean = jnp.sum(others, axis=-1) / jnp.maximum(jnp.sum(there, axis=-1), 1).astype(jnp.float32)
        own = jnp.take_along_axis(mass, slot[..., None], axis=-1)[..., 0]
        number = uniform(spec, self.seed, pos[:, 0, 0]).T  # the heads of a row evict the same position
        return number * mean < own
