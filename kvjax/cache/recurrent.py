"""`RecurrentState`: what a recurrent layer remembers of a sequence, in arrays whose size does not depend on its length."""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

from .spec import LayerSpec


@flax.struct.dataclass
class RecurrentState:
    """State of a gated delta net. B rows, U tokens before the newest that its convolution reads.

    A row of zeros is the state before the first token.

    Attributes:
        q, k, v: inputs of the convolution at the latest U tokens, oldest first, by channel.
        memory: for each value head a matrix from keys to values, in float32.

    Example:
        >>> from kvjax.config import DeltaNetConfig
        >>> delta = DeltaNetConfig(key_heads=1, value_heads=2, key_dim=4, value_dim=8)
        >>> spec = kvjax.cache.LayerSpec(2, 1, 8, prompt_len=64, new_tokens=64, recurrent=delta)
        >>> kvjax.cache.empty_recurrent(spec).memory.shape  # the same at any length
        (1, 2, 4, 8)
    """

    q: Float[Array, "B Q U"]
    k: Float[Array, "B Q U"]
    v: Float[Array, "B P U"]
    memory: Float[Array, "B M X Y"]


def empty_recurrent(spec: LayerSpec) -> RecurrentState:
    """The state of a recurrent layer before the first token.

    Example:
        >>> from kvjax.config import DeltaNetConfig
        >>> delta = DeltaNetConfig(key_heads=1, value_heads=2, key_dim=4, value_dim=8)
        >>> spec = kvjax.cache.LayerSpec(2, 1, 8, prompt_len=64, new_tokens=64, recurrent=delta)
        >>> state = kvjax.cache.empty_recurrent(spec)
        >>> state.k.shape, state.memory.shape  # rows, channels, latest tokens; rows, value heads, matrix
        ((1, 4, 3), (1, 2, 4, 8))
    """
    config = spec.recurrent
    assert config is not None
    keys, values, before = spec.num_kv_heads * config.key_dim, spec.num_heads * config.value_dim, config.conv - 1
    return RecurrentState(
        q=jnp.zeros((spec.batch, keys, before), spec.dtype),
        k=jnp.zeros((spec.batch, keys, before), spec.dtype),
        v=jnp.zeros((spec.batch, values, before), spec.dtype),
        memory=jnp.zeros((spec.batch, spec.num_heads, config.key_dim, config.value_dim), jnp.float32),
    )
