"""`chunkkv`: any method that scores a prompt, with its tokens kept in chunks."""

import dataclasses
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import LayerSpec, PromptKV, layer_specs
from kvjax.config import ModelConfig
from kvjax.pallas_kernels import exceeds, top_k

from ..base import Policy
from ..chunk_eviction import chunk_count
from ..families.scoring import PromptScorer, PromptScorerLayer, ScoreEvictionLayer
from ..fields import check_fields
from ..info import PolicyError, PolicyInfo
from ..layer import CacheLayer, Carry, Reads
from .wrapper import Wrapper

EPSILON = 1e-8
"""Added to sums and to probabilities in entropies, as in kvpress."""


@dataclasses.dataclass(frozen=True)
class Chunks(Wrapper):
    """A prompt scorer whose tokens are kept in chunks, made by `chunkkv`.

    Attributes:
        policy: scores the prompt, and has the budget.
        chunk: tokens in a chunk.
        spiky: tokens kept of an important chunk whose score is concentrated in few tokens. None keeps whole chunks.

    Example:
        >>> policy = kvjax.policies.Chunks(kvjax.SnapKV(budget=64), chunk=16)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('chunkkv(snapkv:budget=64; chunk=16)', 0.57)
    """

    transform: ClassVar[str] = "chunkkv"

    chunk: int = 20
    spiky: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, chunk=1, spiky=1)
        if self.spiky is not None and self.spiky >= self.chunk:
            raise PolicyError(
                f"{self.info.name}: spiky={self.spiky} is not below chunk={self.chunk}. Lower spiky, or leave it out."
            )

    @property
    def info(self) -> PolicyInfo:
        return dataclasses.replace(
            super().info, stage="prompt", budget_excludes_new_tokens=True, heads_coupled=True, memory="freed"
        )

    @property
    def window(self) -> int:
        """Tokens of a budget that every layer has in addition, for `pyramid`."""
        return getattr(self.policy, "window", 0)

    def bind(self, config: ModelConfig) -> Policy:
        bound = super().bind(config)
        for spec in layer_specs(config, 1, 64, 64, jnp.float32):
            bound.layer(spec)  # raises if the policy is not supported
        return bound

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        inner = self.policy.layer(spec)
        scores = getattr(self.policy, "keeps_highest", False)
        if scores and inner.attention == "dense":
            return inner
        if not scores:
            raise PolicyError(
                f"{self.info.name}: {self.policy.info.name!r} does not keep each head's highest scores of the prompt. Use a policy that "
                "does, such as expected_attention, snapkv, keydiff or tova."
            )
        return ChunksLayer(cast(PromptScorer, self.policy), spec, inner=inner, chunk=self.chunk, spiky=self.spiky)


