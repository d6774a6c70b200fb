"""The MLP of one layer."""

from collections.abc import Callable, Mapping
from functools import partial

import jax
from jaxtyping import Array, Float

from kvjax.pallas_kernels import gated_projection, projection

from .layer import Layer, biased

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
"""Activations of `MLPConfig` by name."""


def hidden_units(layer: Layer, x: Float[Array, "... D"]) -> Float[Array, "... F"]:
    """Hidden units of a gated MLP with the residual stream `x`: activation(gate(y)) * up(y) of the normalised y."""
    p, activation = layer.params.mlp, layer.config.mlp.activation
    x, norm = layer.inputs(x, layer.params.mlp_norm)
    if p.gate_bias is None and p.up_bias is None and activation == "silu":
        return gated_projection(x, p.gate, p.up, norm=norm)
    gate, up = projection(x, p.gate, p.up, norm=norm)
    return ACTIVATIONS[activation](biased(gate, p.gate_bias)) * biased(up, p.up_bias)
