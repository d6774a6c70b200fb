"""Optional arguments of block attention, which describe the order of the slots."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class Run(NamedTuple):
    """Slots in order of position: the kept tokens, immediately followed by the tokens of the queries.

    Query s of a sequence belongs to slot own + s in every head. Slots after the end of a sequence are free.

    Attributes:
        first: slots before it are free.
        own: slot of the first query's token. Slots from `first` up to it contain earlier tokens or are free.

    Example:
        >>> x, pos = jax.random.normal(jax.random.key(0), (1, 1, 6, 4)), jnp.arange(6)[None, None]
        >>> run = kvjax.pallas_kernels.Run(first=jnp.asarray([[0]]), own=jnp.asarray([[4]]))
        >>> q, at = x[:, 0, 4:, None], jnp.asarray([[4, 5]])
        >>> kvjax.pallas_kernels.block_attention(q, x, x, at, pos, scale=0.5, run=run).shape
        (1, 2, 1, 4)
    """

    first: Int[Array, "B K"]
    own: Int[Array, "B K"]


class Stripes(NamedTuple):
    """Which slots of the whole cache are in this part, if the slots are sharded block-cyclically in stripes.

    Attributes:
        width: slots per stripe.
        parts: number of parts. Part p has the stripes p, p + parts, p + 2 · parts, and so on.
        part: index of this part.

    Example:
        >>> stripes = kvjax.pallas_kernels.Stripes(width=32, parts=2, part=jnp.asarray(1))
        >>> stripes.width * int(stripes.part)  # its first slot; it has 32 to 63, 96 to 127, …
        32
    """

    width: int
    parts: int
    part: Int[Array, ""]

    def below(self, slot: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """Return how many slots of this part precede slot `slot` of the whole cache."""
        width, round_ = (jnp.asarray(n, jnp.int32) for n in (self.width, self.width * self.parts))
        of_last = jax.lax.rem(slot, round_) - self.part * width
        return jax.lax.div(slot, round_) * width + jnp.minimum(jnp.maximum(of_last, 0), width)

    def among_all(self, slot: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """Return the slot number in the whole cache of slot `slot` of this part."""
        width = jnp.asarray(self.width, jnp.int32)
        stripe = jax.lax.div(slot, width) * self.parts + self.part
        return stripe * width + jax.lax.rem(slot, width)
