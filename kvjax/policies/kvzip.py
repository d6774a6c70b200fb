"""KVzip: the prompt's tokens that the model needs to repeat the prompt. Question-agnostic."""

import dataclasses
import functools
import logging
import math
from typing import Any, ClassVar, Literal

import einops
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import LayerCache, LayerSpec, PromptKV
from kvjax.pallas_kernels import top_k
from kvjax.pallas_kernels.masking import MASKED

from .attention_context import AttentionContext, projected_norms
from .budget import budget_rows, budget_tokens, check_least
from .families.dense import DenseLayer
from .families.ragged import RaggedLayer
from .families.scoring import PromptScorer, PromptScorerLayer
from .fields import check_fields
from .info import PolicyError, PolicyInfo
from .layer import CacheLayer, Carry
from .registry import register
from .replay import Part, Replay

log = logging.getLogger(__name__)

FIRST = "\n\nRepeat the previous context exactly."
THEN = "\n\nRepeat the part of the previous context exactly, starting with "
"""Words that ask for the first part of a prompt, and, with the previous part's last tokens, for a later one (published code)."""

QUERIES = 128
"""Queries that are scored at a time."""


@register
@dataclasses.dataclass(frozen=True)
class KVzip(PromptScorer):
    """Keep what the model attends to when it is asked to repeat the prompt (Kim et al. 2025, by the published code).

    After prefill, the model processes the prompt again in parts of `chunk` tokens. Each part is behind words that ask to
    repeat it, while the whole prompt is in the cache. The score of a token of the part is the maximum attention
    probability that any query of that pass, of any query head in its group, gives to it. The softmax is over the first
    tokens, the part, and the tokens read now up to the query. Heads share a budget, so a head with high scores keeps
    more. New tokens are kept in addition.

    By default, all heads of all layers share one budget, as in the published code. The division among layers is known
    only after prefill, so each layer has slots for `slack` times the average. Slots that a layer wants beyond them go
    to the next best tokens of other layers. In a group of `by_head`, the heads of each layer share a budget instead,
    which is logged. Other scopes:

    - `scope="layer"`: the heads of a layer share K times its budget, in a store of exactly that size (see `AdaKV`).
    - `scope="head"`: the same budget for every head, the published pair-uniform.

    The published code drops all tokens that equal its threshold, so it may keep fewer. It keeps the template's tokens
    in addition to the budget, which includes them here.

    The words come after the unchanged prompt with its chat template, and end with the opening of an answer if the model
    has a template. A model without a tokenizer reads the tokens only. The cost is the time of two more prefills, and
    the memory of a full cache until then. Layers with a sliding window keep everything, as in the published code.

    Attributes:
        budget: slots for the prompt in the average head: a number of tokens, or a fraction of prompt + new tokens. A
            prompt within it is kept whole.
        scope: which heads share their budgets: those of the whole "model", of a "layer", or none ("head").
        chunk: tokens that are repeated at a time. 2048 in kvpress.
        overlap: last tokens of the previous part with which the words end.
        sinks: first tokens, which are kept, and attended to with every part.
        prefix: number of first tokens, such as a system prompt, that are kept and not repeated. By default (None) the
            tokens that the chat template puts before a user's text, as far as the prompt begins with them. Token ids
            that are no chat have none.
        queries: whether "all" queries of the pass score, or only those of the part ("repeat").
        slack: slots of a layer with `scope="model"`, as a multiple of the average.
        plus: KVzip+ of kvpress: whether a probability is multiplied by the norm of the token's value after the output
            projection, and divided by the norm of the query's attention input.

    Example:
        >>> policy = kvjax.KVzip(budget=64)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('kvzip:budget=64', 0.47)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="kvzip",
        paper="Kim et al. 2025, KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
        summary="the prompt's tokens that the model attends to when it repeats the prompt, more in heads that need more, and all new ones",
        memory="freed",
        stage="prompt",
        budget_excludes_new_tokens=True,
        heads_coupled=True,
    )

    keeps_highest: ClassVar[bool] = False
    scores_whole_prompts: ClassVar[bool] = True

    scope: Literal["model", "layer", "head"] = "model"
    chunk: int = 2000
    overlap: int = 8
    sinks: int = 4
    prefix: int | None = None
    queries: Literal["all", "repeat"] = "all"
    slack: float = 1.1
    plus: bool = False

    def __post_init__(self) -> None:
        check_fields(self, chunk=1, overlap=0, sinks=0, prefix=0, slack=1)

    @property
    def replay(self) -> "Repetition":
        """How the prompt is read again."""
        overlap = min(self.overlap, self.chunk)
        return Repetition(
            self.chunk,
            overlap,
            self.prefix or 0,
            FIRST,
            THEN,
            self.plus,
            self.prefix is None,
            self.sinks,
            self.queries == "repeat",
        )

    def always_kept(self, budget: Any) -> tuple[Any, Any]:
        return budget * 0 + max(self.sinks, self.prefix or 0), budget * 0

    def row_budgets(self, spec: LayerSpec, lengths: Int[Array, " B"], total: Int[Array, " B"]) -> Int[Array, " B"]:
        return budget_rows(self.budget, total, self._least(spec))

    def max_budget(self, spec: LayerSpec) -> int:
        return budget_tokens(self.budget, spec.max_tokens, self._least(spec))

    def _least(self, spec: LayerSpec) -> int:
        """Slots that this model's prompts need at any length."""
        return max(self.least_slots, len(spec.template) if self.prefix is None else 0)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        if spec.window is not None:
            return DenseLayer(self, spec)
        needs = f"but the chat template's {len(spec.template)} first tokens are always kept. Raise budget, or give prefix=0."
        check_least(self.info.name, self.budget, spec.max_tokens, self._least(spec), needs)
        if self.scope == "head":
            return KVzipLayer(self, spec)
        if self.scope == "model" and spec.kv_heads is not None:
            _report_heads(str(self))
            return SharedKVzipLayer(dataclasses.replace(self, scope="layer"), spec)
        return SharedKVzipLayer(self, spec)

    def shared_mask(
        self, scores: Float[Array, "B L K T"], budget: Int[Array, " B"], pos: Int[Array, "B #K T"], most: int
    ) -> Bool[Array, "B L K T"]:
        """Which tokens are kept by heads that share one budget, of `budget` tokens in the average head.

        Args:
            scores: scores by layer and head.
            budget: tokens of each row in the average head.
            pos: position of each token, -1 if there is none.
            most: maximum tokens of the average head of a layer.
        """
        layers, heads = scores.shape[1:3]
        first, _ = self.always_kept(budget)
        live = jnp.broadcast_to((pos >= 0)[:, None], scores.shape)
        ends = live & (pos < first[:, None, None])[:, None]
        whole = (jnp.max(jnp.sum(pos >= 0, axis=-1, dtype=jnp.int32), axis=-1) <= budget)[:, None, None, None]
        rivals = jnp.where(live & ~ends & ~whole, scores, -jnp.inf)
        if layers > 1:
            cap = jnp.clip(jnp.floor(budget.astype(jnp.float32) * self.slack).astype(jnp.int32), budget, most)
            able = top_k(rivals.reshape(*rivals.shape[:2], -1), ((cap - first) * heads)[:, None])
            rivals = jnp.where(able.reshape(scores.shape), rivals, -jnp.inf)
        best = top_k(rivals.reshape(rivals.shape[0], -1), (budget - first) * heads * layers).reshape(scores.shape)
        return best & (rivals > -jnp.inf) | ends | live & whole


