"""Prefill of whole prompts, as many rows at a time as the device's matrix units need."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import LayerSpec, PromptKV
from kvjax.models import Params, transformer
from kvjax.policies import Policy, PolicyError
from kvjax.policies.layer import CacheLayer, Carry, WrappedLayer, held_bytes
from kvjax.policies.sharded import sharded
from kvjax.runtime import replay

GROUP_TOKENS = 32_768
"""Maximum number of padded prompt tokens that are prefilled together, unless one row has more.

Their activations are in memory beside the weights and the whole cache. More tokens do not make matrix products faster.
"""


def layers_of(policy: Policy, specs: Sequence[LayerSpec]) -> tuple[CacheLayer[Any], ...]:
    """A bound policy's layers, with their slots sharded where devices share them."""
    return tuple(sharded(policy.layer(spec)) for spec in specs)


def read_prompts(
    policy: Policy,
    specs: Sequence[LayerSpec],
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    total: Int[Array, " B"],
) -> tuple[Float[Array, "B V"], tuple[Any, ...]]:
    """Prefill right-padded prompts. If there are many tokens, groups of rows follow one another in a loop.

    Args:
        policy, specs: the policy and each layer's description.
        params: the model.
        tokens, lengths, total: as for `kvjax.models.transformer.prefill`.

    Returns:
        Logits of each row's last token, and one state per layer.
    """
    rows = tokens.shape[0]
    size = rows_together(policy, specs, rows, tokens.shape[1])
    layers = layers_of(policy, [dataclasses.replace(spec, batch=size) for spec in specs])
    read = replay.prefill if replay.replays(layers) else transformer.prefill
    if size == rows:
        return read(params, tokens, lengths, total, layers)

    def group(i: Int[Array, ""], found: tuple[Array, tuple[Any, ...]]) -> tuple[Array, tuple[Any, ...]]:
        logits, caches = found
        # Otherwise XLA computes what depends on weights alone before the loop, such as dequantised or merged copies of all.
        own_params, i = jax.lax.optimization_barrier((params, i))
        part = [jax.lax.dynamic_slice_in_dim(x, i * size, size) for x in (tokens, lengths, total)]
        into = [
            _Into(layer.policy, layer.spec, inner=layer, held=held, at=i * size)
            for layer, held in zip(layers, caches, strict=True)
        ]
        own, caches = read(own_params, part[0], part[1], part[2], into)
        return jax.lax.dynamic_update_slice_in_dim(logits, own, i * size, 0), caches

    logits = jnp.zeros((rows, params.config.vocab_size), jnp.float32)
    return jax.lax.fori_loop(0, rows // size, group, (logits, tuple(_empty(layer, rows) for layer in layers)))


@dataclasses.dataclass(frozen=True)
class _Into(WrappedLayer[Any]):
    """Writes the state of a group of rows into that of all rows, so that no layer's is held twice for long."""

    held: Any = dataclasses.field(kw_only=True)
    at: Int[Array, ""] = dataclasses.field(kw_only=True)

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[Any, Carry]:
        state, carry = self.inner.prefill(prompt, carry)
        return self._written(state), carry

    def advance(self, state: Any) -> Any:
        return self._written(self.inner.advance(state))

    def _written(self, state: Any) -> Any:
        def write(held: Array, own: Array) -> Array:
            if own.shape[1:] != held.shape[1:]:
                raise PolicyError(
                    f"{self.policy.info.name}: `prefill` leaves an array of {list(own.shape)}, but that of `init` is "
                    f"{[own.shape[0], *held.shape[1:]]}; let both leave the same shapes"
                )
            return jax.lax.dynamic_update_slice_in_dim(held, own.astype(held.dtype), self.at, 0)

        return jax.tree.map(write, self.held, state)


def _empty(layer: CacheLayer[Any], rows: int) -> Any:
    """Zeros in the shape of a layer's state, for `rows` rows."""
    return jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), jax.eval_shape(layer.init))


def rows_together(policy: Policy, specs: Sequence[LayerSpec], rows: int, length: int) -> int:
    """Number of rows that are prefilled together, if prompts are padded to `length`: a divisor of `rows`."""
    size = _together(rows, length)
    if size == rows:
        return rows
    layers = layers_of(policy, [dataclasses.replace(spec, batch=size) for spec in specs])
    return size if all(_is_by_rows(layer) for layer in dict.fromkeys(layers)) else rows


def _together(rows: int, length: int) -> int:
    """Largest divisor of `rows` whose padded prompts have at most `GROUP_TOKENS` tokens; at least 1."""
    most = max(GROUP_TOKENS // max(length, 1), 1)
    return max(size for size in range(1, min(rows, most) + 1) if rows % size == 0)


def _is_by_rows(layer: CacheLayer[Any]) -> bool:
    """Whether the first axis of all arrays of a state is that of rows, and all are on the device."""
    leaves = jax.tree.leaves(jax.eval_shape(layer.init))
    return held_bytes(layer)[1] == 0 and all(leaf.shape[:1] == (layer.spec.batch,) for leaf in leaves)
