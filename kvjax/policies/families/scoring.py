"""Methods that score tokens: compression of the prompt by a score, and evictions by a score while decoding.

A new scorer is a frozen dataclass with one function, `scores`. A `PromptScorer` compresses the prompt and keeps all new
tokens. A `ScoreEviction` also stays within its budget while decoding.
"""

import dataclasses
from typing import Any, ClassVar, Literal, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Token, TokenBlock
from kvjax.pallas_kernels import attention_mass, exceeds, top_k, window_scores

from ..base import Policy
from ..budget import budget_rows, budget_tokens, check_least
from ..checks import expect_shape
from ..fields import check_fields
from ..layer import CacheLayer, Carry, Reads, State, When, read_as_prompt

P = TypeVar("P", bound="PromptScorer")
E = TypeVar("E", bound="ScoreEviction")


@dataclasses.dataclass(frozen=True)
class PromptScorer(Policy):
    """Keep each head's highest-scoring tokens of the prompt, and all new tokens.

    A prompt within the budget is kept whole. Ties go to the earlier token.

    Class attributes:
        scores_whole_prompts: whether `scores` needs a whole prompt. Chunked prefill is then not supported.
        keeps_highest: whether the policy keeps its highest scores, and `keep_mask` takes others (see `critical`).

    Attributes:
        budget: slots for the prompt: a number of tokens, or a fraction of prompt + new tokens.

    Example:
        >>> class SmallKeys(kvjax.policies.PromptScorer):
        ...     def scores(self, spec, prompt):
        ...         return -jnp.linalg.norm(prompt.k, axis=-1).swapaxes(1, 2)  # [B, K, T]
        >>> state, _ = SmallKeys(budget=3).layer(spec).prefill(prompt, {})
        >>> state.count.tolist()
        [[3]]
    """

    scores_whole_prompts: ClassVar[bool] = False
    keeps_highest: ClassVar[bool] = True

    budget: int | float = 1024

    def __post_init__(self) -> None:
        check_fields(self)

    def scores(self, spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B K T"]:
        """Return the score of each token of a prompt. Scores of padding are ignored."""
        raise NotImplementedError

    @property
    def token_scorer(self) -> "ScoreEviction | None":
        """This policy as one that scores each token alone, when it comes. None if scores depend on other tokens.

        `thresholded` needs it.
        """
        return None

    @property
    def query_window(self) -> int | None:
        """Number of last queries that `scores` needs besides the cached keys and values, 0 if it needs none.

        None if it needs anything else, which is the default. `recompress` then does not support the policy.
        """
        return None

    def always_kept(self, budget: Any) -> tuple[Any, Any]:
        """Number of first and last tokens that are kept whatever their score: whole numbers, or computed from the budget.

        `budget` is a number, or an array with one of each row.
        """
        return budget * 0, budget * 0

    def kept_ends(self, budget: Int[Array, " B"]) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        """`always_kept` of each row, as arrays."""
        first, last = (jnp.broadcast_to(jnp.asarray(end, jnp.int32), budget.shape) for end in self.always_kept(budget))
        return first, last

    def row_budgets(self, spec: LayerSpec, lengths: Int[Array, " B"], total: Int[Array, " B"]) -> Int[Array, " B"]:
        """Budget of each row in this layer, for prompts of `lengths` tokens in sequences of `total` tokens."""
        return budget_rows(self.budget, total, self.least_slots)

    def max_budget(self, spec: LayerSpec) -> int:
        """Maximum budget of a row in this layer."""
        return budget_tokens(self.budget, spec.max_tokens, self.least_slots)

    @property
    def least_slots(self) -> int:
        """Slots that the policy needs at any sequence length. A fraction of a short sequence gives this many."""
        return max(sum(self.always_kept(0)), 1)

    def keep_mask(
        self,
        scores: Float[Array, "B K T"],
        lengths: Int[Array, " B"],
        budget: Int[Array, " B"],
        pos: Int[Array, "B #K T"] | None = None,
    ) -> Bool[Array, "B K T"]:
        """Which tokens are kept: both ends, and the highest scores between them.

        Args:
            scores: score of each token.
            lengths: tokens in each row.
            budget: slots of each row.
            pos: position of each token, unless this is a whole prompt (see `PromptKV`).
        """
        live, ends = self.ends(scores.shape[-1], lengths, budget, pos)
        whole = jnp.sum(live, axis=-1, keepdims=True, dtype=jnp.int32) <= budget[:, None, None]
        between = live & ~ends & ~whole
        best = top_k(jnp.where(between, scores, -jnp.inf), (budget - sum(self.always_kept(budget)))[:, None])
        return best & between | live & (ends | whole)

    def ends(
        self, size: int, lengths: Int[Array, " B"], budget: Int[Array, " B"], pos: Int[Array, "B #K T"] | None = None
    ) -> tuple[Bool[Array, "B #K T"], Bool[Array, "B #K T"]]:
        """Which of `size` places contain a token, and which are among the always kept first and last tokens."""
        first, last = (end[:, None, None] for end in self.kept_ends(budget))
        place, stop = jnp.arange(size, dtype=jnp.int32), lengths[:, None, None]
        pos = jnp.where(place < stop, place, -1) if pos is None else pos
        return pos >= 0, (pos < first) | (place >= stop - last)

    def validate(self, tokens: int) -> None:
        sizes = zip(("first", "last"), self.always_kept(0), strict=True)
        ends = [f"the {end} {f'{count} tokens' if count > 1 else 'token'}" for end, count in sizes if count]
        needs = "but the policy needs at least one. Raise budget."
        if ends:
            needs = f"but the policy always keeps {' and '.join(ends)}. Raise budget, or keep fewer of them."
        check_least(self.info.name, self.budget, tokens, self.least_slots, needs)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return PromptScorerLayer(self, spec)


@dataclasses.dataclass(frozen=True)
class PromptScorerLayer(CacheLayer[P]):
    """One layer of a `PromptScorer`."""

    @property
    def reads(self) -> Reads:
        return "whole" if self.policy.scores_whole_prompts else "blocks"

    @property
    def chooses_evenly(self) -> bool:
        return self.policy.keeps_highest and self.is_plain and self.when == "never"

    @property
    def max_kept(self) -> int:
        return min(self.policy.max_budget(self.spec), self.spec.prompt_len) + self.spec.new_tokens

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[State, Carry]:
        keep, carry = self.chosen(prompt, carry)
        return cache.keep(self.spec, self.capacity, prompt, keep)[0], carry

    def read_block(self, state: State, block: TokenBlock, carry: Carry) -> tuple[Float[Array, "B S N H"], State, Carry]:
        return read_as_prompt(self, state, block, carry)

    def chosen(self, prompt: PromptKV, carry: Carry) -> tuple[Bool[Array, "B K T"], Carry]:
        """Return which tokens of a prompt are kept, and the carry."""
        return self.best(prompt, self.policy.scores(self.spec, prompt))[0], carry

    def best(self, prompt: PromptKV, scores: Float[Array, "B K T"]) -> tuple[Bool[Array, "B K T"], Int[Array, " B"]]:
        """Return which tokens of a prompt are kept by these scores, and the budget of each row."""
        shape = (self.spec.batch, self.spec.num_kv_heads, prompt.size)
        expect_shape(self.policy, "scores", scores, "B K T", shape)
        budget = self.policy.row_budgets(self.spec, prompt.seen, prompt.total)
        expect_shape(self.policy, "row_budgets", budget, "B", shape[:1])
        keep = self.policy.keep_mask(scores, prompt.lengths, budget, *self._places(prompt))
        expect_shape(self.policy, "keep_mask", keep, "B K T", shape)
        return keep, budget

    @staticmethod
    def _places(prompt: PromptKV) -> list[Any]:
        """Positions, if they are not those of a whole prompt. A user's `keep_mask` may have no parameter for them."""
        return [] if prompt.places is None else [prompt.places]


@flax.struct.dataclass
class ScoredCache:
    """A cache whose slots have scores. B rows, K KV heads, C slots.

    Attributes:
        cache: rotated keys, and values.
        score: score of each slot, arbitrary in free slots.
        budget: slots of each row.
    """

    cache: LayerCache
    score: Float[Array, "B K C"]
    budget: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class ScoreEviction(PromptScorer):
    """Keep the highest-scoring tokens of the prompt. While decoding, each new token evicts the lowest-scoring one.

    Ties evict the latest token, as in the prompt. A policy with a field `every` evicts in rounds. A head grows to
    budget + `every` - 1 tokens, and the next token cuts it to the budget.

    Attributes:
        scores_alone: whether a token's score depends on the token and its position alone and never changes. `scores` of
            a prompt and `initial_score` then agree, `update_score` changes nothing, and `thresholded` is supported.
        needs_inputs: whether `prompt_scores` and `initial_score` need the attention inputs of their tokens.
        budget: slots in total: a number of tokens, or a fraction of prompt + new tokens.

    Example:
        >>> layer = kvjax.H2O(budget=4).layer(spec)  # a subclass
        >>> state, _ = layer.prefill(prompt, {})
        >>> isinstance(layer.policy, kvjax.policies.ScoreEviction), layer.view(state).count.tolist()
        (True, [[4]])
    """

    scores_alone: ClassVar[bool] = False
    needs_inputs: ClassVar[bool] = False

    @property
    def token_scorer(self) -> "ScoreEviction | None":
        return self if self.scores_alone else None

    def prompt_scores(self, spec: LayerSpec, prompt: PromptKV, carry: Carry) -> Float[Array, "B K T"]:
        """`scores`, or scores that need the attention inputs in the carry, for `thresholded`."""
        return self.scores(spec, prompt)

    @property
    def round_size(self) -> int:
        """Tokens by which a head exceeds its budget before it is cut: the policy's `every`, or 1 without that field."""
        return getattr(self, "every", 1)

    def initial_score(self, spec: LayerSpec, token: Token) -> Float[Array, "B K"]:
        """Score of a new token."""
        return jnp.zeros(token.k.shape[:2], jnp.float32)

    def update_score(
        self, spec: LayerSpec, score: Float[Array, "B K C"], probs: Float[Array, "B K C"], held: LayerCache
    ) -> Float[Array, "B K C"]:
        """Scores after the newest token's query.

        Args:
            spec: the layer's static shapes and model facts.
            score: scores before. The newest token has its `initial_score`.
            probs: attention probabilities of the query, averaged over the query heads of each KV head.
            held: keys, values and positions of the slots, and the number of tokens seen.
        """
        return score

    def block_scores(self, spec: LayerSpec, prompt: PromptKV, score: Float[Array, "B K T"]) -> Float[Array, "B K T"]:
        """Scores after a block of chunked prefill: kept tokens keep theirs, and the block is scored as in a prompt.

        A policy with `update_score` overrides this function, too. Without it, blocks are prefilled token by token.

        Args:
            spec: the layer's static shapes and model facts.
            prompt: kept tokens, followed by the block.
            score: scores before, 0 for the block's tokens.
        """
        fresh = jnp.arange(prompt.size, dtype=jnp.int32) >= prompt.before
        return jnp.where(fresh, self.scores(spec, prompt), score)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return ScoreEvictionLayer(self, spec)


@dataclasses.dataclass(frozen=True)
class ScoreEvictionLayer(PromptScorerLayer[E]):
    """One layer of a `ScoreEviction`."""

    @property
    def when(self) -> When:
        return "every_step" if self.policy.round_size == 1 else "when_full"

    @property
    def reads(self) -> Reads:
        """By "tokens" if the policy has `update_score` without `block_scores`."""
        cls = type(self.policy)
        follows = cls.update_score is not ScoreEviction.update_score
        return "tokens" if follows and cls.block_scores is ScoreEviction.block_scores else super().reads

    @property
    def compress_reads_kv(self) -> bool:
        """Whether evictions come in rounds, which move the kept tokens to the first slots."""
        return self.policy.round_size > 1

    @property
    def max_kept(self) -> int:
        return self.policy.max_budget(self.spec) + self.policy.round_size - 1

    def best(self, prompt: PromptKV, scores: Float[Array, "B K T"]) -> tuple[Bool[Array, "B K T"], Int[Array, " B"]]:
        keep, budget = super().best(prompt, scores)
        if self.policy.round_size > 1:
            count = jnp.sum(prompt.live, axis=-1, dtype=jnp.int32)
            keep |= prompt.live & (count < (budget + self.policy.round_size)[:, None])[..., None]
        return keep, budget

    def init(self, total: Int[Array, " B"] | None = None) -> ScoredCache:
        empty = cache.empty(self.spec, self.capacity)
        budget = self.policy.row_budgets(self.spec, empty.seen, self.spec.totals(total))
        return ScoredCache(empty, jnp.zeros_like(empty.weight), budget)

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[ScoredCache, Carry]:
        return self._scored(prompt, self.policy.scores(self.spec, prompt)), carry

    def read_block(
        self, state: ScoredCache, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], ScoredCache, Carry]:
        if self.reads == "tokens":
            return CacheLayer.read_block(self, state, block, carry)
        prompt = cache.as_prompt_with_block(state.cache, block)
        score = cache.with_places(state.cache, state.score, block)
        new = self._scored(prompt, self.policy.block_scores(self.spec, prompt, score))
        return cache.attend_prompt(self.spec, prompt), cache.where_rows(block.count > 0, new, state), carry

    def _scored(self, prompt: PromptKV, scores: Float[Array, "B K T"]) -> ScoredCache:
        """Return the state with the tokens of a prompt that are kept by these scores."""
        keep, budget = self.best(prompt, scores)
        kept, index = cache.keep(self.spec, self.capacity, prompt, keep)
        return ScoredCache(kept, jnp.where(kept.live, jnp.take_along_axis(scores, index, axis=-1), 0.0), budget)

    def append(self, state: ScoredCache, token: Token) -> ScoredCache:
        initial = self.policy.initial_score(self.spec, token)
        expect_shape(self.policy, "initial_score", initial, "B K", token.k.shape[:2])
        updated, (score,) = cache.insert(state.cache, token, [(state.score, initial)])
        return dataclasses.replace(state, cache=updated, score=score)

    def attend(
        self, state: ScoredCache, token: Token, carry: Carry
    ) -> tuple[Float[Array, "B N H"], ScoredCache, Carry]:
        out, probs = cache.attend(self.spec, state.cache, token, probs=True)
        assert probs is not None
        score = self.policy.update_score(self.spec, state.score, probs, state.cache)
        expect_shape(self.policy, "update_score", score, "B K C", state.score.shape)
        return out, dataclasses.replace(state, score=score), carry

    def is_due(self, state: ScoredCache) -> Bool[Array, " B"]:
        return jnp.any(state.cache.count >= (state.budget + self.policy.round_size)[:, None], axis=-1)

    def compress(self, state: ScoredCache) -> ScoredCache:
        if self.policy.round_size > 1:
            due = self.is_due(state)
            return jax.lax.cond(jnp.any(due), lambda state: self._cut(state, due), lambda state: state, state)
        kept = state.cache
        first, last = (end[:, None, None] for end in self.policy.kept_ends(state.budget))
        candidates = kept.live & (kept.pos >= first) & (kept.pos < kept.seen[:, None, None] - last)
        over = kept.count > state.budget[:, None]
        return dataclasses.replace(state, cache=cache.evict(kept, lowest(state, candidates), over))

    def _cut(self, state: ScoredCache, due: Bool[Array, " B"]) -> ScoredCache:
        """Return the state, cut to the budget's highest scores in the rows that are due."""
        held = state.cache
        first, last = (end[:, None, None] for end in self.policy.kept_ends(state.budget))
        ends = held.live & ((held.pos < first) | (held.pos >= held.seen[:, None, None] - last))
        rivals = held.live & ~ends
        count = state.budget[:, None] - jnp.sum(ends, axis=-1, dtype=jnp.int32)
        best = rivals & top_k(jnp.where(rivals, state.score, -jnp.inf), count)
        kept, (score,) = cache.keep_slots(held, best | ends | ~due[:, None, None], [state.score])
        return dataclasses.replace(state, cache=kept, score=score)


