"""What a model has around a layer's attention, for methods that weigh values by what the model makes of them."""

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
"""Values whose products are made at a time: 1024 x N x H numbers in float32 exist at once."""


@dataclasses.dataclass(frozen=True)
class AttentionContext:
    """Of one layer that asks for it by `CacheLayer.needs_context`: in the carry of its `prefill` and `read_block`.

    Attributes:
        inputs: gives what attention's projections read, normed: [B, S, D], or one for all; computed if it is called.
        output: gives the output projection of every query head, [N, H, D], likewise.
    """

    inputs: Callable[[], Float[Array, "#B #S D"]]
    output: Callable[[], Float[Array, "N H D"]]

    @classmethod
    def of(cls, carry: dict[str, Any], spec: LayerSpec) -> Self:
        """That of the layer whose turn it is; of one without a model, as in benchmarks of layers, `alone`."""
        return carry.get(_NAME, cls.alone(spec))

    @classmethod
    def alone(cls, spec: LayerSpec) -> Self:
        """Of a layer without a model: values count as they are, and inputs are of length 1."""
        heads = (spec.num_heads, spec.head_dim, spec.head_dim)
        return cls(lambda: jnp.ones((1, 1, 1)), lambda: jnp.broadcast_to(jnp.eye(spec.head_dim), heads))

    def with_context(self, carry: dict[str, Any]) -> dict[str, Any]:
        """The carry with it."""
        return {**carry, _NAME: self}

    def output_of(self, spec: LayerSpec) -> Float[Array, "K G H D"]:
        """The output projection of the KV heads that a layer has, by query heads of their groups, in float32."""
        found, group = self.output(), spec.num_heads // spec.num_kv_heads
        if len(found) != spec.num_heads and spec.kv_heads is not None:
            found = found[query_heads(np.asarray(spec.kv_heads), group)]
        return found.astype(jnp.float32).reshape(spec.num_kv_heads, group, *found.shape[1:])


def projected_norms(
    spec: LayerSpec, around: AttentionContext, values: Float[Array, "B K T H"]
) -> Float[Array, "B K G T"]:
    """How long the model's output is made by each value alone, by query head: the Euclidean norm of its output projection."""
    output, size = around.output_of(spec), values.shape[2]
    gram = jnp.einsum("kghd,kgjd->kghj", output, output, precision="highest")
    step = min(TOKENS, size)
    padded = jnp.pad(values.astype(jnp.float32), ((0, 0), (0, 0), (0, -size % step), (0, 0)))
    blocks = jnp.moveaxis(padded.reshape(*values.shape[:2], -1, step, values.shape[-1]), 2, 0)

    def squares(block: Float[Array, "B K C H"]) -> Float[Array, "B K G C"]:
        return jnp.einsum("bkth,kghj,bktj->bkgt", block, gram, block, precision="highest")

    found = jnp.moveaxis(jax.lax.map(squares, blocks), 0, 3)
    return jnp.sqrt(jnp.maximum(found.reshape(*found.shape[:3], -1)[..., :size], 0.0))
