"""KVgrad: the prompt's tokens that change the model's last hidden states when it repeats the prompt."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .info import PolicyInfo
from .kvzip import THEN, KVzip, Repetition
from .registry import register
from .replay import Part


@register
@dataclasses.dataclass(frozen=True)
class KVgrad(KVzip):
    """Keep what changes the last hidden states when the model repeats the prompt (KVgrad, by kvpress 0.5.5).

    As `KVzip`, with another score. The objective is the sum of the squares of the residual stream after the last layer,
    over all tokens of the part. Its gradient is taken with respect to what the layer's attention adds to the residual
    stream at each query. The attention probability that a query gives to a token is multiplied by two norms: that of
    the gradient at the query, and that of the token's value after the output projection. The score is the maximum over
    queries and over the query heads of the group.

    Each part takes two forward passes and a backward pass, with one layer's attention probabilities in memory.

    Attributes:
        budget, scope, overlap, sinks, prefix, queries, slack: see `KVzip`.
        chunk: tokens that are repeated at a time.

    Example:
        >>> policy = kvjax.KVgrad(budget=64)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('kvgrad:budget=64', 0.47)
    """

    about: ClassVar[PolicyInfo] = dataclasses.replace(
        KVzip.about,
        name="kvgrad",
        paper="NVIDIA 2026, KVgradPress of kvpress 0.5.5 (openreview.net/forum?id=cg1wTCJjjk)",
        summary="the prompt's tokens that change the last hidden states when the model repeats the prompt, more in heads that need more, and all new ones",
    )

    chunk: int = 512
    plus: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def replay(self) -> "Attribution":
        """How the prompt is read again. The words for later parts have no space at their end, as in kvpress."""
        kvzip = super().replay
        as_kvzip = {field.name: getattr(kvzip, field.name) for field in dataclasses.fields(kvzip)}
        return Attribution(**as_kvzip | {"then": THEN.rstrip(), "needs_context": True})


@dataclasses.dataclass(frozen=True)
class Attribution(Repetition):
    """The replay of `KVgrad`: probabilities times norms of values and gradients. Without a model, gradients count as 1."""

    needs_gradients: ClassVar[bool] = True

    def _factors(self, part: Part, places: Int[Array, "B C"]) -> tuple[Float[Array, "B K G C"], Float[Array, "B R"]]:
        values = jnp.take_along_axis(part.prepared, places[:, None, None], axis=-1, mode="clip")
        norms = jnp.ones(part.block.mask.shape) if part.sensitivity is None else part.sensitivity
        return values, jnp.where(part.block.mask, norms, 0.0)