def lowest(state: ScoredCache, candidates: Bool[Array, "B K C"]) -> Int[Array, "B K"]:
    """Return the candidate slot with the lowest score. Ties go to the latest token."""
    least = jnp.min(jnp.where(candidates, state.score, jnp.inf), axis=-1, keepdims=True)
    equal = candidates & ~exceeds(state.score, least)
    return jnp.argmax(jnp.where(equal, state.cache.pos, -1), axis=-1).astype(jnp.int32)


def pool(scores: Float[Array, "B K T"], width: int, kind: Literal["avg", "max"]) -> Float[Array, "B K T"]:
    """Average or maximum over `width` neighbouring tokens. Beyond the ends are zeros, which count in the average."""
    window, zero = ((1, 1, width), (1, 1, 1), "SAME"), np.zeros((), scores.dtype)
    if kind == "avg":
        return jax.lax.reduce_window(scores, zero, jax.lax.add, *window) / width
    return jax.lax.reduce_window(scores, zero, jax.lax.max, *window)


def all_queries(prompt: PromptKV, spec: LayerSpec) -> Float[Array, "B K T"]:
    """Attention that each token of a prompt gets from all queries: summed over queries, averaged over each query group.

    Args:
        prompt: the prompt. With kept tokens and a block, the queries are the block's.
        spec: the layer's static shapes and model facts.

    Example:
        >>> scores = kvjax.policies.all_queries(prompt, spec)
        >>> scores.shape, round(scores.sum().item(), 3)  # rows, KV heads, tokens; each of six queries gives 1
        ((1, 1, 6), 6.0)
    """
    return attention_mass(
        prompt.q_rotated,
        prompt.k_rotated,
        prompt.lengths,
        scale=spec.scale,
        sliding_window=spec.window,
        pos=prompt.places,
        sinks=prompt.sinks,
    )


def last_queries(prompt: PromptKV, window: int, spec: LayerSpec, **options: Any) -> Float[Array, "B K M"]:
    """Mean attention that each token of a prompt gets from its last `window` queries.

    Args:
        prompt: the prompt.
        window: number of queries.
        spec: the layer's static shapes and model facts.
        options: as for `kvjax.pallas_kernels.window_scores`.

    Example:
        >>> scores = kvjax.policies.last_queries(prompt, 2, spec)
        >>> scores.shape, round(scores.sum().item(), 3)  # rows, KV heads, tokens
        ((1, 1, 6), 1.0)
    """
    return window_scores(
        prompt.q_rotated,
        prompt.k_rotated,
        prompt.lengths,
        window=window,
        scale=spec.scale,
        sliding_window=spec.window,
        pos=prompt.places,
        sinks=prompt.sinks,
        **options,
    )
