"""Rotary embedding (Su et al. 2021) by given angles."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


def rotate_halves(
    x: Float[Array, "*B H"], cos: Float[Array, "*#B R"], sin: Float[Array, "*#B R"]
) -> Float[Array, "*B H"]:
    """`x` rotated in float32: channel i of the first half of a head with channel i of the second, as in Llama."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class DeferredRope(NamedTuple):
    """Heads before their rotary embedding, for a kernel that rotates them on the way. Pairs are as in `rotate_halves`.

    Attributes:
        x: unrotated.
        cos, sin: of each pair's angle in each row, in float32.
    """

    x: Float[Array, "B N H"]
    cos: Float[Array, "B R"]
    sin: Float[Array, "B R"]

    def __call__(self) -> Float[Array, "B N H"]:
        """The heads, rotated in float32."""
        return rotate_halves(self.x, self.cos[:, None], self.sin[:, None])


def parts_of(q: Array | DeferredRope) -> tuple[Array, ...]:
    """The heads as they are, and what they are still to be rotated by, if they are."""
    return tuple(q) if isinstance(q, DeferredRope) else (q,)


def heads_of(q: Array | DeferredRope) -> Array:
    """The heads, rotated if they are not yet."""
    return q() if isinstance(q, DeferredRope) else q
