"""Prefill of whole prompts, as many rows at a time as the device's matrix units need."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from kvjax.cache import LayerSpec
from kvjax.models import Params, transformer
from kvjax.policies import Policy
from kvjax.policies.base import CacheLayer, held_bytes
from kvjax.policies.sharded import sharded
from kvjax.runtime import replay

AT_ONCE = 32_768
"""Padded prompt tokens that are prefilled together at most, unless one row has more.

Activations of the rows that are prefilled together are in memory beside the weights and the whole cache. More tokens
do not make matrix products faster.
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
    layers = layers_of(policy, [dataclasses.replace(spec, batch=_together(rows, tokens.shape[1])) for spec in specs])
    size = layers[0].spec.batch
    if size < rows and not all(_is_by_rows(layer) for layer in dict.fromkeys(layers)):
        layers, size = layers_of(policy, specs), rows
    read = replay.prefill if replay.replays(layers) else transformer.prefill
    if size == rows:
        return read(params, tokens, lengths, total, layers)
    groups = jax.tree.map(lambda x: x.reshape(rows // size, size, *x.shape[1:]), (tokens, lengths, total))
    found = jax.lax.map(lambda group: read(params, group[0], group[1], group[2], layers), groups)
    return jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), found)


def _together(rows: int, length: int) -> int:
    """Number of rows that are prefilled together: a divisor of `rows`."""
    most = max(AT_ONCE // max(length, 1), 1)
    return max(size for size in range(1, min(rows, most) + 1) if rows % size == 0)


def _is_by_rows(layer: CacheLayer[Any]) -> bool:
    """Whether the first axis of all arrays of a state is that of rows, and all are on the device."""
    leaves = jax.tree.leaves(jax.eval_shape(layer.init))
    return held_bytes(layer)[1] == 0 and all(leaf.shape[:1] == (layer.spec.batch,) for leaf in leaves)
