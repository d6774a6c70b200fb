"""A vector that is rotated on its way into the cache."""

from typing import NamedTuple

from jaxtyping import Array, Float

from ..rotary import turned_halves


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
        return turned_halves(self.x, self.cos[:, None], self.sin[:, None])
