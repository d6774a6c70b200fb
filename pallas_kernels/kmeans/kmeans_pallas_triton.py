"""k-means on GPUs: one Pallas kernel searches for the nearest centroid, another moves tokens from one cluster's sum to another's.

Atomic additions arrive in any order, and floating-point sums depend on it where they round. So tokens are rounded first, to multiples
of one power of two, so coarse that no sum needs more than float32's 24 bits: then none rounds, and equal inputs give equal
clusters. And a token may as well be taken out of a sum again: after the first iteration only tokens that change their cluster move,
which of random ones every fifth does, and after six iterations one in fifty. (Of 8 x 32768 tokens, 128 channels, 410 clusters, 20
iterations take 2.4 ms on an H200. With XLA's scatters, which look at every channel of every token, it was 3.5 ms, whether all tokens were
added anew or some moved. Sums of integers need no room for the fullest cluster, and five kernels an iteration instead of fourteen, but
took 2.9 ms: the additions themselves were slower, perhaps as the GPU adds four floats at once and integers one by one.)
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from . import nearest_pallas_triton
from .api import nearest
from .lloyd import Distance, Members, lloyd
from .transfer import transfer

BITS = 22
"""Of the 24 that float32 holds exactly: one is for tokens that are there already while others are there still, one for what rounding adds."""

BLOCK = 64
"""Centroids are filled up to a multiple of this, with some that get no tokens, so that the search takes whole blocks of them."""

LEAST_EXPONENT = -80
"""Of sums: channels with smaller values in them add up to zero."""


def unsupported_reason(x: Array, *_: Any, **__: Any) -> str | None:
    """Why this kernel does not serve a case, or None if it does."""
    return nearest_pallas_triton.unsupported_reason(x, x)


@functools.partial(jax.jit, static_argnames=("iterations", "distance", "interpret"))
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
    """Lloyd's algorithm, traced once for all layers; see the public function."""
    held, size = init.shape[2], -(-init.shape[2] // BLOCK) * BLOCK
    init = jnp.pad(init, ((0, 0), (0, 0), (0, size - held), (0, 0)))
    largest = jnp.max(jnp.where(mask[:, None, :, None], jnp.abs(x), jnp.zeros((), x.dtype)), axis=2)

    def assign(centroids: Array, bias: Array | None) -> Int[Array, "B K T"]:
        return nearest(x, centroids, bias, implementation="gpu", interpret=interpret).place

    total = functools.partial(moved, x, largest.astype(jnp.float32), interpret=interpret)
    centroids, labels = lloyd(
        mask,
        init,
        clusters,
        assign,
        total,
        dtype=x.dtype,
        iterations=iterations,
        distance=distance,
        parts=parts(x.dtype),
    )
    return centroids[:, :, :held], jnp.minimum(labels, held)


def parts(dtype: Any) -> int:
    """In how many parts tokens are added up: wider ones than 16 bits in two, the second of which holds what the first has rounded off."""
    return 1 if jnp.dtype(dtype).itemsize == 2 else 2


def moved(
    x: Float[Array, "B K T H"],
    largest: Float[Array, "B K H"],
    labels: Int[Array, "B K T"],
    before: Members,
    *,
    interpret: bool = False,
) -> Members:
    """The sum over each cluster's tokens and their number, whatever the order of additions.

    With room for n tokens, a power of two, in the fullest cluster, tokens keep 22 - log2(n) bits below their channel's largest value.
    Where the room changes, sums begin anew.

    Args:
        largest: each channel's largest absolute value.
        labels: each token's cluster; tokens with labels of M or more belong to none, and may hold anything.
    """
    size = before.counts.shape[2]

    def where(those: Array, labels: Array) -> Array:
        return jnp.where(those, jnp.minimum(labels, size), size)

    add = jax.vmap(
        jax.vmap(lambda counts, at, number: counts.at[at].add(number, mode="drop"), (0, 0, None)), (0, 0, None)
    )
    changed = labels != before.labels
    counts = add(add(before.counts, where(changed, before.labels), -1.0), where(changed, labels), 1.0)
    room, had = (jnp.frexp(jnp.max(c, axis=-1))[1] for c in (counts, before.counts))
    anew = (room != had)[..., None]
    units = []
    for _ in range(before.sums.shape[2]):
        exponent = jnp.maximum(jnp.frexp(largest)[1] + room[..., None], LEAST_EXPONENT)
        units.append(largest := jnp.ldexp(jnp.ones((), jnp.float32), exponent - BITS))
    sums = transfer(
        jnp.where(anew[..., None, None], 0.0, before.sums),
        x,
        jnp.stack(units, axis=2),
        where(changed & ~anew, before.labels),
        where(changed | anew, labels),
        interpret=interpret,
    )
    return Members(labels, sums, counts)
