"""TOVA: the tokens that the latest query attends to."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import LayerSpec, Prompt
from kvjax.pallas_kernels import window_scores

from .families.scoring import ScoreEviction
from .info import PolicyInfo
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class TOVA(ScoreEviction):
    """Evict the token that the latest query attends to least (Oren et al. 2024, section 3).

    A token's score is its softmax probability under the latest query, averaged over all heads of the layer, which therefore
    keep the same tokens. The prompt is compressed once, by its last token; then each new token evicts one.

    Attributes:
        budget: slots in all: a number of tokens, or a fraction of prompt + new tokens.
        keep_newest: whether the newest token is safe. In the method as published it can be the one that goes.
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="tova",
        paper="Oren et al. 2024, Transformers are Multi-State RNNs",
        summary="the tokens that the latest query attends to most, the same in all heads of a layer",
        memory="freed",
        stage="both",
    )

    keep_newest: bool = False

    def always_kept(self, budget: Any) -> tuple[Any, Any]:
        return budget * 0, budget * 0 + int(self.keep_newest)

    def scores(self, spec: LayerSpec, prompt: Prompt) -> Float[Array, "B K T"]:
        latest = window_scores(
            prompt.q_rotated, prompt.k_rotated, prompt.lengths, window=1, scale=spec.scale, sliding_window=spec.window
        )
        return self.update_score(latest, latest)

    def update_score(self, score: Float[Array, "B K C"], probs: Float[Array, "B K C"]) -> Float[Array, "B K C"]:
        return jnp.broadcast_to(jnp.mean(probs, axis=1, keepdims=True), score.shape)
