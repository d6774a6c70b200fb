"""ChunkKV: a prompt is kept in whole chunks of neighbouring tokens, so that the kept text stays readable."""

import dataclasses
from typing import Any, ClassVar, Literal

import einops
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import LayerSpec, PromptKV, prompt_mask
from kvjax.pallas_kernels import top_k

from .base import Policy
from .budget import budget_rows, budget_tokens, check_least
from .families.scoring import PromptScorer, PromptScorerLayer, last_queries, pool
from .fields import check_fields
from .info import PolicyError, PolicyInfo
from .layer import CacheLayer, Carry, Reads
from .registry import register
from .transforms.by_layer import ByLayer, by_layer


@register
@dataclasses.dataclass(frozen=True)
class ChunkKV(PromptScorer):
    """Keep the chunks of a prompt that its last tokens attend to most (Liu et al. 2025, Algorithms 1 to 3).

    The last `window` tokens are kept and serve as observers. The tokens before them are cut into chunks of `chunk`
    tokens (the last may be shorter). A chunk's score is the attention that its tokens receive from the observers. Whole
    chunks are kept, the best first, while `chunk` more tokens fit into the budget (Algorithm 3, line 13). Kept chunks
    stay in order. Only the prompt is compressed. Tokens decoded later are kept in addition.

    In chunked prefill, chunks are those of the whole text: kept chunks stay whole, and a chunk that a block's end
    divides is one chunk.

    The paper's algorithms sometimes contradict its text or each other. Defaults then follow the text, and options give
    the printed algorithm. The defaults of NVIDIA's kvpress are `chunk=20, window=64, pool=5, agg="mean",
    shared_heads=True, rule="kvpress"`.

    Attributes:
        budget: slots for the prompt: a number of tokens, or a fraction of prompt + new tokens. A prompt within it is
            kept whole.
        chunk: c, tokens in a chunk (10 in all of the paper's experiments). 1 is SnapKV without its pooling.
        window: w, last tokens of the prompt, which observe and are kept (the paper uses 4, 8, 16 and 32).
        reuse: N_reuse, layers per choice: one layer chooses, and the layers after it reuse its choice, head by head
            (Algorithm 2; the paper's timings use 2). A layer with other heads (see `by_head`) chooses for itself.
        score: "softmax" sums causal attention probabilities, as H2O and SnapKV do. "raw" sums the products q · k, as
            printed.
        agg: a chunk's score is its tokens' "sum", or their "mean" (kvpress), which does not penalise a short last
            chunk.
        pool: width of an average over neighbouring tokens' scores before they are summed into chunks: odd, or None for
            no pooling (SnapKV and kvpress: 5).
        shared_heads: whether all KV heads of a layer share one choice, by the sum of their scores (kvpress).
        strict: Algorithm 3 to the letter: the window's tokens are in chunks too and compete. A selected chunk may
            overlap the window, and part of the budget then stays unused.
        rule: how many chunks are kept. "paper": as many as fit into the budget beside the window. "kvpress": the
            budget's share of all chunks, the window's included, rounded down, and at least one. This exceeds the budget
            by less than a chunk. The window is kept because its scores are one above the highest score before it. A
            fraction is then of the prompt alone: 1 minus kvpress' compression ratio. A prompt shorter than a chunk is
            kept token by token, each head for itself. A prompt within the window, which kvpress refuses, is kept whole.

    Example:
        >>> policy = kvjax.ChunkKV(budget=64, chunk=8, window=16)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('chunkkv:budget=64,chunk=8,window=16', 0.43)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="chunkkv",
        paper="Liu et al. 2025, ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference",
        summary="the prompt's most attended chunks, its last tokens, and all new ones",
        memory="freed",
        stage="prompt",
        budget_excludes_new_tokens=True,
    )

    keeps_highest: ClassVar[bool] = False

    budget: int | float = 512
    chunk: int = 10
    window: int = 32
    reuse: int = 1
    score: Literal["softmax", "raw"] = "softmax"
    agg: Literal["sum", "mean"] = "sum"
    pool: int | None = None
    shared_heads: bool = False
    strict: bool = False
    rule: Literal["paper", "kvpress"] = "paper"

    def __post_init__(self) -> None:
        check_fields(self, chunk=1, window=1, reuse=1)
        if self.pool is not None and (self.pool < 1 or self.pool % 2 == 0):
            raise PolicyError(
                f"{self.info.name}: pool={self.pool} is not valid. Give an odd width (5), or None for no pooling."
            )
        if self.strict and self.rule == "kvpress":
            raise PolicyError(f"{self.info.name}: strict=True needs rule='paper'. Leave one of them out.")

    def validate(self, tokens: int) -> None:
        needs = (
            f"fewer than the {self.window} tokens of the window, which are always kept. Raise budget or lower window."
        )
        check_least(self.info.name, self.budget, tokens, self.window, needs)

    @property
    def least_slots(self) -> int:
        return self.window

    @property
    def query_window(self) -> int | None:
        whole = (
            self.strict or self.rule == "kvpress" or self.reuse > 1
        )  # these need the prompt, or another layer's choice
        return None if whole else self.window

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return ChunkKVLayer(self, spec)

    def scores(self, spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B K T"]:
        return last_queries(prompt, self.window, spec, kind="softmax" if self.score == "softmax" else "logits")

    @property
    def info(self) -> PolicyInfo:
        return dataclasses.replace(self.about, heads_coupled=self.shared_heads or self.rule == "kvpress")

    def row_budgets(self, spec: LayerSpec, lengths: Int[Array, " B"], total: Int[Array, " B"]) -> Int[Array, " B"]:
        return (
            budget_rows(self.budget, lengths) if self.rule == "kvpress" else super().row_budgets(spec, lengths, total)
        )

    def max_budget(self, spec: LayerSpec) -> int:
        if self.rule == "kvpress":  # a fraction is of the prompt alone
            return max(budget_tokens(self.budget, spec.prompt_len) + self.chunk, self.window)
        return super().max_budget(spec)

    def keep_mask(
        self,
        scores: Float[Array, "B K T"],
        lengths: Int[Array, " B"],
        budget: Int[Array, " B"],
        pos: Int[Array, "B #K T"] | None = None,
    ) -> Bool[Array, "B K T"]:
        """Which prompt tokens are kept, given the window's attention to each."""
        if pos is not None:
            return self._keep_in_block(scores, lengths, budget, pos)
        size = scores.shape[-1]
        pos = jnp.arange(size, dtype=jnp.int32)
        before = lengths - self.window  # tokens before the window
        scored = lengths if self.strict else jnp.maximum(before, 0)
        candidates = lengths if self.rule == "kvpress" else scored
        scores = self._token_scores(scores, prompt_mask(scored, size)[:, None])
        chunks = self._chunk_scores(self._shared(scores), prompt_mask(candidates, size)[:, None])
        chosen = top_k(chunks, self._count(lengths, candidates, budget)[:, None])
        keep = jnp.repeat(chosen, self.chunk, axis=-1)[..., :size] & (pos < candidates[:, None])[:, None]
        if self.rule == "paper":
            keep |= (pos >= before[:, None])[:, None]
        else:
            tokens = jnp.where((pos < lengths[:, None])[:, None], scores, -jnp.inf)
            single = top_k(tokens, jnp.maximum(budget, 1)[:, None])
            keep = jnp.where((lengths < self.chunk)[:, None, None], single, keep)
        return keep | (lengths <= jnp.maximum(budget, self.window))[:, None, None]

    def _keep_in_block(
        self,
        scores: Float[Array, "B K T"],
        lengths: Int[Array, " B"],
        budget: Int[Array, " B"],
        pos: Int[Array, "B K T"],
    ) -> Bool[Array, "B K T"]:
        """`keep_mask` for chunked prefill, where some of the text's chunks are already dropped."""
        size = scores.shape[-1]
        live, before = pos >= 0, jnp.arange(size, dtype=jnp.int32) < (lengths - self.window)[:, None, None]
        candidates = live & before
        scores = self._shared(self._token_scores(scores, candidates))
        chunk = jnp.where(candidates, pos // self.chunk, -1)
        first = candidates & (chunk != jnp.pad(chunk, [(0, 0), (0, 0), (1, 0)], constant_values=-1)[..., :-1])
        order = jnp.where(
            candidates, jnp.cumsum(first, axis=-1, dtype=jnp.int32) - 1, size
        )  # index among the chunks left

        @jax.vmap
        @jax.vmap
        def totals(x: Float[Array, " T"], order: Int[Array, " T"]) -> Float[Array, " T"]:
            return jax.ops.segment_sum(x, order, num_segments=size + 1)[:size]

        tokens, sums = totals(candidates.astype(jnp.float32), order), totals(scores, order)
        chunks = jnp.where(tokens > 0, sums / jnp.maximum(tokens, 1.0) if self.agg == "mean" else sums, -jnp.inf)
        chosen = top_k(chunks, self._count(lengths, lengths, budget)[:, None]) & (tokens > 0)
        whole = jnp.sum(live, axis=-1, keepdims=True) <= jnp.maximum(budget, self.window)[:, None, None]
        of_chosen = jnp.take_along_axis(chosen, jnp.minimum(order, size - 1), axis=-1)
        return live & (of_chosen | ~before | whole)

    def _count(
        self, lengths: Int[Array, " B"], candidates: Int[Array, " B"], budget: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        """Number of chunks of the first `candidates` tokens that are kept."""
        chunks = -(-candidates // self.chunk)
        if self.rule == "paper":
            return (budget - self.window) // self.chunk
        if isinstance(self.budget, float):
            return jnp.maximum(budget_rows(self.budget, chunks), 1)
        return chunk_count(lengths, budget, self.chunk)

    def _token_scores(self, scores: Float[Array, "B K T"], scored: Bool[Array, "B #K T"]) -> Float[Array, "B K T"]:
        """Token scores from attention. Tokens that are not scored get 0, or with rule="kvpress" more than any other."""
        scores = jnp.where(scored, scores, 0.0)
        if self.pool is not None:
            scores = pool(scores, self.pool, "avg")
        top = jnp.max(jnp.where(scored, scores, -jnp.inf), axis=(1, 2), keepdims=True)
        return jnp.where(scored, scores, top + 1 if self.rule == "kvpress" else 0.0)

    def _shared(self, scores: Float[Array, "B K T"]) -> Float[Array, "B K T"]:
        """Scores of each head, or the sum over all heads."""
        return jnp.broadcast_to(jnp.sum(scores, axis=1, keepdims=True), scores.shape) if self.shared_heads else scores

    def _chunk_scores(self, scores: Float[Array, "B K T"], candidates: Bool[Array, "B 1 T"]) -> Float[Array, "B K M"]:
        """Score of each chunk, -inf for chunks without a candidate."""
        pad = [(0, 0), (0, 0), (0, -scores.shape[-1] % self.chunk)]

        def totals(x: Float[Array, "B K T"]) -> Float[Array, "B K M"]:
            return einops.reduce(jnp.pad(x, pad), "b k (m c) -> b k m", "sum", c=self.chunk)

        tokens = totals(candidates.astype(jnp.float32))
        sums = totals(jnp.where(candidates, scores, 0.0))
        return jnp.where(tokens > 0, sums / jnp.maximum(tokens, 1.0) if self.agg == "mean" else sums, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class ChunkKVLayer(PromptScorerLayer[ChunkKV]):
    """One layer of `ChunkKV`."""

    @property
    def reads(self) -> Reads:
        return "whole" if self.policy.strict or self.policy.rule == "kvpress" else "blocks"

    @property
    def key(self) -> str:
        """Equal in layers that share a choice, if they have the same heads."""
        return repr((super().key, self.spec.layer // self.policy.reuse))

    def chosen(self, prompt: PromptKV, carry: Carry) -> tuple[Bool[Array, "B K T"], Carry]:
        keep = carry.get(self.key)  # the choice of the first layer of this group
        if keep is None:
            keep, _ = super().chosen(prompt, carry)
        return keep, carry if self.policy.reuse == 1 else carry | {self.key: keep}


def chunk_count(lengths: Int[Array, " B"], budget: Int[Array, " B"], chunk: int) -> Int[Array, " B"]:
    """Number of chunks that kvpress keeps: the budget's share of all chunks, rounded down, and at least one.

    Args:
        lengths: tokens in each row, more than its budget.
        budget: slots of each row.
        chunk: tokens in a chunk.
    """
    chunks = -(-lengths // chunk)
    # ⌊chunks · budget / length⌋ without overflow: budget = whole · c + rest, length = chunks · c - short.
    whole, rest, short = budget // chunk, budget % chunk, chunks * chunk - lengths
    return jnp.maximum(whole + ((whole + 1) * short >= chunks * (chunk - rest)).astype(jnp.int32), 1)


def chunk_token_hybrid(
    num_layers: int, chunks: ChunkKV | None = None, tokens: Policy | None = None, lower: int | None = None
) -> ByLayer:
    """Chunks in the lower layers, single tokens in the upper ones (ChunkKV, section 4.6).

    Args:
        num_layers: layers of the model.
        chunks: policy of the lower layers. Defaults to `ChunkKV()`.
        tokens: policy of the upper layers. Defaults to that of the lower ones with `chunk=1`.
        lower: number of layers that keep chunks. Defaults to half of them, as the paper's 16 of 32.

    Raises:
        PolicyError: `lower` is not between 0 and `num_layers`.

    Example:
        >>> [layer.chunk for layer in kvjax.chunk_token_hybrid(4, kvjax.ChunkKV(budget=512)).layers]
        [10, 10, 1, 1]
    """
    chunks = ChunkKV() if chunks is None else chunks
    tokens = dataclasses.replace(chunks, chunk=1) if tokens is None else tokens
    lower = num_layers // 2 if lower is None else lower
    if not 0 <= lower <= num_layers:
        raise PolicyError(
            f"chunk_token_hybrid: lower={lower} is out of range. Give 0 to {num_layers}, the number of layers."
        )
    return by_layer([chunks] * lower + [tokens] * (num_layers - lower))
