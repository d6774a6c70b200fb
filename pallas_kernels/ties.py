"""Comparison of scores up to rounding, so that rounding errors do not decide which tokens are kept.

Scores that are mathematically equal, such as those of a repeated token, can differ by a few units in the last place.
The order among them then depends on the batch size, on padding and on the program. Scores that differ by less than such
a rounding error therefore count as equal, and the lower index wins.

Rounding the scores to a grid would not help: values close to the edge of a grid step can round either way.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

NEAR = 128
"""Largest difference of float32 scores that count as equal, in units in the last place. It is at most `SHARE`."""

SHARE = 2.0**-16
"""Largest relative difference of scores that count as equal."""


def exceeds(a: Float[Array, "*#S"], b: Float[Array, "*#S"]) -> Bool[Array, "*S"]:
    """Return whether scores in `a` are larger than those in `b` by more than rounding. Scores are finite or -inf.

    Example:
        >>> a, b = jnp.asarray([1.0, 1.1]), jnp.asarray([1.0 - 1e-7, 1.0])
        >>> kvjax.pallas_kernels.exceeds(a, b).tolist()  # 1e-7 is rounding
        [False, True]
    """
    return a - SHARE * jnp.abs(a) > b
