"""`thresholded`: a score threshold. Tokens below it are evicted once they leave the window of latest tokens."""

import dataclasses
from typing import Any, ClassVar, cast

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerSpec, PromptKV, Token
from kvjax.pallas_kernels import top_k

from ..base import Policy
from ..budget import check_least
from ..families.scoring import ScoredCache, ScoreEviction, ScoreEvictionLayer, lowest
from ..fields import check_fields
from ..info import PolicyError, PolicyInfo
from ..layer import CacheLayer, Carry
from .wrapper import Wrapper


@dataclasses.dataclass(frozen=True)
class Thresholded(Wrapper):
    """A scorer of single tokens that evicts scores below a threshold, made by `thresholded`.

    Attributes:
        policy: scores the tokens.
        threshold: minimum score of a token that stays.
        window: latest tokens, always kept.
    """

    transform: ClassVar[str] = "thresholded"

    threshold: float
    window: int = 128

    def __post_init__(self) -> None:
        if not getattr(self.policy, "scores_alone", False):
            raise PolicyError(
                f"thresholded: scores of {self.policy.info.name!r} depend on other tokens, so a threshold has no fixed meaning. Use a "
                "policy that scores each token alone, such as knorm."
            )
        check_fields(self, window=0)
        if cast(ScoreEviction, self.policy).round_size > 1:
            raise PolicyError(f"thresholded: {self.policy.info.name!r} evicts in rounds. Give it every=1.")

    @property
    def info(self) -> PolicyInfo:
        inner = super().info
        return dataclasses.replace(inner, summary=f"{inner.summary}, of those that score enough")

    def validate(self, tokens: int) -> None:
        scorer = cast(ScoreEviction, self.policy)
        first, _ = scorer.always_kept(0)
        others = f", and {first} first ones" if first else ""
        needs = f"but the latest {self.window} tokens are always kept{others}. Raise budget, or lower window."
        super().validate(tokens)
        check_least(self.info.name, scorer.budget, tokens, self.least_slots, needs)

    @property
    def least_slots(self) -> int:
        """Slots that the policy needs at any sequence length."""
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
    """One layer of `Thresholded`: a layer of its scorer that also evicts by threshold."""

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
        low = old & ~(state.score >= self.threshold)  # at most one token, which has just left the window
        drop = jnp.any(low, axis=-1)
        over = held.count > state.budget[:, None]
        slot = jnp.where(drop, jnp.argmax(low, axis=-1).astype(jnp.int32), lowest(state, old))
        return dataclasses.replace(state, cache=cache.seek_free(cache.evict(held, slot, drop | over)))

    def _old(self, pos: Int[Array, "B #K T"], seen: Int[Array, " B"], first: Int[Array, " B"]) -> Bool[Array, "B #K T"]:
        """Tokens that are neither among the always kept first tokens nor among the latest."""
        return (pos >= first[:, None, None]) & (pos < seen[:, None, None] - self.window)


def thresholded(
    policy: Policy, threshold: int | float, window: int = 128, budget: int | float | None = None
) -> Thresholded:
    """Keep tokens whose score reaches a threshold: `thresholded(KNorm(budget=1024), threshold=-12)`.

    A token is scored once, when it comes. When it leaves the latest `window` tokens, it is evicted from every head in
    which its score is below the threshold. For a prompt, this happens after prefill. The text therefore determines how
    much each head keeps, within the policy's budget. If more tokens would stay, the lowest scores are evicted. Slots
    are allocated for the budget. A fraction of 1.0 has room for everything.

    This resembles kvpress' `DMSPress(decoding=True)`, which masks dropped tokens without freeing their memory. Its
    default, without evictions while decoding, is `prompt_only(thresholded(...))`. No threshold suits all models: look
    at the scores of some texts.

    Args:
        policy: scores each token alone (`ScoreEviction.scores_alone`): knorm, random, or your own. knorm keeps
            everything in its first layers.
        threshold: minimum score of a token that stays, by the policy's scores: for knorm, -1 times the norm of the key.
        window: latest tokens, always kept.
        budget: replaces the policy's budget if given.

    Raises:
        PolicyError: a number is out of range, or the policy's scores depend on other tokens.
    """
    return Thresholded(policy if budget is None else policy.with_budget(budget), threshold, window)
