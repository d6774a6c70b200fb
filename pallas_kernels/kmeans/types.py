"""Result type of `nearest`."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Nearest(NamedTuple):
    """The best key of each query.

    Attributes:
        score: the key's score in float32, -inf if all keys are excluded.
        place: the key's index; the first of equal keys, and 0 if all keys are excluded.

    Example:
        >>> keys, bias = jnp.asarray([[0.0, 2.0], [3.0, 0.0]]), jnp.full(2, -jnp.inf)  # all keys are excluded
        >>> found = kvjax.pallas_kernels.nearest(jnp.asarray([[1.0, 0.0]]), keys, bias)
        >>> found.score.tolist(), found.place.tolist()
        ([-inf], [0])
    """

    score: Float[Array, "*B N"]
    place: Int[Array, "*B N"]
