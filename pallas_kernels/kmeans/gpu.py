"""k-means on GPUs: a Pallas body searches for the nearest centroid, and XLA scatters integers.

Floating-point sums depend on the order in which atomic additions happen to arrive; sums of integers do not. So tokens are added up as
integers, and equal inputs give equal clusters at the speed of a scatter, a third of the time of products with one-hot labels.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..nearest import gpu as nearest
from .lloyd import Distance, lloyd

BITS = 30
"""Of the integers' 31 that hold the largest sum there can be; the last one is for what rounding adds."""


def refuses(x: Array) -> str | None:
    """Why this body does not serve a case, or None if it does."""
    return nearest.refuses(x, x)


def kmeans(
    x: Float[Array, "B K T H"],
    mask: Bool[Array, "B T"],
    init: Float[Array, "B K M H"],
    clusters: Int[Array, " B"],
    *,
    iterations: int,
    distance: Distance,
    interpret: bool = False,
) -> tuple[Float[Array, "B K M H"], Int[Array, "B K T"]]:
    """Lloyd's algorithm; see the public function."""
    largest = jnp.max(jnp.where(mask[:, None, :, None], jnp.abs(x), jnp.zeros((), x.dtype)), axis=2)

    def assign(centroids: Array, bias: Array) -> Int[Array, "B K T"]:
        return nearest.nearest(x, centroids, bias, interpret=interpret).place

    total = functools.partial(cluster_sums, x, largest.astype(jnp.float32), size=init.shape[2])
    return lloyd(mask, init, clusters, assign, total, dtype=x.dtype, iterations=iterations, distance=distance)


def cluster_sums(
    x: Float[Array, "B K T H"], largest: Float[Array, "B K H"], labels: Int[Array, "B K T"], *, size: int
) -> tuple[Float[Array, "B K M H"], Float[Array, "B K M"]]:
    """The sum over each cluster's tokens and their number, in float32, whatever the order of additions.

    Tokens are rounded to multiples of a power of two: the least that keeps the sum over the fullest cluster inside 32 bits, were
    every token in it the channel's largest. With n tokens in that cluster a channel keeps 30 - log2 n bits below its largest value.

    Args:
        largest: each channel's largest absolute value.
        labels: each token's cluster; tokens with labels of `size` or more belong to none, and may hold anything.
    """
    count = jax.vmap(jax.vmap(functools.partial(jax.ops.segment_sum, num_segments=size)))
    counts = count(jnp.ones_like(labels), labels)
    fullest = jnp.max(counts, axis=-1).astype(jnp.float32)
    _, exponent = jnp.frexp(largest * fullest[..., None])
    step = (exponent - BITS)[:, :, None]
    whole = jnp.round(jnp.ldexp(x.astype(jnp.float32), -step)).astype(jnp.int32)
    return jnp.ldexp(count(whole, labels).astype(jnp.float32), step), counts.astype(jnp.float32)
