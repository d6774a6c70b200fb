"""The MLP of one layer."""

import jax
from jaxtyping import Array, Float

from kvjax.pallas_kernels import gated_projection, projection

from .layer import Layer, biased


def hidden_units(layer: Layer, x: Float[Array, "... D"]) -> Float[Array, "... F"]:
    """Hidden units of a gated MLP with the residual stream `x`: silu(gate(y)) * up(y) of the normalised y."""
    p, norm = layer.params.mlp, layer.norm(layer.params.mlp_norm)
    if p.gate_bias is None and p.up_bias is None:
        return gated_projection(x, p.gate, p.up, norm=norm)
    gate, up = projection(x, p.gate, p.up, norm=norm)
    return jax.nn.silu(biased(gate, p.gate_bias)) * biased(up, p.up_bias)
