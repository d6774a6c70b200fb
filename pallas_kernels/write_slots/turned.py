"""A vector that is rotated on its way into the cache."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Turned(NamedTuple):
    """Keys before their rotary embedding. Channel i of the first half of a head pairs with channel i of the second, as in Llama.

    Attributes:
        x: unrotated keys.
        cos, sin: of each pair's angle in each row, in float32.
    """

    x: Float[Array, "B K H"]
    cos: Float[Array, "B R"]
    sin: Float[Array, "B R"]

    def __call__(self) -> Float[Array, "B K H"]:
        """The keys, rotated in float32."""
        a, b = jnp.split(self.x.astype(jnp.float32), 2, axis=-1)
        cos, sin = self.cos[:, None], self.sin[:, None]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(self.x.dtype)