@dataclasses.dataclass(frozen=True)
class ChunksLayer(PromptScorerLayer[PromptScorer]):
    """One layer of `Chunks`.

    Attributes:
        inner: the scorer's own layer.
        chunk, spiky: see `Chunks`.
    """

    inner: CacheLayer[Any] = dataclasses.field(kw_only=True)
    chunk: int = dataclasses.field(kw_only=True)
    spiky: int | None = dataclasses.field(kw_only=True)

    @property
    def reads(self) -> Reads:
        """Whole prompts if the budget is a number of chunks, or if the scorer's own chunked prefill keeps statistics."""
        plain = type(self.inner).read_block in (PromptScorerLayer.read_block, ScoreEvictionLayer.read_block)
        return super().reads if self.spiky is not None and plain else "whole"

    @property
    def max_kept(self) -> int:
        extra = self.chunk if self.spiky is None else 0  # the number of whole chunks is rounded, and at least one
        most = max(self.policy.max_budget(self.spec), self.policy.least_slots) + extra
        return min(most, self.spec.prompt_len) + self.spec.new_tokens

    def chosen(self, prompt: PromptKV, carry: Carry) -> tuple[Bool[Array, "B K T"], Carry]:
        policy, lengths = self.policy, prompt.lengths
        scores = jax.lax.stop_gradient(policy.scores(self.spec, prompt))
        budget = policy.row_budgets(self.spec, prompt.seen, prompt.total)
        live, ends = policy.ends(prompt.size, lengths, budget, prompt.places)
        live, ends = live[:, 0], ends[:, 0]  # all heads keep the same tokens
        total = self._total(scores, live, ends)
        if self.spiky is None:
            keep = self._whole_chunks(total, live, lengths, budget)[:, None]
            own = policy.keep_mask(scores, lengths, budget)  # of prompts shorter than a chunk
            keep = jnp.where((lengths < self.chunk)[:, None, None], own, keep)
        else:
            places = jnp.arange(prompt.size, dtype=jnp.int32) if prompt.places is None else prompt.places[:, 0]
            keep = self._gated(total, live, places, budget)[:, None]
        whole = jnp.sum(live, axis=-1, dtype=jnp.int32) <= budget
        return jnp.broadcast_to(keep | whole[:, None, None] & live[:, None], scores.shape), carry

    def _total(
        self, scores: Float[Array, "B K T"], live: Bool[Array, "B T"], ends: Bool[Array, "B T"]
    ) -> Float[Array, "B T"]:
        """Scores summed over heads. Tokens that the scorer always keeps get one more than the highest score."""
        rivals = (live & ~ends)[:, None]
        top = jnp.max(jnp.where(rivals, scores, -jnp.inf), axis=(1, 2))[:, None]
        top = jnp.where(top > -jnp.inf, top, 0.0)
        total = jnp.sum(jnp.where(rivals, scores, 0.0), axis=1)
        return jnp.where(live & ends, scores.shape[1] * (top + 1), total)

    def _whole_chunks(
        self, total: Float[Array, "B T"], live: Bool[Array, "B T"], lengths: Int[Array, " B"], budget: Int[Array, " B"]
    ) -> Bool[Array, "B T"]:
        """The chunks with the highest mean scores."""
        grid = _Grid.of_prompt(total.shape[-1], self.chunk)
        inside = grid.cut(live, False)
        means, _ = _means(grid.cut(total, 0.0), inside)
        chosen = top_k(means, chunk_count(lengths, budget, self.chunk))
        return grid.joined(chosen[..., None] & inside)

    def _gated(
        self,
        total: Float[Array, "B T"],
        live: Bool[Array, "B T"],
        places: Int[Array, "*B T"],
        budget: Int[Array, " B"],
    ) -> Bool[Array, "B T"]:
        """Chunks by falling mean score until the budget is used, spiky ones in part, then the best of the other tokens."""
        assert self.spiky is not None
        grid = _Grid.of_prompt(total.shape[-1], self.chunk) if places.ndim == 1 else _Grid.of_places(places, self.chunk)
        inside, scores = grid.cut(live, False), grid.cut(total, 0.0)
        means, sizes = _means(scores, inside)
        entropy = _entropy(scores, inside, sizes)
        high = ~exceeds(_median(means, sizes > 0), means)
        low = exceeds(_median(entropy, sizes > 0), entropy)
        takes = jnp.where(high & low, jnp.minimum(sizes, self.spiky), sizes)
        count = _in_turn(means, takes, budget)
        best = top_k(jnp.where(inside, scores, -jnp.inf), count) & inside
        keep = grid.joined(best)
        others = live & ~keep
        rest = budget - jnp.sum(keep, axis=-1, dtype=jnp.int32)
        return keep | others & top_k(jnp.where(others, total, -jnp.inf), rest)


