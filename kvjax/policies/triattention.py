"""TriAttention: tokens that a model's mean queries will attend to at a distance, selected in rounds."""

import dataclasses
from typing import Any, ClassVar, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerSpec, PromptKV, Token, TokenBlock
from kvjax.config import ModelConfig
from kvjax.pallas_kernels.head_shards import query_heads

from .base import Policy
from .families.rounds import ObservedCache, RoundsLayer
from .families.scoring import PromptScorer, PromptScorerLayer
from .families.trigonometry import MeanQueries, frequencies, pairs
from .fields import check_fields
from .info import PolicyError, PolicyInfo, not_bound
from .layer import CacheLayer, Carry, Reads
from .profile import find, missing
from .registry import register

ABOVE = 4.0
"""Added to scores, which have zero mean, so that rounding is a small share of them."""


@register
@dataclasses.dataclass(frozen=True)
class TriAttention(PromptScorer):
    """Keep what the model's mean queries attend to at future positions, in rounds (Mao et al. 2026).

    Unrotated queries lie around fixed centres. `kvjax calibrate triattention` computes the mean μ of each query head's
    queries, and their mean magnitude ρ, for each channel pair f. At T tokens seen, the score of a key k is a sum of two
    terms:

    - Σ_f Re(μ · conj(k) · exp(iω(T + δ))), averaged over offsets δ of 1, 2, 4, … tokens.
    - Σ_f (ρ - |μ|) |k|, independent of distance.

    Each query head's scores are standardised: minus their mean, divided by their standard deviation. A KV head takes
    the maximum of its group. The last `window` tokens are kept. Neither attention nor queries are needed.

    Rounds are as in `RKV`. The published code has a round whenever a head has `every` tokens more than the budget. In
    both cases a head has up to `every` tokens more than its budget between rounds. The authors' standalone code has no
    window. Their code for vLLM has 128, as here.

    By default, each layer and KV head selects for itself, which the published code calls per_layer_perhead. Other sets
    of tokens are shared by all layers:

    - `sets="union"`: one set for all heads, by the maximum of all heads' scores. This equals the published selection
      from the union of all heads' best tokens.
    - `sets="heads"`: one set per KV head, by the mean over layers. The authors' results use it.

    With shared sets or `keep_prompt`, a prompt stays whole until the first round, `every` tokens after it. In chunked
    prefill, blocks after the first decoded token are new tokens, and a round may follow each.

    Attributes:
        budget: slots that a round leaves: a number of tokens, or a fraction of prompt + new tokens.
        every: tokens from round to round.
        window: last tokens, always kept.
        offsets: number of offsets, which are powers of two from 1 on.
        agg: "mean" or "max" of the scores over offsets.
        gqa: "max" or "mean" over the query heads that share keys, or one score by the mean of their statistics,
            "mean_stats".
        sets: which layers and heads share their sets of tokens: none ("each"), all layers ("heads"), or all layers and
            heads ("union").
        keep_prompt: whether prompts are never evicted. The budget is then for new tokens alone.
        profile: statistics of the model's queries: a `MeanQueries`, the path of one or of a `.pt` file of the authors,
            or None for the one that comes with kvjax.

    Example:
        >>> from kvjax.calibration.make_profile import profile
        >>> means = profile(params, "triattention", np.tile([5, 9, 2, 7], (2, 8)), "a repeated phrase")
        >>> policy = kvjax.TriAttention(budget=64, every=32, window=8, profile=means)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> round(policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes), 2)  # share of the full cache's bytes
        0.43
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="triattention",
        paper="Mao et al. 2026, TriAttention: Efficient Long Reasoning with Trigonometric KV Compression",
        summary="the latest tokens, and those that average queries of the model will attend to, chosen again as it reasons",
        memory="freed",
        stage="both",
    )

    budget: int | float = 2048
    every: int = 128
    window: int = 128
    offsets: int = 17
    agg: Literal["mean", "max"] = "mean"
    gqa: Literal["max", "mean", "mean_stats"] = "max"
    sets: Literal["each", "heads", "union"] = "each"
    keep_prompt: bool = False
    profile: MeanQueries | str | None = None

    def __post_init__(self) -> None:
        check_fields(self, every=1, window=0, offsets=1)
        if not isinstance(self.profile, MeanQueries | str | None):
            raise PolicyError(
                f"{self.info.name}: profile={self.profile!r} is not valid. Give a MeanQueries or its path."
            )

    def bind(self, config: ModelConfig) -> Policy:
        """Return the policy with its profile loaded."""
        profile = self.profile
        if isinstance(profile, str) and profile.endswith(".pt"):
            profile = MeanQueries.published(profile, config)
        found = find(self.info.name, config, profile, MeanQueries)
        if found is None:
            raise missing(self.info.name, config)
        return dataclasses.replace(self, profile=found)

    @property
    def info(self) -> PolicyInfo:
        return dataclasses.replace(self.about, heads_coupled=self.sets == "union")

    def always_kept(self, budget: Any) -> tuple[Any, Any]:
        return budget * 0, budget * 0 + self.window

    @property
    def query_window(self) -> int:
        return 0

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        scorer: PromptScorerLayer[TriAttention] = PromptScorerLayer(self, spec)
        shared = self.sets != "each"
        if not shared and not self.keep_prompt:
            return RoundsLayer(self, spec, scorer=scorer, every=self.every)
        if shared and spec.kv_heads is not None:
            raise PolicyError(
                f"{self.info.name}: sets={self.sets!r} needs all heads of a layer, but this layer has a subset, as within by_head. Give sets='each'."
            )
        return PinnedLayer(self, spec, scorer=scorer, every=self.every, keeps_prompt=True)

    def scores(self, spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B K T"]:
        return self.scores_after(spec, prompt, jnp.zeros_like(prompt.seen))

    def scores_after(self, spec: LayerSpec, prompt: PromptKV, first: Int[Array, " B"]) -> Float[Array, "B K T"]:
        """Scores of tokens from the position `first` of each row on. Those before it are no candidates."""
        live = jnp.swapaxes(prompt.live, 1, 2)[..., None]
        k = jax.lax.stop_gradient(prompt.k_rotated)
        found = self.expected(spec, jnp.where(live, k, jnp.zeros((), k.dtype)), prompt.seen)
        place = jnp.arange(prompt.size, dtype=jnp.int32)
        rivals = prompt.live & (place < (prompt.lengths - self.window)[:, None, None])
        rivals = (rivals & (prompt.pos >= first[:, None, None]))[:, :, None]
        count = jnp.maximum(jnp.sum(rivals, axis=-1, keepdims=True, dtype=jnp.float32), 1.0)
        apart = found - jnp.sum(jnp.where(rivals, found, 0.0), axis=-1, keepdims=True) / count
        deviation = jnp.sqrt(jnp.sum(jnp.where(rivals, apart**2, 0.0), axis=-1, keepdims=True) / count)
        apart = apart / jnp.maximum(deviation, 1e-6)
        return (jnp.mean(apart, axis=2) if self.gqa == "mean" else jnp.max(apart, axis=2)) + ABOVE

    def expected(self, spec: LayerSpec, k: Float[Array, "B T K H"], seen: Int[Array, " B"]) -> Float[Array, "B K G T"]:
        """Scores of rotated keys after `seen` tokens, for each query head's mean query. For "mean_stats", G is 1."""
        omega, factor = frequencies(spec.rope, spec.head_dim)
        real, imaginary, size = self._statistics(spec)
        ahead = omega.astype(np.float64) * 2.0 ** np.arange(self.offsets)[:, None]  # float64 for large offsets
        a, b = np.cos(ahead), np.sin(ahead)
        if self.agg == "mean":  # scores are linear in a and b
            a, b = a.mean(axis=0, keepdims=True), b.mean(axis=0, keepdims=True)
        now = seen.astype(jnp.float32)[:, None, None] * omega
        c, s = jnp.cos(now), jnp.sin(now)
        a, b = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
        c, s = (x[:, :, None, None] for x in (c * a - s * b, s * a + c * b))  # [B, D, 1, 1, F]

        k_real, k_imaginary = pairs(spec.rope, k)  # keys include the rotation's amplitude; `factor` is that of queries
        by_distance = jnp.einsum("bdkgf,btkf->bkgdt", factor * (real * c - imaginary * s), k_real, precision="highest")
        by_distance += jnp.einsum(
            "bdkgf,btkf->bkgdt", factor * (real * s + imaginary * c), k_imaginary, precision="highest"
        )
        spread = factor * (size - jnp.hypot(real, imaginary))
        return jnp.max(by_distance, axis=3) + jnp.einsum(
            "kgf,btkf->bkgt", spread, jnp.hypot(k_real, k_imaginary), precision="highest"
        )

    def _statistics(self, spec: LayerSpec) -> list[Float[Array, "K G F"]]:
        """Re μ, Im μ and ρ of the layer's query heads, by KV head."""
        if not isinstance(self.profile, MeanQueries):
            raise not_bound(self.info)
        found, group = self.profile.layer(spec.layer, spec.head_dim), spec.num_heads // spec.num_kv_heads
        if spec.kv_heads is not None:
            found = found[query_heads(np.asarray(spec.kv_heads), group)]
        grouped = found.reshape(-1, group, *found.shape[1:])
        if self.gqa == "mean_stats":
            grouped = grouped.mean(axis=1, keepdims=True)
        return [jnp.asarray(grouped[:, :, i], jnp.float32)[spec.head_ids] for i in range(3)]


