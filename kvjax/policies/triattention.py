"""TriAttention: while a model reasons, the tokens that its average queries will attend to, by their distance."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache import LayerSpec, PromptKV
from kvjax.config import ModelConfig
from kvjax.pallas_kernels.head_shards import query_heads

from .base import CacheLayer, Policy
from .families.rounds import RoundsLayer
from .families.scoring import PromptScorer, PromptScorerLayer
from .families.trigonometry import MeanQueries, frequencies, pairs
from .fields import check_fields
from .info import PolicyError, PolicyInfo
from .profile import find, missing
from .registry import register

ABOVE = 4.0
"""Added to scores, which have zero mean, so that rounding is a small share of them."""


@register
@dataclasses.dataclass(frozen=True)
class TriAttention(PromptScorer):
    """Keep what the model's average queries would attend to at positions to come, anew every so many tokens (Mao et al. 2026).

    Queries before rotation lie around fixed centres. With the mean μ of a query head's and their mean size ρ for each pair f of channels,
    as `kvjax calibrate triattention` finds them, a key k scores at T tokens seen, for an offset δ of 1, 2, 4, … tokens,
    Σ Re(μ · conj(k) · exp(iω(T + δ))) by its rotated self, averaged over offsets, and Σ (ρ - |μ|) |k| whatever its distance. Each query
    head's scores are divided by their standard deviation, less their mean; a KV head takes the largest of its group. The last
    `window` tokens are kept. Neither attention nor queries are needed.

    Rounds are as in `RKV`, where the published code has one whenever a head holds `every` tokens more than the budget: a head holds up to
    `every` tokens more than its budget between two. Each layer and KV head chooses for
    itself, which the published code calls per_layer_perhead; its results are of sets that the layers share, which are not here, nor
    are prompts that are spared ("pinned"). The authors' standalone code has no window, and the one for vLLM 128 as here.

    Attributes:
        budget: slots that a round leaves: a number of tokens, or a fraction of prompt + new tokens.
        every: tokens from round to round.
        window: last tokens, which are kept.
        offsets: how many powers of two, from 1 on, the distances to come are.
        agg: of the scores at these distances their "mean" or "max".
        gqa: "max" or "mean" over the query heads that share keys, or one score by the mean of their statistics, "mean_stats".
        profile: statistics of the model's queries: a `MeanQueries`, a file of one, or None for that which comes with kvjax.
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
            raise PolicyError(f"{self.info.name}: profile={self.profile!r}; give a MeanQueries or the file of one")

    def bind(self, config: ModelConfig) -> Policy:
        """The policy with the profile itself."""
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
        """What each query head's average query will make of rotated keys, after so many tokens; of "mean_stats" one for each group."""
        omega, factor = frequencies(spec.rope, spec.head_dim)
        real, imaginary, size = self._statistics(spec)
        ahead = omega.astype(np.float64) * 2.0 ** np.arange(self.offsets)[:, None]  # in float64 for distant ones
        a, b = np.cos(ahead), np.sin(ahead)
        if self.agg == "mean":  # of scores is the score by the mean
            a, b = a.mean(axis=0, keepdims=True), b.mean(axis=0, keepdims=True)
        now = seen.astype(jnp.float32)[:, None, None] * omega
        c, s = jnp.cos(now), jnp.sin(now)
        a, b = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
        c, s = (x[:, :, None, None] for x in (c * a - s * b, s * a + c * b))  # [B, D, 1, 1, F]

        k_real, k_imaginary = pairs(spec.rope, k)  # a factor of rotation is in them once, and once in a query
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
            raise PolicyError(f"{self.info.name}: statistics of queries are a model's; bind(config) gives its policy")
        found, group = self.profile.layer(spec.layer, spec.head_dim), spec.num_heads // spec.num_kv_heads
        if spec.kv_heads is not None:
            found = found[query_heads(np.asarray(spec.kv_heads), group)]
        grouped = found.reshape(-1, group, *found.shape[1:])
        if self.gqa == "mean_stats":
            grouped = grouped.mean(axis=1, keepdims=True)
        return [jnp.asarray(grouped[:, :, i])[spec.head_ids] for i in range(3)]
