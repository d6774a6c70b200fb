"""Adding outputs of attention and MLP to the residual stream, with the all-reduce of devices that share a model."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Shard
from kvjax.pallas_kernels import Matrix, projection

from .layer import Layer, biased

SMALL_SUM = 16384
"""Maximum elements of an all-reduce in float32, regardless of the model's type. 64 KiB take as long to send as 32."""


def add_projection(
    layer: Layer,
    x: Float[Array, "... D"],
    h: Float[Array, "... F"],
    matrix: Matrix,
    bias: Array | None,
    norm: Array | None,
    shard: Shard,
) -> Float[Array, "... D"]:
    """Add the projection of `h`, with a bias and a norm if the layer has them, to the residual stream `x`."""
    if shard.model == 1 and norm is None and layer.residual_scale == 1.0:
        return projection(h, matrix, biases=[bias], residual=x)[0]
    (y,) = projection(h, matrix, dtype=_summed_type(x, shard))
    return add_summed(layer, x, y, bias, norm, shard)


def add_summed(
    layer: Layer,
    x: Float[Array, "... D"],
    y: Float[Array, "... D"],
    bias: Array | None,
    norm: Array | None,
    shard: Shard,
) -> Float[Array, "... D"]:
    """Add `y`, of which each device has a summand, to the residual stream `x`. Other arguments as for `add_projection`.

    The model's `residual_scale` multiplies what is added.
    """
    if shard.model > 1:
        y = shard.sum_over_model(y.astype(_summed_type(x, shard)))
    y = biased(y.astype(x.dtype), bias)
    y = layer.normed(y, norm)
    if layer.residual_scale != 1.0:
        y = (y.astype(jnp.float32) * layer.residual_scale).astype(x.dtype)
    return x + y


def _summed_type(x: Array, shard: Shard) -> jnp.dtype:
    """Type of summands: larger ones are rounded to the model's type before the all-reduce."""
    return jnp.dtype(jnp.float32) if shard.model > 1 and x.size <= SMALL_SUM else x.dtype
