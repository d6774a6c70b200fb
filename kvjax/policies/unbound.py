"""What is wrong with a policy whatever the model is: found before one is loaded."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from kvjax.cache import layer_specs
from kvjax.config import ModelConfig, RopeConfig

from .base import Policy, check_reads_blocks
from .families.surrogates import missing_weights
from .info import PolicyError

HEAD_DIMS = 64, 128, 256, 1024
"""Sizes of heads that a policy is tried with: what it refuses of all of them, it refuses of any model's."""


def check_unbound(policy: Policy, block: int | None = None, *, over_mesh: bool = False) -> None:
    """Raise what a run would raise of a policy that is not bound to a model yet, as far as no model can change it.

    Args:
        block: tokens of the blocks in which prompts are to be read; None for whole prompts.
        over_mesh: whether it is to run over a mesh.

    Raises:
        PolicyError: weights are missing that do not come with kvjax; what the policy is made of does not go together; it cannot read in
            blocks, or not run over a mesh, and is to.
    """
    for part in _parts(policy):
        if getattr(part, "source", "") and getattr(part, "weights", "") is None:
            raise missing_weights(part)
    if over_mesh:
        check_no_host_cache(policy)
    refused: list[PolicyError] = []
    for head_dim in HEAD_DIMS:
        try:
            _check_layers(policy, _stand_in(policy, head_dim), block)
        except PolicyError as error:
            refused.append(error)
    if len(refused) == len(HEAD_DIMS):
        raise refused[0]


def check_no_host_cache(policy: Policy) -> None:
    """Raise `PolicyError` if a policy that is to run over a mesh keeps a cache in the host's memory."""
    if "offloaded" in policy.info.name:
        raise PolicyError(
            f"{policy.info.name} keeps a cache in the host's memory, which programs over a mesh do not; leave one of the two out"
        )


def _check_layers(policy: Policy, config: ModelConfig, block: int | None) -> None:
    found = _prepared(policy, config)
    for spec in layer_specs(config, 1, 4096, 64, jnp.bfloat16):
        found.layer(spec)
    if block is not None:
        for spec in layer_specs(config, 1, 64, 64, jnp.bfloat16, block=block):
            check_reads_blocks(found.layer(spec))


def _parts(policy: Policy) -> Iterator[Policy]:
    """A policy, and all that are in it."""
    yield policy
    for value in _values(policy):
        for each in value if isinstance(value, tuple) else (value,):
            if _is_policy(each):
                yield from _parts(each)


def _is_policy(value: Any) -> bool:
    return hasattr(value, "layer") and hasattr(value, "bind")


def _values(policy: Policy) -> list[Any]:
    return [getattr(policy, field.name) for field in dataclasses.fields(policy)]


def _stand_in(policy: Policy, head_dim: int) -> ModelConfig:
    """A model that has as many layers and KV heads as the policy is given for."""
    layers, heads = 8, 2
    for part in _parts(policy):
        layers = len(getattr(part, "layers", ())) or layers
        if groups := getattr(part, "heads", ()):
            layers, heads = len(groups[0]), sum(len(group[0]) for group in groups)
    rope = RopeConfig(theta=1e4, dim=head_dim)
    return ModelConfig("llama", 512, 512, 512, layers, 2 * heads, heads, head_dim, 1 << 20, rope)


def _prepared(policy: Policy, config: ModelConfig) -> Policy:
    """The policy, bound as far as neither a profile nor weights of a model are needed: its layers can be made."""
    changed = {}
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        if _is_policy(value):
            changed[field.name] = _prepared(value, config)
        elif isinstance(value, tuple) and value and _is_policy(value[0]):
            changed[field.name] = tuple(_prepared(each, config) for each in value)
    if transform := getattr(policy, "transform", ""):
        inner: Policy = changed["policy"]
        if transform == "pyramid":  # whose budgets depend on how many layers there are
            return inner

        def around(each: Policy) -> Policy:
            if each.info.transform == transform:
                return each
            return dataclasses.replace(policy, policy=each)

        return inner.map(around)
    if labels := getattr(policy, "labels", ()):
        profile = (tuple(labels[head % len(labels)] for head in range(config.num_kv_heads)),) * config.num_layers
        return dataclasses.replace(policy, **changed, profile=profile).bind(config)
    if changed:
        return dataclasses.replace(policy, **changed)
    of_a_model = {"profile", "weights"} & {field.name for field in dataclasses.fields(policy)}
    return policy if of_a_model else policy.bind(config)
