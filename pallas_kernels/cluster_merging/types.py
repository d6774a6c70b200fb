"""Argument and result type of cluster merging."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Clusters(NamedTuple):
    """Tokens and clusters of tokens, in order of position.

    Attributes:
        k, v: keys and values; for a cluster, the means over its tokens.
        pos: original position; for a cluster, the position of its newest token.
        weight: number of tokens that each entry represents.

    Example:
        >>> x = jnp.asarray([[[[1.0], [3.0], [8.0], [9.0]]]])
        >>> tokens = kvjax.pallas_kernels.Clusters(k=x, v=x, pos=jnp.arange(4)[None, None], weight=jnp.ones((1, 1, 4)))
        >>> tokens.k.shape, tokens.weight.sum().item()  # four tokens
        ((1, 1, 4, 1), 4.0)
    """

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    pos: Int[Array, "B K S"]
    weight: Float[Array, "B K S"]
