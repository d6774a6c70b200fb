"""A threshold in place of a number of tokens: what scores too little goes for good once it is no longer among the latest."""

import dataclasses
from typing import Any, ClassVar, cast

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerSpec, PromptKV, Token
from kvjax.pallas_kernels import top_k

from ..base import CacheLayer, Carry, Policy
from ..budget import check_least
from ..families.scoring import ScoredCache, ScoreEviction, ScoreEvictionLayer, lowest
from ..fields import check_fields
from ..info import PolicyError, PolicyInfo
from .wrapper import Wrapper


@dataclasses.dataclass(frozen=True)
class Thresholded(Wrapper):
    """A scorer of single tokens that drops what scores below a threshold; made by `thresholded`.

    Attributes:
        policy: what a token scores.
        threshold: the least score with which a token stays.
        window: latest tokens, which stay in any case.
    """

    transform: ClassVar[str] = "thresholded"

    threshold: int | float
    window: int = 128

    def __post_init__(self) -> None:
        if not getattr(self.policy, "scores_alone", False):
            raise PolicyError(
                f"thresholded: {self.policy.info.name!r} scores a token by what is around it, so no threshold serves for all texts; give a "
                "policy that scores each token alone, such as knorm"
            )
        check_fields(self, window=0)
        if cast(ScoreEviction, self.policy).round_size > 1:
            raise PolicyError(f"thresholded: {self.policy.info.name!r} evicts in rounds; give it every=1")

    @property
    def info(self) -> PolicyInfo:
        inner = super().info
        return dataclasses.replace(inner, summary=f"{inner.summary}, of those that score enough")

    def validate(self, tokens: int) -> None:
        scorer = cast(ScoreEviction, self.policy)
        first, _ = scorer.always_kept(0)
        others = f", and {first} first ones" if first else ""
        needs = f"but the latest {self.window} tokens are always kept{others}; raise budget, or lower window"
        super().validate(tokens)
        check_least(self.info.name, scorer.budget, tokens, self.least_slots, needs)

    @property
    def least_slots(self) -> int:
        """Slots that it needs whatever a sequence's length."""
        scorer = cast(ScoreEviction, self.policy)
        return max(scorer.always_kept(0)[0] + self.window, scorer.least_slots)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        inner = self.policy.layer(spec)
        if inner.attention == "dense":
            return inner
        scorer = cast(ScoreEviction, self.policy)
        least = self.least_slots if isinstance(scorer.budget, float) else 0
        return ThresholdedLayer(scorer, spec, threshold=float(self.threshold), window=self.window, least=least)


@dataclasses.dataclass(frozen=True)
class ThresholdedLayer(ScoreEvictionLayer[ScoreEviction]):
    """One layer of `Thresholded`: a layer of its scorer that evicts sooner."""

    threshold: float = dataclasses.field(kw_only=True)
    window: int = dataclasses.field(kw_only=True)
    least: int = dataclasses.field(kw_only=True)

    @property
    def max_kept(self) -> int:
        return max(super().max_kept, self.least)

    def init(self, total: Int[Array, " B"] | None = None) -> ScoredCache:
        state = super().init(total)
        return dataclasses.replace(state, budget=jnp.maximum(state.budget, self.least))

    def best(self, prompt: PromptKV, scores: Float[Array, "B K T"]) -> tuple[Bool[Array, "B K T"], Int[Array, " B"]]:
        budget = jnp.maximum(self.policy.row_budgets(self.spec, prompt.seen, prompt.total), self.least)
        first, _ = self.policy.always_kept(budget)
        live = jnp.broadcast_to(prompt.live, scores.shape)
        old = self._old(prompt.pos, prompt.seen, first)
        ends, between = live & ~old, live & old & (scores >= self.threshold)
        best = top_k(jnp.where(between, scores, -jnp.inf), (budget - first - self.window)[:, None])
        return ends | best & between, budget

    def attend(
        self, state: ScoredCache, token: Token, carry: Carry
    ) -> tuple[Float[Array, "B N H"], ScoredCache, Carry]:
        return cache.attend(self.spec, state.cache, token)[0], state, carry

    def compress(self, state: ScoredCache) -> ScoredCache:
        held = state.cache
        first, _ = self.policy.always_kept(state.budget)
        old = held.live & self._old(held.pos, held.seen, first)
        low = old & ~(state.score >= self.threshold)  # of one token at most: the one that has just left the window
        drop = jnp.any(low, axis=-1)
        over = held.count > state.budget[:, None]
        slot = jnp.where(drop, jnp.argmax(low, axis=-1).astype(jnp.int32), lowest(state, old))
        return dataclasses.replace(state, cache=cache.seek_free(cache.evict(held, slot, drop | over)))

    def _old(self, pos: Int[Array, "B #K T"], seen: Int[Array, " B"], first: Int[Array, " B"]) -> Bool[Array, "B #K T"]:
        """Which tokens are neither among the first that always stay, nor among the latest."""
        return (pos >= first[:, None, None]) & (pos < seen[:, None, None] - self.window)


def thresholded(
    policy: Policy, threshold: int | float, window: int = 128, budget: int | float | None = None
) -> Thresholded:
    """Keep what scores at least so much: `thresholded(KNorm(budget=1024), threshold=-12)`.

    A token is scored once, when it comes. As soon as it is not among the latest `window` tokens any more, it goes for good from every head
    in which it scores below the threshold; of a prompt, once that is read. So each head holds as much as its texts need, within the
    policy's budget: where more would stay, what scores lowest goes. Slots are there for the budget, of which a fraction of 1.0 is
    room for everything.

    As kvpress's `DMSPress(decoding=True)`, which masks what it drops and holds it all; its default, that nothing more goes while
    decoding, is `prompt_only(thresholded(...))`. There is no threshold for all models: look at the scores of some texts.

    Args:
        policy: scores each token alone (`ScoreEviction.scores_alone`): knorm, random, or one of your own. In the first layers, knorm
            keeps everything.
        threshold: the least score with which a token stays, by the policy's scores: of knorm, norms of keys times -1.
        window: latest tokens that stay in any case.
        budget: the policy's budget, if it is to be another.

    Raises:
        PolicyError: a number is out of range, or the policy scores tokens by what is around them.
    """
    return Thresholded(policy if budget is None else policy.with_budget(budget), threshold, window)
