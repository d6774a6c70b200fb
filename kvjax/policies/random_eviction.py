"""Tokens kept at random: what any method has to be better than."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import LayerSpec, PromptKV, Token

from .families.noise import uniform, uniform_by_head
from .families.scoring import ScoreEviction
from .info import PolicyInfo
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class Random(ScoreEviction):
    """Keep tokens at random, each head its own: a control.

    Every token draws a number by its position, and those with the highest stay; so what is kept is at all times a uniform
    random choice of the tokens so far. Rows draw the same numbers.

    Attributes:
        budget: slots in all: a number of tokens, or a fraction of prompt + new tokens.
        seed: of the numbers drawn.
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="random", paper="none: a control", summary="tokens at random", memory="freed", stage="both"
    )

    scores_alone: ClassVar[bool] = True

    seed: int = 0

    @property
    def query_window(self) -> int:
        return 0

    def scores(self, spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B K T"]:
        return uniform_by_head(spec, self.seed, jnp.maximum(prompt.pos, 0))

    def initial_score(self, spec: LayerSpec, token: Token) -> Float[Array, "B K"]:
        return uniform(spec, self.seed, token.position).T
