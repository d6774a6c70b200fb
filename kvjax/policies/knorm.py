"""The norm of its key tells how little a token will be attended to."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import LayerSpec

from .base import check_fields
from .registry import register
from .scoring import Evicting


@register
@dataclasses.dataclass(frozen=True)
class KNorm(Evicting):
    """Keep the tokens whose keys have the smallest L2 norm (Devoto et al. 2024, section 3).

    Attributes:
        budget: slots in all: a number of tokens, or a fraction of prompt + new tokens.
        exempt: first layers, which keep everything: two, as in the paper, where norms there tell little of attention.
    """

    name: ClassVar[str] = "knorm"
    paper: ClassVar[str] = "Devoto et al. 2024, A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression"
    keeps: ClassVar[str] = "the tokens whose keys have the smallest norm"

    exempt: int = 2

    def __post_init__(self) -> None:
        check_fields(self, exempt=0)
        super().__post_init__()

    def rows(self, spec: LayerSpec, lengths: Int[Array, " B"]) -> Int[Array, " B"]:
        return lengths + spec.new_tokens if spec.layer < self.exempt else super().rows(spec, lengths)

    def most(self, spec: LayerSpec) -> int:
        return spec.max_tokens if spec.layer < self.exempt else super().most(spec)

    def scores(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
    ) -> Float[Array, "B K T"]:
        return -jnp.linalg.norm(k.astype(jnp.float32), axis=-1).swapaxes(1, 2)

    def arrival(self, spec: LayerSpec, k: Float[Array, "B K H"], pos: Int[Array, " B"]) -> Float[Array, "B K"]:
        return -jnp.linalg.norm(k.astype(jnp.float32), axis=-1)
