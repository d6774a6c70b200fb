"""`Layer`: configuration and parameters of one layer, which all parts of its computation share."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.config import LayerConfig
from kvjax.pallas_kernels import Norm

from .params import Block, Params


def biased(y: Array, bias: Array | None) -> Array:
    """Add a bias, if there is one."""
    return y if bias is None else y + jnp.broadcast_to(bias, y.shape)


class Layer(NamedTuple):
    """One layer of a model.

    Attributes:
        config: the layer's configuration.
        params: its parameters.
        eps: epsilon of its norms.
        norm_offset, residual_scale: see `ModelConfig`.
    """

    config: LayerConfig
    params: Block
    eps: float
    norm_offset: float | None = None
    residual_scale: float = 1.0

    @property
    def is_recurrent(self) -> bool:
        """Whether the layer has a recurrent mixer, and no keys and values."""
        return not self.config.cached

    def norm(self, gain: Float[Array, " _"]) -> Norm:
        """RMS norm with a gain."""
        return Norm(gain, self.eps, self.norm_offset)

    def normed(self, x: Float[Array, "... D"], gain: Float[Array, " D"] | None) -> Float[Array, "... D"]:
        """RMS norm of `x`, or `x` without a gain."""
        return x if gain is None else self.norm(gain)(x)

    def maybe_norm(self, gain: Float[Array, " D"] | None) -> Norm | None:
        """RMS norm with a gain, or None without one."""
        return None if gain is None else self.norm(gain)


def layers_of(params: Params) -> list[Layer]:
    """All layers of a model."""
    c = params.config
    pairs = zip(c.layers, params.layers, strict=True)
    return [Layer(kind, block, c.norm_eps, c.norm_offset, c.residual_scale) for kind, block in pairs]
