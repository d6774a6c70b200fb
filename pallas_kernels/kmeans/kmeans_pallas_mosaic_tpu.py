"""Mosaic TPU implementation of `kmeans`, with the kernel of `nearest` that finds the nearest centroids.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must match `reference.py`, except
where rounding decides between centroids.

XLA computes the sums over clusters. On TPUs it creates the one-hot labels only inside the matmul.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from . import nearest_pallas_mosaic_tpu
from .api import nearest
from .lloyd import Distance, Members, lloyd


def unsupported_reason(x: Array, *_: Any, **__: Any) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    return nearest_pallas_mosaic_tpu.unsupported_reason(x, x)


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
    x = jnp.where(mask[:, None, :, None], x, jnp.zeros((), x.dtype))

    def assign(centroids: Array, bias: Array | None) -> Int[Array, "B K T"]:
        return nearest(x, centroids, bias, implementation="tpu", interpret=interpret).place

    def total(labels: Int[Array, "B K T"], _: Members) -> Members:
        member = jax.nn.one_hot(labels, init.shape[2], dtype=x.dtype)  # zeros for masked tokens
        sums = jnp.einsum("bktm,bkth->bkmh", member, x, precision="highest", preferred_element_type=jnp.float32)
        return Members(labels, sums[:, :, None], jnp.sum(member, axis=2, dtype=jnp.float32))

    return lloyd(mask, init, clusters, assign, total, dtype=x.dtype, iterations=iterations, distance=distance)
