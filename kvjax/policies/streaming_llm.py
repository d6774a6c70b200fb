"""StreamingLLM: attention sinks and a rolling window of recent tokens."""

import dataclasses
from typing import Any, ClassVar, TypeVar

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Token, TokenBlock

from .base import Policy
from .budget import budget_rows, budget_tokens, check_least
from .fields import check_fields
from .info import PolicyInfo
from .layer import CacheLayer, Carry, State, read_as_prompt
from .registry import register

S = TypeVar("S", bound="StreamingLLM")


@register
@dataclasses.dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keep the first `sinks` tokens and the most recent ones (Xiao et al. 2023, section 3.2).

    Keys are stored unrotated. A token's position is its rank in the cache, so sequences of any length stay inside the
    trained window.

    Attributes:
        budget: slots in total, sinks included: a number of tokens, or a fraction of prompt + new tokens.
        sinks: first tokens, never evicted.

    Example:
        >>> policy = kvjax.StreamingLLM(budget=64, sinks=2)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('streaming_llm:budget=64,sinks=2', 0.43)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="streaming_llm",
        paper="Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks",
        summary="the first tokens and the most recent ones, at positions within the cache",
        memory="freed",
        stage="both",
        positions="cache_rank",
    )

    budget: int | float = 1024
    sinks: int = 4

    def __post_init__(self) -> None:
        check_fields(self, sinks=0)

    def validate(self, tokens: int) -> None:
        needs = (
            f"but {self.sinks} sinks and at least one recent token need {self.sinks + 1}. Raise budget or lower sinks."
        )
        check_least(self.info.name, self.budget, tokens, self.sinks + 1, needs)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return StreamingLayer(self, spec)


@flax.struct.dataclass
class StreamingCache:
    """A cache of sinks and a window, and the budget of each row."""

    cache: LayerCache
    budget: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class StreamingLayer(CacheLayer[S]):
    """One layer of `StreamingLLM`, and of methods that keep the same tokens.

    Attributes:
        rotated: whether tokens have their original positions, instead of their ranks in the cache.
    """

    rotated: bool = False

    @property
    def max_kept(self) -> int:
        return budget_tokens(self.policy.budget, self.spec.max_tokens, self.policy.sinks + 1)

    def init(self, total: Int[Array, " B"] | None = None) -> StreamingCache:
        budget = budget_rows(self.policy.budget, self.spec.totals(total), self.policy.sinks + 1)
        return StreamingCache(cache.empty(self.spec, self.capacity), budget)

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[StreamingCache, Carry]:
        budget = budget_rows(self.policy.budget, prompt.total, self.policy.sinks + 1)
        place = jnp.arange(prompt.size, dtype=jnp.int32)
        latest = place >= (prompt.lengths - budget + self.policy.sinks)[:, None, None]
        keep = (prompt.pos < self.policy.sinks) | latest
        keep = jnp.broadcast_to(keep, (self.spec.batch, self.spec.num_kv_heads, prompt.size))
        kept, _ = cache.keep(self.spec, self.capacity, prompt, keep, rotated=self.rotated)
        return StreamingCache(kept, budget), carry

    def read_block(
        self, state: State, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], StreamingCache, Carry]:
        return read_as_prompt(self, state, block, carry, rotated=self.rotated)

    def append(self, state: State, token: Token) -> StreamingCache:
        return dataclasses.replace(state, cache=cache.insert(state.cache, token, rotated=self.rotated)[0])

    def attend(self, state: State, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], StreamingCache, Carry]:
        return self.read(state.cache, token)[0], state, carry

    def read(
        self, kept: LayerCache, token: Token, *, probs: bool = False
    ) -> tuple[Float[Array, "B N H"], Float[Array, "B K C"] | None]:
        """Attention of the newest token, and with `probs` the probability of each slot, see `cache.attend`."""
        ranks = None if self.rotated else self._ranks(kept, token)
        return cache.attend(self.spec, kept, token, ranks=ranks, probs=probs)

    def _ranks(self, kept: LayerCache, token: Token) -> tuple[Int[Array, "B K C"], Int[Array, "B K"]]:
        """Rank in the cache of each slot's token, and of the newest token."""
        evicted = kept.seen[:, None] - kept.count  # tokens missing between sinks and window
        rank = jnp.where(kept.pos < self.policy.sinks, kept.pos, kept.pos - evicted[..., None])
        return jnp.maximum(rank, 0), token.position[:, None] - evicted

    def compress(self, state: State) -> StreamingCache:
        return dataclasses.replace(state, cache=cache.evict(state.cache, *self.evicted(state)))

    def evicted(self, state: StreamingCache) -> tuple[Int[Array, "B K"], Bool[Array, "B K"]]:
        """Slot of the oldest token after the sinks, and whether it must be evicted."""
        kept = state.cache
        window = kept.live & (kept.pos >= self.policy.sinks)
        oldest = jnp.argmin(jnp.where(window, kept.pos, jnp.iinfo(jnp.int32).max), axis=-1)
        return oldest.astype(jnp.int32), kept.count > state.budget[:, None]
