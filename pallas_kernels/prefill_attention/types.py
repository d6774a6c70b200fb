"""What block attention may be told besides queries and slots."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class Run(NamedTuple):
    """Slots that stand as they came: what is kept, and right after it the tokens whose queries are asked, in order.

    The slot of row b's query s is `own + s` in every head, though its token's key may stand there or, past a row's end, nothing.

    Attributes:
        first: slots before it are free.
        own: slot of the first query's token; each slot from `first` on and before it holds an earlier token or is free.
    """

    first: Int[Array, "B K"]
    own: Int[Array, "B K"]


class Stripes(NamedTuple):
    """Which part of all slots is given: every `parts`-th of their stripes, from stripe `part` on.

    Attributes:
        width: slots of a stripe.
        parts: among which stripes are dealt in turn.
        part: which of them this is, from 0.
    """

    width: int
    parts: int
    part: Int[Array, ""]

    def below(self, slot: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """How many of this part stand before a slot, counted among all."""
        width, round_ = (jnp.asarray(n, jnp.int32) for n in (self.width, self.width * self.parts))
        of_last = jax.lax.rem(slot, round_) - self.part * width
        return jax.lax.div(slot, round_) * width + jnp.minimum(jnp.maximum(of_last, 0), width)

    def among_all(self, slot: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """Where a slot of this part stands among all."""
        width = jnp.asarray(self.width, jnp.int32)
        stripe = jax.lax.div(slot, width) * self.parts + self.part
        return stripe * width + jax.lax.rem(slot, width)
