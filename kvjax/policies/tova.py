"""TOVA: the tokens that the latest query attends to."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import LayerSpec
from kvjax.pallas_kernels import window_scores

from .base import rotated
from .registry import register
from .scoring import Evicting


@register
@dataclasses.dataclass(frozen=True)
class TOVA(Evicting):
    """Evict the token that the latest query attends to least (Oren et al. 2024, section 3).

    A token's score is its softmax probability under the latest query, averaged over all heads of the layer, which therefore
    keep the same tokens. The prompt is compressed once, by its last token; then each new token evicts one.

    Attributes:
        budget: slots in all: a number of tokens, or a fraction of prompt + new tokens.
        keep_newest: whether the newest token is safe. In the method as published it can be the one that goes.
    """

    name: ClassVar[str] = "tova"
    paper: ClassVar[str] = "Oren et al. 2024, Transformers are Multi-State RNNs"
    keeps: ClassVar[str] = "the tokens that the latest query attends to most, the same in all heads of a layer"

    keep_newest: bool = False

    def ends(self, budget: Any) -> tuple[Any, Any]:
        return budget * 0, budget * 0 + int(self.keep_newest)

    def scores(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
    ) -> Float[Array, "B K T"]:
        latest = window_scores(
            rotated(spec, q), rotated(spec, k), lengths, window=1, scale=spec.scale, sliding_window=spec.window
        )
        return self.attended(latest, latest)

    def attended(self, score: Float[Array, "B K C"], probs: Float[Array, "B K C"]) -> Float[Array, "B K C"]:
        return jnp.broadcast_to(jnp.mean(probs, axis=1, keepdims=True), score.shape)
