"""Argument type of `cluster_tokens`."""

from typing import NamedTuple

from jaxtyping import Array, Int


class Always(NamedTuple):
    """Tokens that every query reads in addition to those of its clusters. They follow those in the result.

    Attributes:
        first: number of a sequence's first tokens.
        latest: maximum number of its latest tokens.
        tail: position of the first of the latest tokens.
        seen: number of tokens per sequence.
        places: length of the whole result: tokens of clusters, `first`, `latest` and padding.

    Example:
        >>> Always = kvjax.pallas_kernels.Always
        >>> always = Always(first=1, latest=2, tail=jnp.asarray([5]), seen=jnp.asarray([6]), places=8)
        >>> scores, sizes, starts = jnp.asarray([[[[1.0, 2.0]]]]), jnp.asarray([[[2, 2]]]), jnp.asarray([[[0, 2]]])
        >>> order, room = jnp.asarray([[[1, 3, 2, 4]]]), jnp.asarray([2])
        >>> found, valid = kvjax.pallas_kernels.cluster_tokens(scores, sizes, starts, order, room, 4, always)
        >>> sorted(found[valid].tolist())  # cluster 1, the first token and the tail
        [0, 2, 3, 4]
    """

    first: int
    latest: int
    tail: Int[Array, " B"]
    seen: Int[Array, " B"]
    places: int
