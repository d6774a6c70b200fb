"""Activations of gated MLPs."""

from collections.abc import Callable, Mapping
from functools import partial

import jax
from jaxtyping import Array

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
"""Activations by the names that `MLPConfig` and `MoEConfig` give them."""
