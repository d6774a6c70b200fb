"""KVgrad: the prompt's tokens that change the model's last hidden states when it repeats the prompt."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .info import PolicyInfo
from .kvzip import FIRST, THEN, KVzip, Repetition
from .registry import register
from .replay import Part


@register
@dataclasses.dataclass(frozen=True)
class KVgrad(KVzip):
    """Keep what changes the last hidden states when the model repeats the prompt (KVgrad, by kvpress 0.5.5).

    As `KVzip`, with another score. The attention probability that a query gives to a token is multiplied by two norms:
    that of the token's value after the output projection, and that of the gradient of an objective with respect to what
    the layer's attention adds to the residual stream at the query. The objective is the sum of the squares of the
    residual stream after the last layer, over all tokens that are read now. The score is the maximum over queries and
    over the query heads of the group.

    Each part takes two forward passes and a backward pass, with one layer's attention probabilities in memory. While
    gradients are computed, XLA computes all operations, because Pallas kernels have no gradient.

    kvpress shares one budget among all layers: `scope="model"`.

    Attributes:
        budget, scope, overlap, sinks, prefix, queries, slack: see `KVzip`.
        chunk: tokens that are repeated at a time.
    """

    about: ClassVar[PolicyInfo] = dataclasses.replace(
        KVzip.about,
        name="kvgrad",
        paper="KVgrad (openreview.net/forum?id=cg1wTCJjjk), by KVgradPress of kvpress 0.5.5",
        summary="the prompt's tokens that change the last hidden states when the model repeats the prompt, more in heads that need more, and all new ones",
    )

    chunk: int = 512
    plus: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def replay(self) -> "Attribution":
        """How the prompt is read again. The words for later parts have no space at their end, as in kvpress."""
        overlap, part_only = min(self.overlap, self.chunk), self.queries == "repeat"
        return Attribution(self.chunk, overlap, self.prefix, FIRST, THEN.rstrip(), True, self.sinks, part_only)


@dataclasses.dataclass(frozen=True)
class Attribution(Repetition):
    """The replay of `KVgrad`: probabilities times norms of values and gradients. Without a model, gradients count as 1."""

    needs_gradients: ClassVar[bool] = True

    def _factors(self, part: Part, length: int) -> tuple[Float[Array, "B K G C"], Float[Array, "B R"]]:
        values = jax.lax.dynamic_slice_in_dim(part.prepared, part.start, length, axis=-1)
        norms = jnp.ones(part.block.mask.shape) if part.sensitivity is None else part.sensitivity
        return values, jnp.where(part.block.mask, jax.lax.stop_gradient(norms), 0.0)