@flax.struct.dataclass
class PinnedCache(ObservedCache):
    """An `ObservedCache` whose first tokens are never evicted.

    Attributes:
        pinned: number of these tokens in each row.
        begun: rows that have decoded a token. Blocks before it are the prompt's.
    """

    pinned: Int[Array, " B"]
    begun: Bool[Array, " B"]


@dataclasses.dataclass(frozen=True)
class PinnedLayer(RoundsLayer):
    """One layer of `TriAttention` that keeps its prompt, or chooses with the other layers."""

    scorer: PromptScorerLayer[TriAttention] = dataclasses.field(kw_only=True)

    @property
    def compresses_together(self) -> bool:
        return self.scorer.policy.sets != "each"

    @property
    def reads(self) -> Reads:
        return "blocks"

    @property
    def max_kept(self) -> int:
        prompt = self.spec.prompt_len
        most = prompt + self._budget if self.scorer.policy.keep_prompt else max(prompt, self._budget)
        return most + self.every - 1

    def init(self, total: Int[Array, " B"] | None = None) -> PinnedCache:
        state = super().init(total)
        none = jnp.zeros_like(state.rounded)
        return PinnedCache(**vars(state), pinned=none, begun=jnp.zeros_like(none, bool))

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[PinnedCache, Carry]:
        state, carry = super().prefill(prompt, carry)
        pinned = prompt.lengths.astype(jnp.int32) if self.scorer.policy.keep_prompt else jnp.zeros_like(state.rounded)
        return PinnedCache(**vars(state), pinned=pinned, begun=jnp.zeros_like(pinned, bool)), carry

    def read_block(
        self, state: ObservedCache, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], PinnedCache, Carry]:
        """Keep a block of the prompt whole. Tokens of a later block are new, and a round may follow."""
        assert isinstance(state, PinnedCache)
        held = cache.insert_block(cache.extended(state.cache, block.size), block)
        out, reads = cache.attend_block(self.spec, held, block), block.count > 0
        first = reads & ~state.begun
        new = PinnedCache(
            cache=held,
            queries=state.queries,
            rounded=jnp.where(first, held.seen, state.rounded),
            total=jnp.where(reads, block.total, state.total),
            pinned=jnp.where(first, held.seen, state.pinned) if self.scorer.policy.keep_prompt else state.pinned,
            begun=state.begun,
        )
        return out, new if self.compresses_together else self.compress(new), carry

    def append(self, state: ObservedCache, token: Token) -> PinnedCache:
        after = super().append(state, token)
        assert isinstance(after, PinnedCache)
        live = jnp.ones_like(after.begun) if token.live is None else token.live
        return dataclasses.replace(after, begun=after.begun | live)

    def before_compress(self, state: PinnedCache, carry: Carry) -> Carry:
        """Return the carry with the sum or maximum of the scores of the layers so far, and their number."""
        policy = self.scorer.policy
        scores = policy.scores_after(self.spec, self._prompt(state), state.pinned)
        if policy.sets == "union":
            scores = jnp.max(scores, axis=1, keepdims=True)
        before, layers = carry.get(self.key, (None, 0))
        if before is not None:
            scores = jnp.maximum(before, scores) if policy.sets == "union" else before + scores
        return {**carry, self.key: (scores, layers + 1)}

    def compress(self, state: ObservedCache) -> PinnedCache:
        assert isinstance(state, PinnedCache)
        return self.compress_together(state, self.before_compress(state, {}))

    def compress_together(self, state: PinnedCache, carry: Carry) -> PinnedCache:
        policy, spec, held = self.scorer.policy, self.spec, state.cache
        scores, layers = carry[self.key]
        budget = policy.row_budgets(spec, held.seen, state.total) + state.pinned
        prompt, due = self._prompt(state), self.is_due(state)
        scores = jnp.broadcast_to(scores if policy.sets == "union" else scores / layers, prompt.pos.shape)
        scores = jnp.where(prompt.pos < state.pinned[:, None, None], jnp.finfo(scores.dtype).max, scores)
        keep = policy.keep_mask(scores, prompt.lengths, budget, prompt.places)
        kept = cache.keep_places(held, self.capacity, keep | ~due[:, None, None])
        return dataclasses.replace(state, cache=kept, rounded=jnp.where(due, held.seen, state.rounded))

    def _prompt(self, state: PinnedCache) -> PromptKV:
        """Return the cached tokens as a prompt to score."""
        none = jnp.zeros((self.spec.batch, 0, self.spec.num_heads, self.spec.head_dim), state.queries.dtype)
        return cache.kept_as_prompt(state.cache, none, state.total)
