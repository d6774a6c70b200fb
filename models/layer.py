"""`Layer`: configuration and parameters of one layer, which all parts of its computation share."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.config import LayerConfig
from kvjax.pallas_kernels import Norm

from .params import Block, Params


class Layer(NamedTuple):
    """One layer of a model.

    Attributes:
        config: the layer's configuration.
        params: its parameters.
        eps: epsilon of its norms.
    """

    config: LayerConfig
    params: Block
    eps: float

    def norm(self, gain: Float[Array, " _"]) -> Norm:
        """RMS norm with the layer's epsilon."""
        return Norm(gain, self.eps)


def layers_of(params: Params) -> list[Layer]:
    """All layers of a model."""
    config = params.config
    return [Layer(kind, block, config.norm_eps) for kind, block in zip(config.layers, params.layers, strict=True)]


def biased(y: Array, bias: Array | None) -> Array:
    """Add a bias, if there is one."""
    return y if bias is None else y + jnp.broadcast_to(bias, y.shape)
