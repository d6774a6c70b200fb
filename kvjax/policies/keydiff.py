"""KeyDiff: the keys that differ most from the others."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerSpec

from .base import rotated
from .registry import register
from .scoring import Evicting, Ranked


@register
@dataclasses.dataclass(frozen=True)
class KeyDiff(Evicting):
    """Evict the keys most like the average key (Park et al. 2025, section 3).

    A key's likeness is its cosine with the mean of the normalised keys, over the whole prompt and then, at every step, over
    what the cache holds. No attention weights are needed.

    Attributes:
        budget: slots in all: a number of tokens, or a fraction of prompt + new tokens.
    """

    name: ClassVar[str] = "keydiff"
    paper: ClassVar[str] = (
        "Park et al. 2025, KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in "
        "Resource-Constrained Environments"
    )
    keeps: ClassVar[str] = "the tokens whose keys are least like the average key"

    def scores(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
    ) -> Float[Array, "B K T"]:
        inside = cache.in_prompt(lengths, k.shape[1])[:, None]
        return difference(rotated(spec, k).swapaxes(1, 2), inside)

    def compress(self, spec: LayerSpec, state: Ranked) -> Ranked:
        score = difference(state.slots.k, state.slots.live)
        return super().compress(spec, dataclasses.replace(state, score=score))


def difference(k: Float[Array, "B K C H"], live: Bool[Array, "B #K C"]) -> Float[Array, "B K C"]:
    """2 less the cosine of each live key with the mean of the normalised ones, so that rounding is as small a share of all of them.

    Of those that are not live it is 2.
    """
    k = jnp.where(live[..., None], k.astype(jnp.float32), 0.0)
    unit = _normalised(k)
    return 2 - jnp.einsum("bkch,bkh->bkc", unit, _normalised(jnp.sum(unit, axis=2)))


def _normalised(x: Float[Array, "*S H"]) -> Float[Array, "*S H"]:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