@dataclasses.dataclass(frozen=True)
class _Grid:
    """The tokens of rows in their chunks: [B, T] as [B, M, C]. M chunks of C tokens.

    Attributes:
        size: T.
        chunk: C.
        places: chunk and place within it of each token, [B, T] each. None for a whole prompt.
    """

    size: int
    chunk: int
    places: tuple[Int[Array, "B T"], Int[Array, "B T"]] | None = None

    @classmethod
    def of_prompt(cls, size: int, chunk: int) -> "_Grid":
        """Grid of a whole prompt."""
        return cls(size, chunk)

    @classmethod
    def of_places(cls, pos: Int[Array, "B T"], chunk: int) -> "_Grid":
        """Grid of the chunks of a text that some tokens are in, in order. Tokens without a position are outside."""
        own = jnp.where(pos >= 0, pos // chunk, -1)
        first = (own >= 0) & (own != jnp.pad(own, [(0, 0), (1, 0)], constant_values=-1)[:, :-1])
        order = jnp.where(own >= 0, jnp.cumsum(first, axis=-1, dtype=jnp.int32) - 1, pos.shape[-1])
        return cls(pos.shape[-1], chunk, (order, jnp.where(own >= 0, pos % chunk, 0)))

    def cut(self, x: Any, fill: Any) -> Any:
        """[B, T] as [B, M, C], with `fill` in places without a token."""
        if self.places is None:
            padded = jnp.pad(x, [(0, 0), (0, -self.size % self.chunk)], constant_values=fill)
            return padded.reshape(x.shape[0], -1, self.chunk)
        rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
        grid = jnp.full((x.shape[0], self.size, self.chunk), fill, x.dtype)
        return grid.at[rows, *self.places].set(x, mode="drop")

    def joined(self, x: Bool[Array, "B M C"]) -> Bool[Array, "B T"]:
        """The reverse of `cut`."""
        if self.places is None:
            return x.reshape(x.shape[0], -1)[:, : self.size]
        rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
        return x.at[rows, *self.places].get(mode="fill", fill_value=False)


def _means(
    scores: Float[Array, "B M C"], inside: Bool[Array, "B M C"]
) -> tuple[Float[Array, "B M"], Int[Array, "B M"]]:
    """Mean score of each chunk, -inf for chunks without a token, and their numbers of tokens."""
    sizes = jnp.sum(inside, axis=-1, dtype=jnp.int32)
    sums = jnp.sum(jnp.where(inside, scores, 0.0), axis=-1)
    return jnp.where(sizes > 0, sums / jnp.maximum(sizes, 1).astype(jnp.float32), -jnp.inf), sizes


def _entropy(
    scores: Float[Array, "B M C"], inside: Bool[Array, "B M C"], sizes: Int[Array, "B M"]
) -> Float[Array, "B M"]:
    """Entropy of the scores within each chunk, between 0 (one token has all) and 1 (all tokens have the same)."""
    least = jnp.minimum(jnp.min(jnp.where(inside, scores, 0.0), axis=-1, keepdims=True), 0.0)
    raised = jnp.where(inside, scores - least, 0.0)
    shares = raised / (jnp.sum(raised, axis=-1, keepdims=True) + EPSILON)
    found = -jnp.sum(shares * jnp.log(shares + EPSILON), axis=-1)
    most = jnp.log(jnp.maximum(sizes, 2).astype(jnp.float32))
    return jnp.where(sizes > 1, jnp.clip(found / most, 0.0, 1.0), 0.0)


def _median(x: Float[Array, "B M"], there: Bool[Array, "B M"]) -> Float[Array, "B 1"]:
    """Median of the entries that are there, the lower of the two middle ones if their number is even."""
    ordered = jnp.sort(jnp.where(there, x, jnp.inf), axis=-1)
    middle = (jnp.sum(there, axis=-1, keepdims=True, dtype=jnp.int32) - 1) // 2
    return jnp.take_along_axis(ordered, jnp.maximum(middle, 0), axis=-1)


def _in_turn(means: Float[Array, "B M"], takes: Int[Array, "B M"], budget: Int[Array, " B"]) -> Int[Array, "B M"]:
    """How many tokens each chunk gets if chunks take theirs by falling score until the budget is used.

    Chunks whose scores differ from that of the last chunk by rounding alone take theirs in the order of the text.
    """

    def ranked(means: Float[Array, "B M"]) -> tuple[Int[Array, "B M"], Int[Array, "B M"], Int[Array, "B M"]]:
        order = jnp.argsort(-means, axis=-1, stable=True).astype(jnp.int32)
        sizes = jnp.take_along_axis(takes, order, axis=-1)
        return order, sizes, jnp.cumsum(sizes, axis=-1, dtype=jnp.int32)

    order, _, ends = ranked(means)
    enough = jnp.minimum(budget[:, None], ends[:, -1:])
    last = jnp.take_along_axis(order, jnp.argmax(ends >= enough, axis=-1, keepdims=True), axis=-1)
    last = jnp.take_along_axis(means, last, axis=-1)
    order, sizes, ends = ranked(jnp.where(~exceeds(means, last) & ~exceeds(last, means), last, means))
    gets = jnp.clip(budget[:, None] - (ends - sizes), 0, sizes)
    return jnp.take_along_axis(gets, jnp.argsort(order, axis=-1), axis=-1)


def chunkkv(policy: Policy, chunk: int = 20, spiky: int | None = None) -> Chunks:
    """Keep whole chunks of a prompt, by any policy's scores: `chunkkv(ExpectedAttention(budget=512), chunk=20)`.

    A chunk's score is the mean of its tokens' scores, summed over the layer's heads, which all keep the same chunks.
    Tokens that the policy always keeps, such as the window of `snapkv`, score one more than all others. Only the prompt
    is compressed, by policies that evict while decoding as well. Memory is that of the policy plus at most a chunk per
    head.

    Without `spiky`, the number of chunks is the budget's share of all chunks, rounded down and at least one. This equals
    kvpress 0.5.5's `ChunkKVPress`, and may exceed the budget by less than a chunk. A prompt shorter than a chunk is
    kept token by token. Chunked prefill is not supported.

    With `spiky`, exactly the budget is kept, as by kvpress 0.5.5's `EntropyGatedChunkKVPress` (`chunk=10, spiky=4`).
    Chunks are taken by falling score. The entropy of the scores within a chunk says whether they are spread over it. A
    chunk with at least the median score and less than the median entropy keeps only its `spiky` best tokens. The last
    chunk keeps as many as fit. What is then left of the budget goes to the best of the other tokens.

    Args:
        policy: keeps each head's highest scores of the prompt: expected_attention, snapkv, pyramidkv, compactor,
            keydiff, knorm, tova, h2o, random, or your own. Chunked prefill of expected_attention and compactor is not
            supported.
        chunk, spiky: see above.

    Raises:
        PolicyError: a number is out of range, or (once a model is known) the policy is not supported.

    Example:
        >>> str(kvjax.chunkkv(kvjax.ExpectedAttention(budget=512)))
        'chunkkv(expected_attention:budget=512)'
    """
    return Chunks(policy, chunk, spiky)
