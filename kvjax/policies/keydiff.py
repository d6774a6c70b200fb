"""KeyDiff: the tokens whose keys differ most from the others."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.cache import LayerSpec, PromptKV

from .families.scoring import ScoredCache, ScoreEviction, ScoreEvictionLayer
from .info import PolicyInfo
from .layer import CacheLayer
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class KeyDiff(ScoreEviction):
    """Evict the keys most similar to the average key (Park et al. 2025, section 3).

    The similarity is the cosine of a key with the mean of the normalised keys. The mean is over the whole prompt, and
    then, at every step, over the cache. Attention weights are not needed.

    Attributes:
        budget: slots in total: a number of tokens, or a fraction of prompt + new tokens.

    Example:
        >>> policy = kvjax.KeyDiff(budget=64)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('keydiff:budget=64', 0.45)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="keydiff",
        paper="Park et al. 2025, KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in "
        "Resource-Constrained Environments",
        summary="the tokens whose keys are least like the average key",
        memory="freed",
        stage="both",
    )

    def scores(self, spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B K T"]:
        return difference(prompt.k_rotated.swapaxes(1, 2), prompt.live)

    def block_scores(self, spec: LayerSpec, prompt: PromptKV, score: Float[Array, "B K T"]) -> Float[Array, "B K T"]:
        return self.scores(spec, prompt)

    @property
    def query_window(self) -> int:
        return 0

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return KeyDiffLayer(self, spec)


@dataclasses.dataclass(frozen=True)
class KeyDiffLayer(ScoreEvictionLayer[KeyDiff]):
    """A layer that recomputes all scores at every step."""

    @property
    def compress_reads_kv(self) -> bool:
        return True

    def compress(self, state: ScoredCache) -> ScoredCache:
        score = difference(state.cache.k, state.cache.live)
        return dataclasses.replace(super().compress(dataclasses.replace(state, score=score)), score=state.score)


def difference(k: Float[Array, "B K C H"], live: Bool[Array, "B #K C"]) -> Float[Array, "B K C"]:
    """2 minus the cosine of each live key with the mean of the normalised live keys. 2 for other slots.

    The offset keeps rounding a small share of every score.
    """
    k = jnp.where(live[..., None], k.astype(jnp.float32), 0.0)
    unit = _normalised(k)
    return 2 - jnp.einsum("bkch,bkh->bkc", unit, _normalised(jnp.sum(unit, axis=2)))


def _normalised(x: Float[Array, "*S H"]) -> Float[Array, "*S H"]:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
