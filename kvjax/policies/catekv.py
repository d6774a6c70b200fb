"""CateKV: heads that keep attending to the same tokens keep only those. The other heads keep most of the prompt."""

import dataclasses
import math
from fractions import Fraction
from typing import Any, ClassVar, Literal

import einops
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, TokenBlock
from kvjax.config import ModelConfig
from kvjax.pallas_kernels import top_k

from .base import Policy
from .budget import budget_rows, budget_tokens, check_least
from .families.scoring import last_queries
from .fields import check_fields
from .info import PolicyError, PolicyInfo, not_bound
from .layer import CacheLayer, Carry, read_as_prompt
from .profile import HeadProfile, Labels, check_head_profile, find, missing
from .registry import register
from .transforms.by_head import by_head

Order = Literal["max_then_sum", "sum_then_max"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How CateKV divides a prompt: [sinks | middle, in chunks | unaligned tail | recent].

    Attributes:
        budget: b in the paper, slots of a consistent head.
        sinks: L_init, defaults to budget / 32.
        recent: L_rec, defaults to budget / 8.
        chunk: tokens in a chunk. Chunks are kept or dropped whole.
        window: L_obs, number of last queries that score the chunks.
        order: see `chunk_scores`.
    """

    budget: int | float
    sinks: int | None
    recent: int | None
    chunk: int
    window: int
    order: Order

    def regions(self, budget: Any) -> tuple[Any, Any]:
        """Number of sinks and recent tokens of a budget, or of an array of budgets."""
        sinks = budget // 32 if self.sinks is None else budget * 0 + self.sinks
        recent = budget // 8 if self.recent is None else budget * 0 + self.recent
        return sinks, recent

    def validate(self, name: str, tokens: int) -> None:
        """Raise `PolicyError` if sinks and recent tokens leave no room for a chunk in the budget."""
        sinks, recent = self.regions(budget_tokens(self.budget, tokens))
        least = sinks + recent + self.chunk
        needs = (
            f"but {sinks} sinks, {recent} recent tokens and a chunk of {self.chunk} need {least}. Raise budget, or lower sinks, recent or "
            "chunk."
        )
        check_least(name, self.budget, tokens, least, needs)

    @property
    def least_slots(self) -> int:
        """Slots that sinks, recent tokens and one chunk need."""
        least = self.chunk
        while least < sum(self.regions(least)) + self.chunk:
            least = sum(self.regions(least)) + self.chunk
        return least

    def slots(self, tokens: int) -> int:
        """Budget of a sequence that will reach `tokens` tokens."""
        return budget_tokens(self.budget, tokens, self.least_slots)


@dataclasses.dataclass(frozen=True)
class ChunkHead(Policy):
    """Keep sinks, recent tokens, the prompt's chunks that its last queries attend to most, and all new tokens."""

    layout: Layout

    def validate(self, tokens: int) -> None:
        self.layout.validate(self.info.name, tokens)

    def chosen(self, chunks: Int[Array, " B"], free: Int[Array, " B"]) -> Int[Array, " B"]:
        """Number of the prompt's chunks to keep, if sinks, tail and recent tokens leave `free` slots of the budget."""
        raise NotImplementedError

    def max_prompt_kept(self, spec: LayerSpec) -> int:
        """Maximum number of prompt tokens that are kept."""
        raise NotImplementedError

    def layer(self, spec: LayerSpec) -> "ChunkHeadLayer":
        return ChunkHeadLayer(self, spec)


@dataclasses.dataclass(frozen=True)
class ChunkHeadLayer(CacheLayer[ChunkHead]):
    """The heads of one kind in one layer."""

    @property
    def max_kept(self) -> int:
        return min(self.policy.max_prompt_kept(self.spec), self.spec.prompt_len) + self.spec.new_tokens

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[LayerCache, Carry]:
        parts, lengths = self.policy.layout, prompt.lengths
        budget = budget_rows(parts.budget, prompt.total, parts.least_slots)
        sinks, recent = parts.regions(budget)
        # All heads of a row have equally many tokens. Chunked prefill drops whole chunks, so the others stay aligned.
        begin = lengths - jnp.sum(prompt.live[:, 0], axis=-1, dtype=jnp.int32) + sinks
        middle = jnp.maximum(lengths - begin - recent, 0)
        chunks, tail = middle // parts.chunk, middle % parts.chunk

        scores = chunk_scores(prompt, self.spec, parts, middle=(begin, middle))
        of_text = jnp.maximum(prompt.seen - sinks - recent, 0) // parts.chunk
        best = top_chunks(scores, chunks, self.policy.chosen(of_text, budget - sinks - recent - tail))

        place = jnp.arange(prompt.size, dtype=jnp.int32)
        chunk = (place - begin[:, None]) // parts.chunk  # [B, T]; below 0 for sinks
        inside = (chunk >= 0) & (chunk < chunks[:, None])
        of_best = jnp.take_along_axis(best, jnp.where(inside, chunk, 0)[:, None], axis=-1)
        outside = (place < begin[:, None]) | (place >= (lengths - recent - tail)[:, None])
        keep = (inside[:, None] & of_best) | outside[:, None] | (prompt.seen <= budget)[:, None, None]
        return cache.keep(self.spec, self.capacity, prompt, keep)[0], carry

    def read_block(
        self, state: LayerCache, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], LayerCache, Carry]:
        return read_as_prompt(self, state, block, carry)


