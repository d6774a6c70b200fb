"""Activations of gated MLPs."""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
"""Activations of the gate, by the names that `MLPConfig` and `MoEConfig` give them. Kernels compute these."""

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Factor on the gate inside its sigmoid, and limit of gate and up projection, of "clamped_swiglu"."""


def gated(activation: str, gate: Float[Array, "*S F"], up: Float[Array, "*S F"]) -> Float[Array, "*S F"]:
    """Hidden units of a gated MLP: activation(gate) · up.

    "clamped_swiglu" (gpt-oss) is gate · sigmoid(1.702 · gate) · (up + 1), with a gate of at most 7 and `up` between -7 and 7.
    """
    if activation != "clamped_swiglu":
        return ACTIVATIONS[activation](gate) * up
    gate, up = jnp.minimum(gate, SWIGLU_LIMIT), jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * jax.nn.sigmoid(gate * SWIGLU_ALPHA) * (up + 1)
