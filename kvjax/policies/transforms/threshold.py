"""`thresholded`: a score threshold. Tokens below it are evicted once they leave the window of latest tokens."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerSpec, PromptKV, Token, TokenBlock
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

    Example:
        >>> policy = kvjax.policies.Thresholded(kvjax.KNorm(budget=64), threshold=-4.0, window=16)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('thresholded(knorm:budget=64; threshold=-4.0; window=16)', 1.0)
    """

    transform: ClassVar[str] = "thresholded"

    threshold: float
    window: int = 128

    def __post_init__(self) -> None:
        if getattr(self.policy, "token_scorer", None) is None:
            raise PolicyError(
                f"thresholded: scores of {self.policy.info.name!r} depend on other tokens, so a threshold has no fixed meaning. Use a "
                "policy that scores each token alone, such as knorm or kvzap."
            )
        check_fields(self, window=0)
        if self.scorer.round_size > 1:
            raise PolicyError(f"thresholded: {self.policy.info.name!r} evicts in rounds. Give it every=1.")

    @property
    def scorer(self) -> ScoreEviction:
        """The policy, as one that scores each token when it comes."""
        scorer: ScoreEviction | None = getattr(self.policy, "token_scorer", None)
        assert scorer is not None
        return scorer

    @property
    def info(self) -> PolicyInfo:
        inner, scorer = super().info, self.scorer.info
        return dataclasses.replace(
            inner,
            summary=f"{inner.summary}, of those that score enough",
            stage=scorer.stage,
            budget_excludes_new_tokens=scorer.budget_excludes_new_tokens,
            heads_coupled=scorer.heads_coupled,
            keeps_by_threshold=True,
        )

    def validate(self, tokens: int) -> None:
        scorer = self.scorer
        first, _ = scorer.always_kept(0)
        others = f", and {first} first ones" if first else ""
        needs = f"but the latest {self.window} tokens are always kept{others}. Raise budget, or lower window."
        super().validate(tokens)
        check_least(self.info.name, scorer.budget, tokens, self.least_slots, needs)

    @property
    def least_slots(self) -> int:
        """Slots that the policy needs at any sequence length."""
        scorer = self.scorer
        return max(scorer.always_kept(0)[0] + self.window, scorer.least_slots)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        inner = self.policy.layer(spec)
        if inner.attention == "dense":
            return inner
        scorer = self.scorer
        least = self.least_slots if isinstance(scorer.budget, float) else 0
        return ThresholdedLayer(scorer, spec, threshold=float(self.threshold), window=self.window, least=least)


@dataclasses.dataclass(frozen=True)
class ThresholdedLayer(ScoreEvictionLayer[ScoreEviction]):
    """One layer of `Thresholded`: a layer of its scorer that also evicts by threshold."""

    threshold: float = dataclasses.field(kw_only=True)
    window: int = dataclasses.field(kw_only=True)
    least: int = dataclasses.field(kw_only=True)

    @property
    def needs_context(self) -> bool:
        return self.policy.needs_inputs

    @property
    def needs_token_inputs(self) -> bool:
        return self.policy.needs_inputs

    @property
    def max_kept(self) -> int:
        return max(super().max_kept, self.least)

    def init(self, total: Int[Array, " B"] | None = None) -> ScoredCache:
        state = super().init(total)
        return dataclasses.replace(state, budget=jnp.maximum(state.budget, self.least))

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[ScoredCache, Carry]:
        return self._scored(prompt, self.policy.prompt_scores(self.spec, prompt, carry)), carry

    def read_block(
        self, state: ScoredCache, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], ScoredCache, Carry]:
        prompt = cache.as_prompt_with_block(state.cache, block)
        before = cache.with_places(state.cache, state.score, block)
        fresh = jnp.arange(prompt.size, dtype=jnp.int32) >= prompt.before
        score = jnp.where(fresh, self.policy.prompt_scores(self.spec, prompt, carry), before)
        out, new = cache.attend_prompt(self.spec, prompt), self._scored(prompt, score)
        return out, cache.where_rows(block.count > 0, new, state), carry

    def best(self, prompt: PromptKV, scores: Float[Array, "B K T"]) -> tuple[Bool[Array, "B K T"], Int[Array, " B"]]:
        budget = jnp.maximum(self.policy.row_budgets(self.spec, prompt.seen, prompt.total), self.least)
        first, _ = self.policy.kept_ends(budget)
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
        first, _ = self.policy.kept_ends(state.budget)
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

    The networks of `kvzap` and `fast_kvzip` predict a token's score from the attention inputs with which it comes, in
    a prompt and while decoding: `thresholded(KVzap(weights=PATH, budget=0.5), threshold=-4)`. This is KVzap as
    published. The budget is then for all tokens, in each head, and `scope` and the policy's window have no effect.

    This resembles kvpress' `DMSPress(decoding=True)`, which masks dropped tokens without freeing their memory. Its
    default, without evictions while decoding, is `prompt_only(thresholded(...))`. No threshold suits all models: look
    at the scores of some texts.

    Args:
        policy: scores each token alone: knorm, random, kvzap, fast_kvzip, or your own (`ScoreEviction.scores_alone`).
            knorm keeps everything in its first layers.
        threshold: minimum score of a token that stays, by the policy's scores: for knorm, -1 times the norm of the key.
        window: latest tokens, always kept.
        budget: replaces the policy's budget if given.

    Raises:
        PolicyError: a number is out of range, or the policy's scores depend on other tokens.

    Example:
        >>> str(kvjax.thresholded(kvjax.KNorm(budget=512), threshold=-12.0))
        'thresholded(knorm:budget=512; threshold=-12.0)'
    """
    return Thresholded(policy if budget is None else policy.with_budget(budget), threshold, window)
