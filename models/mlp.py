"""The gated MLP of one layer."""

from jaxtyping import Array, Float

from kvjax.cache import Shard
from kvjax.pallas_kernels import Norm, gated_projection, projection
from kvjax.pallas_kernels.activations import gated

from .layer import Layer, biased
from .params import MLP
from .residual import add_projection


def add_mlp(layer: Layer, p: MLP, x: Float[Array, "... D"], shard: Shard) -> Float[Array, "... D"]:
    """Add the output of a layer's MLP to the residual stream `x`."""
    h = hidden_units(p, x, layer.config.mlp.activation, layer.maybe_norm(layer.params.mlp_norm))
    return add_projection(layer, x, h, p.down, p.down_bias, layer.params.mlp_post_norm, shard)


def hidden_units(p: MLP, x: Float[Array, "... D"], activation: str, norm: Norm | None = None) -> Float[Array, "... F"]:
    """Hidden units of a gated MLP: activation(gate(x)) * up(x), with an optional norm of `x`."""
    if p.gate_bias is None and p.up_bias is None and activation == "silu":
        return gated_projection(x, p.gate, p.up, norm=norm)
    gate, up = projection(x, p.gate, p.up, norm=norm)
    return gated(activation, biased(gate, p.gate_bias), biased(up, p.up_bias))