@dataclasses.dataclass(frozen=True)
class Consistent(ChunkHead):
    """A consistent head: a fixed budget of the prompt, selected once (Jiang et al. 2025, section 3.2)."""

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="catekv_consistent",
        summary="sinks, recent tokens, and a fixed budget of chunks of the prompt",
        memory="freed",
        stage="prompt",
        budget_excludes_new_tokens=True,
    )

    @property
    def budget(self) -> int | float:
        """Slots for the prompt."""
        return self.layout.budget

    def chosen(self, chunks: Int[Array, " B"], free: Int[Array, " B"]) -> Int[Array, " B"]:
        return jnp.minimum(free // self.layout.chunk, chunks)

    def max_prompt_kept(self, spec: LayerSpec) -> int:
        return self.layout.slots(spec.max_tokens)


@dataclasses.dataclass(frozen=True)
class Adaptive(ChunkHead):
    """An adaptive head: a share of the prompt's chunks, by default all of them.

    Attributes:
        eta: η in the paper, share of the chunks between sinks and recent tokens that is kept.
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="catekv_adaptive",
        summary="sinks, recent tokens, and a share of the prompt's chunks",
        memory="freed",
        stage="prompt",
        budget_excludes_new_tokens=True,
    )

    eta: float = 1.0

    def chosen(self, chunks: Int[Array, " B"], free: Int[Array, " B"]) -> Int[Array, " B"]:
        return budget_rows(self.eta, chunks)

    def max_prompt_kept(self, spec: LayerSpec) -> int:
        """All of a prompt within the budget, otherwise sinks, recent tokens and the maximum of the middle.

        A middle of m tokens with a tail of t < chunk keeps at most η (m - t) + t = η m + (1 - η) t tokens.
        """
        budget = self.layout.slots(spec.max_tokens)
        always_kept = sum(self.layout.regions(budget))
        eta = Fraction(self.eta).limit_denominator(10_000)
        middle = eta * max(spec.prompt_len - always_kept, 0) + (1 - eta) * (self.layout.chunk - 1)
        return max(budget, always_kept + math.ceil(middle))


@register
@dataclasses.dataclass(frozen=True)
class CateKV(Policy):
    """Consistent heads keep a budget, adaptive heads a share of the prompt (Jiang et al. 2025, Algorithm 1).

    The kind of a head is a property of the model, which `kvjax calibrate catekv` finds. Each layer has two caches of
    different shapes, so tokens that consistent heads drop occupy no memory. All heads keep new tokens in addition. A
    prompt within the budget is kept whole.

    Attributes:
        budget: slots of a consistent head for the prompt, sinks and recent tokens included: a number of tokens, or a
            fraction of prompt + new tokens. (The paper uses 2048, and 512 on LongBench.)
        eta: η, share of the prompt's chunks that adaptive heads keep. The paper's efficiency measurements use 0.7.
        sinks: first tokens that all heads keep. Defaults to budget / 32, 64 of 2048.
        recent: last tokens that all heads keep. Defaults to budget / 8, 256 of 2048, as in the published scripts. (The
            paper's appendix prints budget / 128, which for LongBench is less than a chunk.)
        chunk: cs, tokens in a chunk.
        window: L_obs, number of the prompt's last queries that score the chunks.
        order: how a chunk is scored. "max_then_sum" (the published code) takes each query's maximum over the tokens of
            the chunk, and sums over queries. "sum_then_max" (Algorithm 1 as printed) sums the attention to each token
            over queries, and takes the maximum over tokens.
        profile: a `HeadProfile`, the path of one, or labels "consistent" and "adaptive" as [layer][head]. None uses the
            profile that comes with kvjax for the model.
        adaptive: another policy for adaptive heads, such as a sparse one. `eta` is then not used.

    Example:
        >>> labels = (("adaptive", "consistent"),) * 2  # of two layers with two KV heads
        >>> policy = kvjax.CateKV(budget=64, profile=labels)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> round(policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes), 2)  # share of the full cache's bytes
        0.71
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="catekv",
        paper="Jiang et al. 2025, CateKV: On Sequential Consistency for Long-Context LLM Inference Acceleration",
        summary="few tokens in heads that attend to the same ones throughout, most or all in the other heads",
        memory="freed",
        stage="prompt",
        budget_excludes_new_tokens=True,
    )
    labels: ClassVar[tuple[str, ...]] = ("consistent", "adaptive")

    budget: int | float = 2048
    eta: float = 1.0
    sinks: int | None = None
    recent: int | None = None
    chunk: int = 8
    window: int = 64
    order: Order = "max_then_sum"
    profile: Labels | HeadProfile | str | None = None
    adaptive: Policy | None = None

    def __post_init__(self) -> None:
        check_fields(self, sinks=0, recent=0, chunk=1, window=1)
        if not 0 <= self.eta <= 1:
            raise PolicyError(
                f"{self.info.name}: eta={self.eta} is out of range. Give a share of the chunks from 0 to 1."
            )
        if self.adaptive is not None and self.eta != 1:
            raise PolicyError(
                f"{self.info.name}: eta={self.eta} conflicts with adaptive=, whose policy gets all tokens. Give one of them."
            )
        check_head_profile(self.info.name, self.profile)

    def validate(self, tokens: int) -> None:
        self._layout.validate(self.info.name, tokens)

    def bind(self, config: ModelConfig) -> Policy:
        """Return the policies of both kinds of heads, as a `ByHead`."""
        labels = self.profile if isinstance(self.profile, tuple) else self._profile(config).labels
        adaptive = Adaptive(self._layout, float(self.eta)) if self.adaptive is None else self.adaptive
        return by_head({"consistent": Consistent(self._layout), "adaptive": adaptive}, labels).bind(config)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        raise not_bound(self.info)

    @property
    def _layout(self) -> Layout:
        return Layout(self.budget, self.sinks, self.recent, self.chunk, self.window, self.order)

    def _profile(self, config: ModelConfig) -> HeadProfile:
        given = None if isinstance(self.profile, tuple) else self.profile
        found = find(self.info.name, config, given)
        if found is None:
            raise missing(self.info.name, config)
        return found