@functools.lru_cache(maxsize=256)
def _report_heads(policy: str) -> None:
    """Log, once per policy, that a subset of a layer's heads shares no budget with other layers."""
    log.warning(
        "%s has a subset of the heads of a layer, as within by_head, so each layer has its own budget (scope=layer).",
        policy,
    )


@dataclasses.dataclass(frozen=True)
class Repetition(Replay):
    """The replay of `KVzip`: observes the maximum probability of each token of a part, [B, K, chunk].

    Attributes:
        sinks: see `KVzip`.
        part_only: whether only queries of the part score.
    """

    sinks: int = 4
    part_only: bool = False

    def prepare(
        self, spec: LayerSpec, held: LayerCache, around: AttentionContext | None
    ) -> Float[Array, "B K G C"] | None:
        """Factors of the probabilities of the prompt's tokens."""
        return None if around is None else projected_norms(spec, around, held.v)

    def observe(self, spec: LayerSpec, part: Part) -> Float[Array, "B K C"]:
        block, size = jax.lax.stop_gradient(part.block), part.block.size
        held, rows = jax.lax.stop_gradient(part.held), part.block.mask
        length = self.part_size(spec.prompt_len)
        own = jnp.swapaxes(jnp.where(rows[..., None, None], block.k_rotated, 0), 1, 2).astype(held.k.dtype)
        sinks = min(self.sinks, held.k.shape[2])
        places = part.start[:, None] + jnp.arange(length, dtype=jnp.int32)
        mine = jnp.take_along_axis(held.k, places[:, None, :, None], axis=2, mode="clip")
        keys = jnp.concatenate([held.k[:, :, :sinks], mine, own], axis=2)

        place = jnp.arange(size, dtype=jnp.int32)
        before = jnp.arange(sinks, dtype=jnp.int32) < part.start[:, None]
        inside = jnp.arange(length, dtype=jnp.int32) < part.count[:, None]
        asks = rows & (place >= part.words) if self.part_only else rows
        step = min(QUERIES, size)
        padding = -size % step
        q = jnp.where(rows[..., None, None], block.q_rotated, 0).astype(held.k.dtype)
        q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
        asks = jnp.pad(asks, ((0, 0), (0, padding)))

        def add(i: Int[Array, ""], best: Float[Array, "B K C"]) -> Float[Array, "B K C"]:
            now = i * step + jnp.arange(step, dtype=jnp.int32)
            queries, asked = (jax.lax.dynamic_slice_in_dim(x, i * step, step, axis=1) for x in (q, asks))
            grouped = einops.rearrange(queries, "b s (k g) h -> b k g s h", k=keys.shape[1])
            logits = jnp.einsum("bkgsh,bkth->bkgst", grouped, keys, preferred_element_type=jnp.float32) * spec.scale
            seen = jnp.concatenate([before, inside], axis=1)[:, None]
            seen = jnp.concatenate(
                [
                    jnp.broadcast_to(seen, (seen.shape[0], step, seen.shape[-1])),
                    jnp.broadcast_to(place <= now[:, None], (seen.shape[0], step, size)),
                ],
                axis=-1,
            )[:, None, None]
            logits = jnp.where(seen, logits, MASKED)
            total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
            there = (seen & asked[:, None, None, :, None])[..., sinks : sinks + length]
            shares = jnp.where(there, jnp.exp(logits[..., sinks : sinks + length] - total), 0.0)
            if factors is not None:
                values, inputs = factors
                asked_by = jax.lax.dynamic_slice_in_dim(jnp.pad(inputs, ((0, 0), (0, padding))), i * step, step, axis=1)
                shares = shares * values[:, :, :, None] * asked_by[:, None, None, :, None]
            return jnp.maximum(best, jnp.max(shares, axis=(2, 3)))

        factors = self._factors(part, places)
        start = jnp.zeros((*keys.shape[:2], length), jnp.float32)
        return jax.lax.fori_loop(0, (size + padding) // step, add, start)

    def _factors(
        self, part: Part, places: Int[Array, "B C"]
    ) -> tuple[Float[Array, "B K G C"], Float[Array, "B R"]] | None:
        """Factors of probabilities, by token of the part and by query."""
        if not self.needs_context:
            return None
        assert part.around is not None
        values = jnp.take_along_axis(part.prepared, places[:, None, None], axis=-1, mode="clip")
        inputs = jnp.linalg.norm(jax.lax.stop_gradient(part.around.inputs()).astype(jnp.float32), axis=-1)
        inverse = jnp.where(part.block.mask & (inputs > 0), 1 / jnp.maximum(inputs, jnp.finfo(jnp.float32).tiny), 0.0)
        return values, inverse

    def scores(self, found: Float[Array, "J B K C"], starts: Int[Array, " B"], size: int) -> Float[Array, "B K T"]:
        """Join the observations of all parts by token of a prompt of `size`. The tokens before have the highest score."""
        joined = einops.rearrange(found, "j b k c -> b k (j c)")
        place = (jnp.arange(size, dtype=jnp.int32) - starts[:, None])[:, None]
        scores = jnp.take_along_axis(joined, jnp.clip(place, 0, joined.shape[-1] - 1), axis=-1)
        return jnp.where(place < 0, jnp.finfo(scores.dtype).max, scores)


@dataclasses.dataclass(frozen=True)
class KVzipLayer(PromptScorerLayer[KVzip]):
    """One layer of `KVzip` whose heads all keep equally many tokens."""

    @property
    def replays(self) -> tuple[Replay, ...]:
        return (self.policy.replay,)

    def chosen(self, prompt: PromptKV, carry: Carry) -> tuple[Bool[Array, "B K T"], Carry]:
        scores = replayed(self.policy, prompt.size, carry)[self.spec.layer]
        return self.best(prompt, _own(self.spec, scores))[0], carry


@dataclasses.dataclass(frozen=True)
class SharedKVzipLayer(RaggedLayer[KVzip]):
    """One layer of `KVzip` whose heads share a store."""

    @property
    def replays(self) -> tuple[Replay, ...]:
        return (self.policy.replay,)

    @property
    def max_kept(self) -> int:
        policy, spec = self.policy, self.spec
        most = policy.max_budget(spec)
        if policy.scope == "model":
            most = math.floor(most * policy.slack)
        return min(most, spec.prompt_len) + spec.new_tokens

    def chosen(self, prompt: PromptKV, carry: Carry) -> tuple[Bool[Array, "B K T"], Carry]:
        policy, spec = self.policy, self.spec
        scores = replayed(policy, prompt.size, carry, self.key if policy.scope == "model" else None)
        layers = sorted(scores) if policy.scope == "model" else [spec.layer]
        budget = policy.row_budgets(spec, prompt.seen, prompt.total)
        together = jnp.stack([_own(spec, scores[layer]) for layer in layers], axis=1)
        keep = policy.shared_mask(together, budget, prompt.pos, self.max_kept - spec.new_tokens)
        return keep[:, layers.index(spec.layer)], carry


def replayed(policy: KVzip, size: int, carry: Carry, key: str | None = None) -> dict[int, Float[Array, "B K T"]]:
    """Scores of all layers with a replay, or of those with a `key`.

    Raises:
        PolicyError: there was no replay.
    """
    found = policy.replay.found(carry, key)
    if found is None:
        raise PolicyError(
            f"{policy.info.name}: the prompt was not read a second time. Use kvjax.Engine, or kvjax.policies.prefill_alone for a single layer."
        )
    starts = policy.replay.starts_in(carry)
    return {layer: policy.replay.scores(each, starts, size) for layer, each in found.items()}


def _own(spec: LayerSpec, scores: Float[Array, "B K T"]) -> Float[Array, "B _ T"]:
    """Scores of the layer's heads."""
    return scores if spec.kv_heads is None else scores[:, jnp.asarray(spec.kv_heads)]
