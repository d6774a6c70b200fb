"""Tokens kept at random: what any method has to be better than."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import LayerSpec

from .noise import uniform
from .registry import register
from .scoring import Evicting


@register
@dataclasses.dataclass(frozen=True)
class Random(Evicting):
    """Keep tokens at random, each head its own: a control.

    Every token draws a number by its position, and those with the highest stay; so what is kept is at all times a uniform
    random choice of the tokens so far. Rows draw the same numbers.

    Attributes:
        budget: slots in all: a number of tokens, or a fraction of prompt + new tokens.
        seed: of the numbers drawn.
    """

    name: ClassVar[str] = "random"
    paper: ClassVar[str] = "none: a control"
    keeps: ClassVar[str] = "tokens at random"

    seed: int = 0

    def scores(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
    ) -> Float[Array, "B K T"]:
        drawn = uniform(spec, self.seed, jnp.arange(k.shape[1], dtype=jnp.int32))
        return jnp.broadcast_to(drawn, (k.shape[0], *drawn.shape))

    def arrival(self, spec: LayerSpec, k: Float[Array, "B K H"], pos: Int[Array, " B"]) -> Float[Array, "B K"]:
        return uniform(spec, self.seed, pos).T
