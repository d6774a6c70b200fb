"""CateKV: heads that keep looking at the same tokens hold only those; the others keep most of what they have read."""

import dataclasses
import math
from fractions import Fraction
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerSpec, Slots
from kvjax.models.config import ModelConfig
from kvjax.pallas_kernels import top_k, window_scores

from .base import Carry, Memory, Policy, PolicyError, Stage, budget_rows, budget_tokens, check_fields, rotated
from .compose import by_head
from .profile import HeadProfile, Labels, find, missing
from .registry import register

Order = Literal["max_then_sum", "sum_then_max"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How CateKV divides a prompt: [sinks | middle, in chunks | unaligned tail | recent].

    Attributes:
        budget: b in the paper, slots of a consistent head; what else it has is derived from it by default.
        sinks: L_init, by default budget / 32.
        recent: L_rec, by default budget / 8.
        chunk: tokens in a chunk; whole chunks are kept or dropped.
        window: L_obs, how many last queries tell which chunks matter.
        order: see `chunk_scores`.
    """

    budget: int | float
    sinks: int | None
    recent: int | None
    chunk: int
    window: int
    order: Order

    def regions(self, budget: Any) -> tuple[Any, Any]:
        """Sinks and recent tokens of a budget, one or an array of them."""
        sinks = budget // 32 if self.sinks is None else budget * 0 + self.sinks
        recent = budget // 8 if self.recent is None else budget * 0 + self.recent
        return sinks, recent

    def check(self, name: str, tokens: int) -> None:
        """Raise `PolicyError` if sinks and recent tokens leave no room for a chunk in the budget."""
        budget = budget_tokens(self.budget, tokens)
        sinks, recent = self.regions(budget)
        if budget < sinks + recent + self.chunk:
            raise PolicyError(
                f"{name}: a budget of {self.budget} gives {budget} slots, but {sinks} sinks, {recent} recent tokens and a "
                f"chunk of {self.chunk} need {sinks + recent + self.chunk}; raise budget, or lower sinks, recent or chunk"
            )


@dataclasses.dataclass(frozen=True)
class _Chunks(Policy):
    """Keep sinks, recent tokens and the chunks of the prompt that its last queries attend to most, and all new tokens."""

    memory: ClassVar[Memory] = "freed"
    stage: ClassVar[Stage] = "prompt"
    grows: ClassVar[bool] = True

    layout: Layout

    def check(self, tokens: int) -> None:
        self.layout.check(self.name, tokens)

    def chosen(self, chunks: Int[Array, " B"], room: Int[Array, " B"]) -> Int[Array, " B"]:
        """How many of a prompt's chunks are kept, where sinks, tail and recent tokens leave `room` slots of the budget."""
        raise NotImplementedError

    def prefill(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
        carry: Carry,
    ) -> tuple[Slots, Carry]:
        parts, keys = self.layout, rotated(spec, k)
        budget = budget_rows(parts.budget, lengths + spec.new_tokens)
        sinks, recent = parts.regions(budget)
        middle = jnp.maximum(lengths - sinks - recent, 0)
        chunks, tail = middle // parts.chunk, middle % parts.chunk

        scores = chunk_scores(
            rotated(spec, q),
            keys,
            lengths,
            middle=(sinks, middle),
            window=parts.window,
            scale=spec.scale,
            sliding_window=spec.window,
            chunk=parts.chunk,
            order=parts.order,
        )
        best = top_chunks(scores, chunks, self.chosen(chunks, budget - sinks - recent - tail))

        pos = jnp.arange(k.shape[1], dtype=jnp.int32)
        chunk = (pos - sinks[:, None]) // parts.chunk  # [B, T]; below 0 for sinks
        inside = (chunk >= 0) & (chunk < chunks[:, None])
        of_best = jnp.take_along_axis(best, jnp.where(inside, chunk, 0)[:, None], axis=-1)
        outside = (pos < sinks[:, None]) | (pos >= (lengths - recent - tail)[:, None])
        keep = (inside[:, None] & of_best) | outside[:, None] | (lengths <= budget)[:, None, None]
        slots, _ = cache.select(spec, self.capacity(spec), keys, v, keep, lengths)
        return slots, carry


@dataclasses.dataclass(frozen=True)
class Consistent(_Chunks):
    """A consistent head: a fixed budget of the prompt, chosen once (Jiang et al. 2025, section 3.2)."""

    name: ClassVar[str] = "catekv_consistent"
    keeps: ClassVar[str] = "sinks, recent tokens, and a fixed budget of chunks of the prompt"

    @property
    def budget(self) -> int | float:
        """Slots for the prompt."""
        return self.layout.budget

    def chosen(self, chunks: Int[Array, " B"], room: Int[Array, " B"]) -> Int[Array, " B"]:
        return jnp.minimum(room // self.layout.chunk, chunks)

    def capacity(self, spec: LayerSpec) -> int:
        return cache.round_slots(min(budget_tokens(self.budget, spec.max_tokens), spec.prompt_len) + spec.new_tokens)


@dataclasses.dataclass(frozen=True)
class Adaptive(_Chunks):
    """An adaptive head: a share of the prompt's chunks, all of them by default.

    Attributes:
        eta: η in the paper, share of the chunks between sinks and recent tokens that is kept.
    """

    name: ClassVar[str] = "catekv_adaptive"
    keeps: ClassVar[str] = "sinks, recent tokens, and a share of the prompt's chunks"

    eta: float = 1.0

    def chosen(self, chunks: Int[Array, " B"], room: Int[Array, " B"]) -> Int[Array, " B"]:
        return budget_rows(self.eta, chunks)

    def capacity(self, spec: LayerSpec) -> int:
        """Slots for the longest row: all of a prompt within the budget, else sinks, recent tokens and the most of the middle.

        Of a middle of m tokens with a tail of t < chunk, η (m - t) + t are kept at most, which is η m + (1 - η) t.
        """
        budget = budget_tokens(self.layout.budget, spec.max_tokens)
        ends = sum(self.layout.regions(budget))
        eta = Fraction(self.eta).limit_denominator(10_000)
        middle = eta * max(spec.prompt_len - ends, 0) + (1 - eta) * (self.layout.chunk - 1)
        return cache.round_slots(min(max(budget, ends + math.ceil(middle)), spec.prompt_len) + spec.new_tokens)


@register
@dataclasses.dataclass(frozen=True)
class CateKV(Policy):
    """Consistent heads keep a budget, adaptive heads a share of the prompt (Jiang et al. 2025, Algorithm 1).

    Which head is which is a property of the model, found out beforehand by `kvjax calibrate catekv`. Each layer has two caches
    of their own shapes, so what consistent heads drop is really freed. New tokens are kept in addition, by all heads. A prompt
    within the budget is kept whole.

    Attributes:
        budget: slots of a consistent head for the prompt, sinks and recent tokens included: a number of tokens, or a fraction
            of prompt + new tokens. (The paper used 2048, and 512 on LongBench.)
        eta: share of the prompt's chunks that adaptive heads keep; 0.7 in the paper's efficiency measurements.
        sinks: first tokens that all heads keep; by default budget / 32, 64 of 2048.
        recent: last tokens that all heads keep; by default budget / 8, 256 of 2048 as in the published scripts. (The paper's
            appendix prints budget / 128, which for LongBench would be less than a chunk.)
        chunk: tokens in a chunk.
        window: last queries of the prompt that choose the chunks.
        order: a chunk's score is the sum over queries of its best token's attention ("max_then_sum", the published code), or
            its best token's sum over queries ("sum_then_max", Algorithm 1 as printed).
        profile: a `HeadProfile` or a file of one; or labels "consistent" and "adaptive" as [layer][head]; None takes the
            profile that comes with kvjax for the model.
        adaptive: another policy for adaptive heads, such as one that recalls tokens by the query; `eta` is then not used.
    """

    name: ClassVar[str] = "catekv"
    paper: ClassVar[str] = (
        "Jiang et al. 2025, CateKV: On Sequential Consistency for Long-Context LLM Inference Acceleration"
    )
    keeps: ClassVar[str] = "in heads that look at the same tokens all along, only those; in the others most or all"
    memory: ClassVar[Memory] = "freed"
    stage: ClassVar[Stage] = "prompt"
    grows: ClassVar[bool] = True
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
            raise PolicyError(f"{self.name}: eta={self.eta}; give a share of the chunks, 0 to 1")
        if self.adaptive is not None and self.eta != 1:
            raise PolicyError(
                f"{self.name}: eta={self.eta} and a policy for adaptive heads; give one of them, since that policy gets all tokens"
            )
        if not isinstance(self.profile, tuple | HeadProfile | str | None):
            raise PolicyError(
                f"{self.name}: profile={self.profile!r}; give a HeadProfile, the file of one, or labels as a tuple of tuples"
            )
        if isinstance(self.budget, int):
            self.check(0)

    def check(self, tokens: int) -> None:
        self._layout.check(self.name, tokens)

    def bind(self, config: ModelConfig) -> Policy:
        """Both kinds of heads with the policies that they have, as a `ByHead`."""
        labels = self.profile if isinstance(self.profile, tuple) else self._profile(config).labels
        adaptive = Adaptive(self._layout, float(self.eta)) if self.adaptive is None else self.adaptive
        return by_head({"consistent": Consistent(self._layout), "adaptive": adaptive}, labels).bind(config)

    def capacity(self, spec: LayerSpec) -> int:
        raise PolicyError(
            f"{self.name}: heads differ, so there is no one capacity; bind(config) gives a model's policy"
        )

    @property
    def _layout(self) -> Layout:
        return Layout(self.budget, self.sinks, self.recent, self.chunk, self.window, self.order)

    def _profile(self, config: ModelConfig) -> HeadProfile:
        given = None if isinstance(self.profile, tuple) else self.profile
        found = find(self.name, config, given)
        if found is None:
            raise missing(self.name, config)
        return found


def chunk_scores(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    lengths: Int[Array, " B"],
    *,
    chunk: int,
    order: Order,
    **observing: Any,
) -> Float[Array, "B K M"]:
    """One score for each `chunk` columns of the observation matrix, which itself is nowhere held.

    Args:
        q, k, lengths, observing: as for `window_scores`.
        order: "max_then_sum" adds up over queries what each gives to the chunk's best token; "sum_then_max" takes the token
            that gets most from all queries together. Either sum is divided by the number of queries.
    """
    if order == "max_then_sum":
        return window_scores(q, k, lengths, chunk=chunk, **observing)
    tokens = window_scores(q, k, lengths, **observing)
    chunks = jnp.pad(tokens, [(0, 0), (0, 0), (0, -tokens.shape[-1] % chunk)])
    return jnp.max(chunks.reshape(*tokens.shape[:2], -1, chunk), axis=-1)


def top_chunks(
    scores: Float[Array, "B K M"], chunks: Int[Array, " B"], count: Int[Array, " B"]
) -> Bool[Array, "B K M"]:
    """The `count` best of each row's first `chunks` chunks; of equal ones the first."""
    exists = (jnp.arange(scores.shape[-1], dtype=jnp.int32) < chunks[:, None])[:, None]
    return top_k(jnp.where(exists, scores, -jnp.inf), count[:, None]) & exists
