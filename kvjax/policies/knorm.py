"""KNorm: tokens whose keys have a small norm receive the most attention."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import LayerSpec, PromptKV, Token

from .families.dense import DenseLayer
from .families.scoring import ScoreEviction
from .fields import check_fields
from .info import PolicyInfo
from .layer import CacheLayer
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class KNorm(ScoreEviction):
    """Keep the tokens whose keys have the smallest L2 norm (Devoto et al. 2024, section 3).

    Attributes:
        budget: slots in total: a number of tokens, or a fraction of prompt + new tokens.
        dense_layers: first layers, which keep everything. Two as in the paper, because norms predict attention poorly
            there.

    Example:
        >>> policy = kvjax.KNorm(budget=64, dense_layers=0)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('knorm:budget=64,dense_layers=0', 0.45)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="knorm",
        paper="Devoto et al. 2024, A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
        summary="the tokens whose keys have the smallest norm",
        memory="freed",
        stage="both",
    )

    scores_alone: ClassVar[bool] = True

    dense_layers: int = 2

    def __post_init__(self) -> None:
        check_fields(self, dense_layers=0)

    @property
    def query_window(self) -> int:
        return 0

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return DenseLayer(self, spec) if spec.layer < self.dense_layers else super().layer(spec)

    def scores(self, spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B K T"]:
        return -jnp.linalg.norm(prompt.k.astype(jnp.float32), axis=-1).swapaxes(1, 2)

    def initial_score(self, spec: LayerSpec, token: Token) -> Float[Array, "B K"]:
        return -jnp.linalg.norm(token.k.astype(jnp.float32), axis=-1)
