"""KeyDiff: the keys that differ most from the others."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.cache import LayerSpec, PromptKV

from .base import CacheLayer
from .families.scoring import ScoredCache, ScoreEviction, ScoreEvictionLayer
from .info import PolicyInfo
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class KeyDiff(ScoreEviction):
    """Evict the keys most like the average key (Park et al. 2025, section 3).

    A key's likeness is its cosine with the mean of the normalised keys, over the whole prompt and then, at every step, over
    what the cache holds. No attention weights are needed.

    Attributes:
        budget: slots in all: a number of tokens, or a fraction of prompt + new tokens.
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
    """One layer, whose scores are computed anew at every step."""

    @property
    def compress_reads_kv(self) -> bool:
        return True

    def compress(self, state: ScoredCache) -> ScoredCache:
        score = difference(state.cache.k, state.cache.live)
        return super().compress(dataclasses.replace(state, score=score))


def difference(k: Float[Array, "B K C H"], live: Bool[Array, "B #K C"]) -> Float[Array, "B K C"]:
    """2 less the cosine of each live key with the mean of the normalised ones, so that rounding is as small a share of all of them.

    Of those that are not live it is 2.
    """
    k = jnp.where(live[..., None], k.astype(jnp.float32), 0.0)
    unit = _normalised(k)
    return 2 - jnp.einsum("bkch,bkh->bkc", unit, _normalised(jnp.sum(unit, axis=2)))


def _normalised(x: Float[Array, "*S H"]) -> Float[Array, "*S H"]:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
