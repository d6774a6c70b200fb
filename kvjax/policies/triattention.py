"""TriAttention: tokens that a model's mean queries will attend to at a distance, selected in rounds."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache import LayerSpec, PromptKV
from kvjax.config import ModelConfig
from kvjax.pallas_kernels.head_shards import query_heads

from .base import Policy
from .families.rounds import RoundsLayer
from .families.scoring import PromptScorer, PromptScorerLayer
from .families.trigonometry import MeanQueries, frequencies, pairs
from .fields import check_fields
from .info import PolicyError, PolicyInfo, not_bound
from .layer import CacheLayer
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
    both cases a head has up to `every` tokens more than its budget between rounds. Each layer and KV head selects for
    itself, which the published code calls per_layer_perhead. Its results use sets that layers share, which are not
    implemented, nor are prompts exempt from compression ("pinned"). The authors' standalone code has no window. Their
    code for vLLM has 128, as here.

    Attributes:
        budget: slots that a round leaves: a number of tokens, or a fraction of prompt + new tokens.
        every: tokens from round to round.
        window: last tokens, always kept.
        offsets: number of offsets, which are powers of two from 1 on.
        agg: "mean" or "max" of the scores over offsets.
        gqa: "max" or "mean" over the query heads that share keys, or one score by the mean of their statistics,
            "mean_stats".
        profile: statistics of the model's queries: a `MeanQueries`, the path of one, or None for the one that comes
            with kvjax.
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="triattention",
        paper="Mao et al. 2026, TriAttention: Efficient Long Reasoning with Trigonometric KV Compression",
        summary="the latest tokens, and those that average queries of the model will attend to, chosen anew as it reasons",
        memory="freed",
        stage="both",
    )

    budget: int | float = 2048
    every: int = 128
    window: int = 128
    offsets: int = 17
    agg: Literal["mean", "max"] = "mean"
    gqa: Literal["max", "mean", "mean_stats"] = "max"
    profile: MeanQueries | str | None = None

    def __post_init__(self) -> None:
        check_fields(self, every=1, window=0, offsets=1)
        if not isinstance(self.profile, MeanQueries | str | None):
            raise PolicyError(
                f"{self.info.name}: profile={self.profile!r} is not valid. Give a MeanQueries or its path."
            )

    def bind(self, config: ModelConfig) -> Policy:
        """Return the policy with its profile loaded."""
        found = find(self.info.name, config, self.profile, MeanQueries)
        if found is None:
            raise missing(self.info.name, config)
        return dataclasses.replace(self, profile=found)

    def always_kept(self, budget: Any) -> tuple[Any, Any]:
        return budget * 0, budget * 0 + self.window

    @property
    def query_window(self) -> int:
        return 0

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return RoundsLayer(self, spec, scorer=PromptScorerLayer(self, spec), every=self.every)

    def scores(self, spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B K T"]:
        live = jnp.swapaxes(prompt.live, 1, 2)[..., None]
        k = jax.lax.stop_gradient(prompt.k_rotated)
        found = self.expected(spec, jnp.where(live, k, jnp.zeros((), k.dtype)), prompt.seen)
        place = jnp.arange(prompt.size, dtype=jnp.int32)
        rivals = (prompt.live & (place < (prompt.lengths - self.window)[:, None, None]))[:, :, None]
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
        return [jnp.asarray(grouped[:, :, i])[spec.head_ids] for i in range(3)]
