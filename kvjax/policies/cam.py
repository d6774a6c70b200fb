"""CaM: what leaves a rolling window is merged into the tokens that come after it."""

import dataclasses
from typing import Any, ClassVar

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerSpec, PromptKV, Token

from .base import CacheLayer, Carry, Reads, State
from .families.noise import uniform
from .families.scoring import all_queries
from .fields import check_fields
from .info import PolicyInfo
from .registry import register
from .streaming_llm import StreamingCache, StreamingLayer, StreamingLLM


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

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="cam",
        paper="Zhang et al. 2024, CaM: Cache Merging for Memory-efficient LLMs Inference",
        summary="as StreamingLLM, with values that leave the window often merged into those that follow",
        memory="freed",
        stage="both",
        adds_dropped_values=True,
        positions="cache_rank",
    )

    merge: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, merge=1)
        super().__post_init__()

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return CaMLayer(self, spec)


@flax.struct.dataclass
class MergingCache(StreamingCache):
    """A cache whose tokens know the attention that they have got.

    Attributes:
        mass: attention of all queries so far, averaged over the query group; of free slots it does not matter.
    """

    mass: Float[Array, "B K C"]


@dataclasses.dataclass(frozen=True)
class CaMLayer(StreamingLayer[CaM]):
    """One layer of `CaM`."""

    @property
    def reads(self) -> Reads:
        return "tokens"

    @property
    def compress_reads_kv(self) -> bool:
        return True

    read_block = CacheLayer.read_block  # not that of `StreamingLayer`: each token merges what it drops

    def init(self, total: Int[Array, " B"] | None = None) -> MergingCache:
        stream = super().init(total)
        return MergingCache(stream.cache, stream.budget, jnp.zeros_like(stream.cache.weight))

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[MergingCache, Carry]:
        stream, carry = super().prefill(prompt, carry)
        mass = all_queries(prompt, self.spec)
        mass = jnp.take_along_axis(mass, jnp.maximum(stream.cache.pos, 0), axis=-1)
        return MergingCache(stream.cache, stream.budget, jnp.where(stream.cache.live, mass, 0.0)), carry

    def append(self, state: State, token: Token) -> MergingCache:
        updated, (mass,) = cache.insert(state.cache, token, [(state.mass, 0.0)], rotated=self.rotated)
        return dataclasses.replace(state, cache=updated, mass=mass)

    def attend(self, state: State, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], MergingCache, Carry]:
        out, probs = self.read(state.cache, token, probs=True)
        assert probs is not None
        # A zero that comes of the output: values must have been read before `compress` changes them, and where the compiler does
        # not see that they have, it copies the cache. (An optimization barrier is taken away too early to tell it.)
        read = 0.0 * out[:, 0, 0].astype(jnp.float32)
        mass = state.mass + probs + read[:, None, None]
        return out, dataclasses.replace(state, mass=mass), carry

    def compress(self, state: State) -> MergingCache:
        kept, (slot, full) = state.cache, self.evicted(state)
        pos = jnp.take_along_axis(kept.pos, slot[..., None], axis=-1)
        steps = kept.pos[:, :, None] - pos[..., None] == jnp.arange(1, self.policy.merge + 1, dtype=jnp.int32)[:, None]
        follows = jnp.any(steps, axis=-1)  # [B, K, m]: whether there are so many tokens after it
        after = jnp.where(follows, jnp.argmax(steps, axis=-1), kept.pos.shape[-1]).astype(jnp.int32)
        merged = full & self._drawn(state.mass, slot, pos, after)

        count = jnp.maximum(jnp.sum(follows, axis=-1), 1).astype(jnp.float32)
        value = jnp.take_along_axis(kept.v, slot[..., None, None], axis=2).astype(jnp.float32)
        part = jnp.where(merged[..., None, None], value / count[..., None, None], 0.0)
        targets = jnp.where(follows, after, 0)[..., None]
        sums = jnp.take_along_axis(kept.v, targets, axis=2).astype(jnp.float32) + part
        rows, heads = (jnp.arange(size, dtype=jnp.int32) for size in after.shape[:2])
        at = rows[:, None, None], heads[None, :, None], after
        v = kept.v.at[at].set(sums.astype(kept.v.dtype), mode="drop")
        return dataclasses.replace(state, cache=cache.evict(dataclasses.replace(kept, v=v), slot, full))

    def _drawn(
        self,
        mass: Float[Array, "B K C"],
        slot: Int[Array, "B K"],
        pos: Int[Array, "B K 1"],
        after: Int[Array, "B K m"],
    ) -> Bool[Array, "B K"]:
        """Whether the token in `slot`, at `pos`, is merged into those in the slots `after`, which are C where there is none."""
        exists = after < mass.shape[-1]
        others = jnp.where(exists, jnp.take_along_axis(mass, jnp.where(exists, after, 0), axis=-1), 0.0)
        mean = jnp.sum(others, axis=-1) / jnp.maximum(jnp.sum(exists, axis=-1), 1).astype(jnp.float32)
        own = jnp.take_along_axis(mass, slot[..., None], axis=-1)[..., 0]
        number = uniform(self.spec, self.policy.seed, pos[:, 0, 0]).T  # the heads of a row evict the same position
        return number * mean < own