def chunk_scores(
    prompt: PromptKV, spec: LayerSpec, layout: Layout, middle: tuple[Int[Array, " B"], Int[Array, " B"]]
) -> Float[Array, "B K M"]:
    """Return one score for each chunk, without storing the observation matrix.

    See `CateKV` for `order`. Sums are divided by the number of queries.

    Args:
        prompt: the prompt.
        spec: the layer's static shapes and model facts.
        layout: how the prompt is divided.
        middle: as for `window_scores`.
    """
    if layout.order == "max_then_sum":
        return last_queries(prompt, layout.window, spec, chunk=layout.chunk, middle=middle)
    tokens = last_queries(prompt, layout.window, spec, middle=middle)
    filled = jnp.pad(tokens, [(0, 0), (0, 0), (0, -tokens.shape[-1] % layout.chunk)])
    return einops.reduce(filled, "b k (m c) -> b k m", "max", c=layout.chunk)


def top_chunks(
    scores: Float[Array, "B K M"], chunks: Int[Array, " B"], count: Int[Array, " B"]
) -> Bool[Array, "B K M"]:
    """Return the `count` highest-scoring of each row's first `chunks` chunks. Ties go to the first."""
    exists = (jnp.arange(scores.shape[-1], dtype=jnp.int32) < chunks[:, None])[:, None]
    return top_k(jnp.where(exists, scores, -jnp.inf), count[:, None]) & exists
