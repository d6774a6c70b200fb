"""A layer's attention inputs and output projection, for methods that weigh values by their effect on the output."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache import LayerSpec
from kvjax.pallas_kernels.head_shards import query_heads

_NAME = "attention_context"

TOKENS = 1024
"""Values per iteration of `projected_norms`, which materialises 1024 x N x H numbers in float32."""


@dataclasses.dataclass(frozen=True)
class AttentionContext:
    """Attention inputs and output projection of one layer, in the carry of `prefill` and `read_block`.

    Layers request them by `CacheLayer.needs_context`. Both are functions, computed only when called.

    Attributes:
        inputs: returns the normed inputs of the attention projections, [B, S, D]. Axes may have size 1.
        output: returns the output projection of each query head, [N, H, D].
    """

    inputs: Callable[[], Float[Array, "#B #S D"]]
    output: Callable[[], Float[Array, "N H D"]]

    @classmethod
    def of(cls, carry: dict[str, Any], spec: LayerSpec) -> Self:
        """Return the context in the carry, or `alone` where there is no model, as in benchmarks of layers."""
        return carry.get(_NAME, cls.alone(spec))

    @classmethod
    def alone(cls, spec: LayerSpec) -> Self:
        """Return a context for a layer without a model: an identity projection, and inputs of width 1."""
        heads = (spec.num_heads, spec.head_dim, spec.head_dim)
        return cls(lambda: jnp.ones((1, 1, 1)), lambda: jnp.broadcast_to(jnp.eye(spec.head_dim), heads))

    def with_context(self, carry: dict[str, Any]) -> dict[str, Any]:
        """Return the carry with this context."""
        return {**carry, _NAME: self}

    def output_of(self, spec: LayerSpec) -> Float[Array, "K G H D"]:
        """Return the output projection of a layer's KV heads by query head of their groups, in float32."""
        found, group = self.output(), spec.num_heads // spec.num_kv_heads
        if len(found) != spec.num_heads and spec.kv_heads is not None:
            found = found[query_heads(np.asarray(spec.kv_heads), group)]
        return found.astype(jnp.float32).reshape(spec.num_kv_heads, group, *found.shape[1:])


def projected_norms(
    spec: LayerSpec, around: AttentionContext, values: Float[Array, "B K T H"]
) -> Float[Array, "B K G T"]:
    """Return the norm that each value has after the output projection, by query head: its effect on the output.

    It has no derivative, which would be NaN for padding.
    """
    output, values = jax.lax.stop_gradient((around.output_of(spec), values))
    size = values.shape[2]
    gram = jnp.einsum("kghd,kgjd->kghj", output, output, precision="highest")
    step = min(TOKENS, size)
    padded = jnp.pad(values.astype(jnp.float32), ((0, 0), (0, 0), (0, -size % step), (0, 0)))
    blocks = jnp.moveaxis(padded.reshape(*values.shape[:2], -1, step, values.shape[-1]), 2, 0)

    def squares(block: Float[Array, "B K C H"]) -> Float[Array, "B K G C"]:
        return jnp.einsum("bkth,kghj,bktj->bkgt", block, gram, block, precision="highest")

    found = jnp.moveaxis(jax.lax.map(squares, blocks), 0, 3)
    return jnp.sqrt(jnp.maximum(found.reshape(*found.shape[:3], -1)[..., :size], 0.0))
