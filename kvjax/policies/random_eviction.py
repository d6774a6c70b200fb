"""Random tokens: the baseline that any method should beat."""

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
    """Keep random tokens, each head its own: a control.

    Every token draws a number by its position, and the highest numbers stay. At any time, the kept tokens are a uniform
    random subset of the tokens so far. All rows draw the same numbers.

    Attributes:
        budget: slots in total: a number of tokens, or a fraction of prompt + new tokens.
        seed: of the random numbers.

    Example:
        >>> policy = kvjax.Random(budget=64)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('random:budget=64', 0.45)
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
