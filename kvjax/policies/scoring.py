"""What policies that score tokens share: a prompt compressed once by a score, and evictions by score while decoding.

A new scorer is a frozen dataclass with one function, `scores`. As a `ScoredPrompt` it compresses the prompt and keeps all new
tokens; as an `Evicting` policy it stays within its budget while decoding, too.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerSpec, Slots
from kvjax.pallas_kernels import exceeds, top_k, window_scores

from .base import Carry, Memory, Policy, PolicyError, Stage, State, budget_rows, budget_tokens, check_fields, rotated

BLOCK = 64
"""Queries that `attention_mass` takes at a time: 64 × T probabilities a head exist at once."""


@dataclasses.dataclass(frozen=True)
class ScoredPrompt(Policy):
    """Keep the tokens of a prompt that score highest, each head its own, and all new ones.

    A prompt within the budget is kept whole. Of equal scores the earlier token wins.

    Attributes:
        budget: slots for the prompt: a number of tokens, or a fraction of prompt + new tokens.
    """

    memory: ClassVar[Memory] = "freed"
    stage: ClassVar[Stage] = "prompt"
    grows: ClassVar[bool] = True

    budget: int | float = 1024

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.budget, int):
            self.check(0)

    def scores(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
    ) -> Float[Array, "B K T"]:
        """How much each token of a right-padded prompt is worth keeping; what is said of the padding does not matter.

        Args:
            q, k, v: unrotated queries and keys, and values.
            lengths: tokens in each row.
        """
        raise NotImplementedError

    def ends(self, budget: Any) -> tuple[Any, Any]:
        """How many tokens at the beginning and at the end are kept whatever their score, by a budget or an array of them."""
        return budget * 0, budget * 0

    def rows(self, spec: LayerSpec, lengths: Int[Array, " B"]) -> Int[Array, " B"]:
        """Budget of each row in this layer, for prompts of these lengths."""
        return budget_rows(self.budget, lengths + spec.new_tokens)

    def most(self, spec: LayerSpec) -> int:
        """The largest budget that a row can have in this layer."""
        return budget_tokens(self.budget, spec.max_tokens)

    def choose(
        self, scores: Float[Array, "B K T"], lengths: Int[Array, " B"], budget: Int[Array, " B"]
    ) -> Bool[Array, "B K T"]:
        """Which tokens are kept: both ends, and what scores highest between them."""
        candidates, kept = self.regions(scores.shape[-1], lengths, budget)
        best = top_k(jnp.where(candidates[:, None], scores, -jnp.inf), (budget - sum(self.ends(budget)))[:, None])
        return best & candidates[:, None] | kept[:, None]

    def regions(
        self, size: int, lengths: Int[Array, " B"], budget: Int[Array, " B"]
    ) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
        """Which of `size` places of a prompt compete by score, and which are kept in any case."""
        first, last = (end[:, None] for end in self.ends(budget))
        pos, inside = jnp.arange(size, dtype=jnp.int32), cache.in_prompt(lengths, size)
        whole = (lengths <= budget)[:, None]
        kept = inside & (whole | (pos < first) | (pos >= lengths[:, None] - last))
        return inside & ~kept, kept

    def check(self, tokens: int) -> None:
        budget = budget_tokens(self.budget, tokens)
        first, last = self.ends(budget)
        if budget < max(first + last, 1):
            raise PolicyError(
                f"{self.name}: a budget of {self.budget} gives {budget} slots, but {first} first and {last} last tokens are "
                f"always kept, at least one in all; raise budget, or keep fewer of them"
            )

    def capacity(self, spec: LayerSpec) -> int:
        return cache.round_slots(min(self.most(spec), spec.prompt_len) + spec.new_tokens)

    def prefill(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
        carry: Carry,
    ) -> tuple[State, Carry]:
        keep = self.choose(self.scores(spec, q, k, v, lengths), lengths, self.rows(spec, lengths))
        return cache.select(spec, self.capacity(spec), rotated(spec, k), v, keep, lengths)[0], carry


@flax.struct.dataclass
class Ranked:
    """A cache whose slots have scores. B rows, K KV heads, C slots.

    Attributes:
        slots: rotated keys, and values.
        score: what each slot is worth; of free ones it does not matter.
        budget: slots of each row.
    """

    slots: Slots
    score: Float[Array, "B K C"]
    budget: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class Evicting(ScoredPrompt):
    """Keep the tokens that score highest: the prompt's, and while decoding, where each new token pushes out the lowest.

    Of equal scores the latest token goes, as in the prompt.

    Attributes:
        budget: slots in all: a number of tokens, or a fraction of prompt + new tokens.
    """

    stage: ClassVar[Stage] = "both"
    grows: ClassVar[bool] = False

    def arrival(self, spec: LayerSpec, k: Float[Array, "B K H"], pos: Int[Array, " B"]) -> Float[Array, "B K"]:
        """Score of a new token, given its unrotated key."""
        return jnp.zeros(k.shape[:2], jnp.float32)

    def attended(self, score: Float[Array, "B K C"], probs: Float[Array, "B K C"]) -> Float[Array, "B K C"]:
        """Scores after a query has given the slots these probabilities."""
        return score

    def capacity(self, spec: LayerSpec) -> int:
        return cache.round_slots(min(self.most(spec), spec.max_tokens) + 1)

    def init(self, spec: LayerSpec) -> Ranked:
        slots = cache.empty(spec, self.capacity(spec))
        return Ranked(slots, jnp.zeros_like(slots.weight), self.rows(spec, slots.seen))

    def prefill(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
        carry: Carry,
    ) -> tuple[Ranked, Carry]:
        scores, budget = self.scores(spec, q, k, v, lengths), self.rows(spec, lengths)
        keep = self.choose(scores, lengths, budget)
        slots, index = cache.select(spec, self.capacity(spec), rotated(spec, k), v, keep, lengths)
        score = jnp.where(slots.live, jnp.take_along_axis(scores, index, axis=-1), 0.0)
        return Ranked(slots, score, budget), carry

    def append(
        self, spec: LayerSpec, state: Ranked, k: Float[Array, "B K H"], v: Float[Array, "B K H"], pos: Int[Array, " B"]
    ) -> Ranked:
        beside = [(state.score, self.arrival(spec, k, pos))]
        slots, (score,) = cache.insert_with(state.slots, k, v, pos, beside, rope=spec.rope)
        return dataclasses.replace(state, slots=slots, score=score)

    def attend(
        self, spec: LayerSpec, state: Ranked, q: Float[Array, "B N H"], pos: Int[Array, " B"], carry: Carry
    ) -> tuple[Float[Array, "B N H"], Ranked, Carry]:
        out, probs = cache.attend(spec, state.slots, cache.turned(spec.rope, q, pos), pos, probs=True)
        assert probs is not None
        return out, dataclasses.replace(state, score=self.attended(state.score, probs)), carry

    def compress(self, spec: LayerSpec, state: Ranked) -> Ranked:
        slots = state.slots
        first, last = (end[:, None, None] for end in self.ends(state.budget))
        candidates = slots.live & (slots.pos >= first) & (slots.pos < slots.seen[:, None, None] - last)
        lowest = jnp.min(jnp.where(candidates, state.score, jnp.inf), axis=-1, keepdims=True)
        latest = jnp.argmax(jnp.where(candidates & ~exceeds(state.score, lowest), slots.pos, -1), axis=-1)
        over = slots.count > state.budget[:, None]
        return dataclasses.replace(state, slots=cache.evict(slots, latest.astype(jnp.int32), over))


def pool(scores: Float[Array, "B K T"], width: int, kind: Literal["avg", "max"]) -> Float[Array, "B K T"]:
    """Average or maximum over `width` neighbouring tokens; beyond the ends there are zeros, which count in the average."""
    window = (1, 1, width), (1, 1, 1), "SAME"
    if kind == "avg":
        return jax.lax.reduce_window(scores, 0.0, jax.lax.add, *window) / width
    return jax.lax.reduce_window(scores, 0.0, jax.lax.max, *window)


def attention_mass(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Float[Array, "B K T"]:
    """Attention that each token of a prompt gets from all queries together, averaged over the query group.

    Causal softmax probabilities, summed. `BLOCK` queries are taken at a time, counted from each row's end, so that nothing of
    size T × T exists.

    Args:
        q, k: rotated queries and keys of a right-padded prompt.
        lengths: tokens in each row.
        scale: factor on the logits.
        sliding_window: attention window of the layer in tokens, if it has one.
    """

    def add(i: Int[Array, ""], mass: Float[Array, "B K T"]) -> Float[Array, "B K T"]:
        end = jnp.maximum(lengths - i * BLOCK, 0)
        mean = window_scores(q, k, end, window=BLOCK, scale=scale, sliding_window=sliding_window)
        return mass + mean * jnp.minimum(end, BLOCK).astype(jnp.float32)[:, None, None]

    batch, length, kv_heads, _ = k.shape
    start = jnp.zeros((batch, kv_heads, length), jnp.float32)
    return jax.lax.fori_loop(0, -(-length // BLOCK), add, start)
