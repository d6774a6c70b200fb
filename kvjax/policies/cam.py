"""CaM: values that leave a rolling window are merged into the tokens after them."""

import dataclasses
from typing import Any, ClassVar

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerSpec, PromptKV, Token

from .families.noise import uniform
from .families.scoring import all_queries
from .fields import check_fields
from .info import PolicyInfo
from .layer import CacheLayer, Carry, Reads, State
from .registry import register
from .streaming_llm import StreamingCache, StreamingLayer, StreamingLLM


@register
@dataclasses.dataclass(frozen=True)
class CaM(StreamingLLM):
    """StreamingLLM that merges evicted values into later tokens (Zhang et al. 2024, Algorithm 1).

    A token i that leaves the window is merged into the m tokens after it, V_j += V_i / m, with probability p = min(1,
    a_i / mean of the a_j). Here a is the attention that a token has received from all queries so far. Otherwise token i
    is dropped. Keys do not change. If fewer than m tokens follow, m is their number.

    This is the published streaming form. The other published form uses the current query's attention, and the mean over
    the whole window. A prompt is cut as by StreamingLLM, without merging. Merging begins with the first decoded token.

    Attributes:
        budget: slots in total, sinks included: a number of tokens, or a fraction of prompt + new tokens.
        sinks: first tokens, never evicted.
        merge: m, number of tokens that share an evicted value.
        seed: of the random draws, which depend on layer, head and position besides.

    Example:
        >>> policy = kvjax.CaM(budget=64, sinks=2)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('cam:budget=64,sinks=2', 0.45)
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
    """A streaming cache with the attention that its tokens have received.

    Attributes:
        mass: attention of all queries so far, averaged over the query group. Arbitrary in free slots.
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

    read_block = CacheLayer.read_block  # token by token, because each evicted token may be merged

    def init(self, total: Int[Array, " B"] | None = None) -> MergingCache:
        stream = super().init(total)
        return MergingCache(stream.cache, stream.budget, jnp.zeros_like(stream.cache.weight))

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[MergingCache, Carry]:
        stream, carry = super().prefill(prompt, carry)
        mass = all_queries(prompt, self.spec)
        mass = jnp.take_along_axis(mass, jnp.maximum(stream.cache.pos, 0), axis=-1)
        return MergingCache(stream.cache, stream.budget, jnp.where(stream.cache.live, mass, 0.0)), carry

    def slot_scores(self, state: MergingCache) -> Float[Array, "B K C"]:
        return state.mass

    def append(self, state: State, token: Token) -> MergingCache:
        updated, (mass,) = cache.insert(state.cache, token, [(state.mass, 0.0)], rotated=self.rotated)
        return dataclasses.replace(state, cache=updated, mass=mass)

    def attend(self, state: State, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], MergingCache, Carry]:
        out, probs = self.read(state.cache, token, probs=True)
        assert probs is not None
        # This zero depends on the output, so XLA schedules the read of values before `compress` changes them. Otherwise it
        # copies the cache. (XLA removes an optimization barrier too early.)
        read = 0.0 * out[:, 0, 0].astype(jnp.float32)
        mass = state.mass + probs + read[:, None, None]
        return out, dataclasses.replace(state, mass=mass), carry

    def compress(self, state: State) -> MergingCache:
        kept, (slot, full) = state.cache, self.evicted(state)
        pos = jnp.take_along_axis(kept.pos, slot[..., None], axis=-1)
        steps = kept.pos[:, :, None] - pos[..., None] == jnp.arange(1, self.policy.merge + 1, dtype=jnp.int32)[:, None]
        follows = jnp.any(steps, axis=-1)  # [B, K, m]: which of the next m tokens exist
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
        """Draw whether the token in `slot`, at `pos`, is merged into slots `after`. C in `after` means no token."""
        exists = after < mass.shape[-1]
        others = jnp.where(exists, jnp.take_along_axis(mass, jnp.where(exists, after, 0), axis=-1), 0.0)
        mean = jnp.sum(others, axis=-1) / jnp.maximum(jnp.sum(exists, axis=-1), 1).astype(jnp.float32)
        own = jnp.take_along_axis(mass, slot[..., None], axis=-1)[..., 0]
        number = uniform(self.spec, self.policy.seed, pos[:, 0, 0]).T  # all heads of a row evict the same position
        return number * mean < own
