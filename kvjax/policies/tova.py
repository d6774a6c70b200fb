"""TOVA: the tokens that the latest query attends to."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import LayerCache, LayerSpec, PromptKV

from .families.scoring import ScoreEviction, ScoreEvictionLayer, last_queries
from .info import PolicyInfo
from .layer import CacheLayer
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class TOVA(ScoreEviction):
    """Evict the token that the latest query attends to least (Oren et al. 2024, section 3).

    A token's score is its softmax probability under the latest query, averaged over all heads of the layer. All heads
    therefore keep the same tokens. The prompt is compressed once, by its last token. Then each new token evicts one.

    Attributes:
        budget: slots in total: a number of tokens, or a fraction of prompt + new tokens.
        keep_newest: whether the newest token is protected. In the published method it can be evicted.

    Example:
        >>> policy = kvjax.TOVA(budget=64)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('tova:budget=64', 0.45)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="tova",
        paper="Oren et al. 2024, Transformers are Multi-State RNNs",
        summary="the tokens that the latest query attends to most, the same in all heads of a layer",
        memory="freed",
        stage="both",
    )

    keep_newest: bool = False

    @property
    def query_window(self) -> int:
        return 1

    def always_kept(self, budget: Any) -> tuple[Any, Any]:
        return budget * 0, budget * 0 + int(self.keep_newest)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return TOVALayer(self, spec)

    def scores(self, spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B K T"]:
        return self._mean_over_heads(spec, last_queries(prompt, 1, spec))

    def block_scores(self, spec: LayerSpec, prompt: PromptKV, score: Float[Array, "B K T"]) -> Float[Array, "B K T"]:
        return self.scores(spec, prompt)

    def update_score(
        self, spec: LayerSpec, score: Float[Array, "B K C"], probs: Float[Array, "B K C"], held: LayerCache
    ) -> Float[Array, "B K C"]:
        return self._mean_over_heads(spec, probs)

    def _mean_over_heads(self, spec: LayerSpec, probs: Float[Array, "B K C"]) -> Float[Array, "B K C"]:
        total = spec.shard.sum_over_heads(jnp.sum(probs, axis=1, keepdims=True))
        return jnp.broadcast_to(total / (spec.num_kv_heads * spec.shard.heads), probs.shape)


@dataclasses.dataclass(frozen=True)
class TOVALayer(ScoreEvictionLayer[TOVA]):
    """One layer of `TOVA`, whose scores are a mean over all heads."""

    @property
    def reduces_heads(self) -> bool:
        return True
