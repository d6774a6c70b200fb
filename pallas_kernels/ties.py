"""When two scores are equal: up to the rounding of sums, which must not decide what is kept.

Scores that are equal by construction, as those of a repeated token, come out a few units in the last place apart, and which is the
higher differs with the size of the batch, with padding and between programs. So scores that differ by less than any such rounding
count as equal, and their places decide. Rounding scores to a grid would not do: what lies at the edge of a step falls on either side.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

NEAR = 128
"""Units in the last place of a float32 that equal scores may be apart, which are up to `SHARE` of it."""

SHARE = 2.0**-16


def exceeds(a: Float[Array, "*#S"], b: Float[Array, "*#S"]) -> Bool[Array, "*S"]:
    """Whether scores, finite ones or -inf, are above others, and not merely by rounding."""
    return a - SHARE * jnp.abs(a) > b
