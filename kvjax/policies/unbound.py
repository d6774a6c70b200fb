"""Errors of a policy that hold for every model. They are found before a model is loaded."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from kvjax.cache import layer_specs
from kvjax.config import ModelConfig, RopeConfig

from .base import Policy
from .families.surrogates import missing_weights
from .info import PolicyError
from .layer import check_reads_blocks

HEAD_DIMS = 64, 128, 256, 1024
"""Head sizes to try a policy with. A policy that refuses all of them is refused."""


def check_unbound(policy: Policy, block: int | None = None, *, over_mesh: bool = False) -> None:
    """Raise the errors of an unbound policy that hold for every model.

    Args:
        policy: a policy that is not bound to a model.
        block: block size of chunked prefill in tokens. None for whole prompts.
        over_mesh: whether the policy will run over a mesh.

    Raises:
        PolicyError: weights are missing that do not come with kvjax, or parts of the policy do not go together. Also if
            the policy does not support chunked prefill or a mesh, and it is requested.
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
    """Raise `PolicyError` if a policy that will run over a mesh keeps a cache in host memory."""
    if "offloaded" in policy.info.name:
        raise PolicyError(
            f"{policy.info.name}: caches in host memory are not supported over a mesh. Leave out offloaded or the mesh."
        )


def _check_layers(policy: Policy, config: ModelConfig, block: int | None) -> None:
    found = _prepared(policy, config)
    for spec in layer_specs(config, 1, 4096, 64, jnp.bfloat16):
        found.layer(spec)
    if block is not None:
        for spec in layer_specs(config, 1, 64, 64, jnp.bfloat16, block=block):
            check_reads_blocks(found.layer(spec))


def _parts(policy: Policy) -> Iterator[Policy]:
    """Yield a policy and all policies within it."""
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
    """Return a model with as many layers and KV heads as the policy is defined for."""
    layers, heads = 8, 2
    for part in _parts(policy):
        layers = len(getattr(part, "layers", ())) or layers
        if groups := getattr(part, "heads", ()):
            layers, heads = len(groups[0]), sum(len(group[0]) for group in groups)
    rope = RopeConfig(theta=1e4, dim=head_dim)
    return ModelConfig.uniform("llama", 512, 512, 512, layers, 2 * heads, heads, head_dim, 1 << 20, rope)


def _prepared(policy: Policy, config: ModelConfig) -> Policy:
    """Return the policy, bound as far as possible without a profile or weights, so that its layers can be made."""
    changed = {}
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        if _is_policy(value):
            changed[field.name] = _prepared(value, config)
        elif isinstance(value, tuple) and value and _is_policy(value[0]):
            changed[field.name] = tuple(_prepared(each, config) for each in value)
    if transform := getattr(policy, "transform", ""):
        inner: Policy = changed["policy"]
        if transform == "pyramid":  # its budgets depend on the number of layers
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
