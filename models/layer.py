"""`Layer`: configuration and parameters of one layer, which all parts of its computation share."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.config import LayerConfig
from kvjax.pallas_kernels import Norm

from .params import Block, Params


class OffsetNorm(NamedTuple):
    """RMS norm whose gain has an offset. The product with the gain is computed in float32 and rounded once.

    Attributes:
        gain: factor of each channel, less the offset.
        eps: added to the mean square.
        offset: added to the gain.
    """

    gain: Float[Array, " D"]
    eps: float
    offset: float

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Return x / sqrt(mean(x²) + eps) · (gain + offset)."""
        wide = Norm(self.gain, self.eps).unit(x)
        gain = self.gain.astype(jnp.float32) + self.offset
        return (wide * jnp.broadcast_to(gain, wide.shape)).astype(x.dtype)


def norm_of(gain: Float[Array, " _"], eps: float, offset: float | None) -> Norm | OffsetNorm:
    """RMS norm. `offset` as `norm_offset` of `ModelConfig`."""
    return Norm(gain, eps) if offset is None else OffsetNorm(gain, eps, offset)


def fused_norm(x: Float[Array, "... D"], norm: Norm | OffsetNorm) -> tuple[Array, Norm | None]:
    """Inputs of projections that follow a norm, and the norm that their kernels apply. Kernels have only the plain `Norm`."""
    return (x, norm) if isinstance(norm, Norm) else (norm(x), None)


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

    def norm(self, gain: Float[Array, " _"]) -> Norm | OffsetNorm:
        """RMS norm with a gain."""
        return norm_of(gain, self.eps, self.norm_offset)

    def normed(self, x: Float[Array, "... D"], gain: Float[Array, " D"] | None) -> Float[Array, "... D"]:
        """RMS norm of `x`, or `x` without a gain."""
        return x if gain is None else self.norm(gain)(x)

    def inputs(self, x: Float[Array, "... D"], gain: Float[Array, " D"] | None) -> tuple[Array, Norm | None]:
        """Inputs of projections that follow a norm, if there is one, and the norm that the projections apply to them."""
        return (x, None) if gain is None else fused_norm(x, self.norm(gain))


def layers_of(params: Params) -> list[Layer]:
    """All layers of a model."""
    c = params.config
    pairs = zip(c.layers, params.layers, strict=True)
    return [Layer(kind, block, c.norm_eps, c.norm_offset, c.residual_scale) for kind, block in pairs]
