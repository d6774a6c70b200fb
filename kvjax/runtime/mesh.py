"""Programs over a mesh of devices: how one is run on all of them at once, and how its arrays are dealt.

Each device runs the whole program on its part (`jax.shard_map`), loops
included; XLA's partitioner decides nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.cache import LayerSpec, Shard
from kvjax.cache.shard import DATA, HEADS, ONE_DEVICE
from kvjax.models import ModelConfig
from kvjax.models.sharding import get_shard
from kvjax.policies import Policy, PolicyError

ALL, ROWS = PartitionSpec(), PartitionSpec(DATA)
"""On every device; dealt by rows."""


def policy_shard(mesh: Mesh | str | None, config: ModelConfig, policy: Policy) -> Shard:
    """How the devices of a mesh share a model with this bound policy's cache.

    Raises:
        ValueError: as `kvjax.models.sharding.get_shard`.
        PolicyError: the policy keeps a cache in the host's memory.
    """
    if mesh is not None and "offloaded" in policy.info.name:
        raise PolicyError(
            f"{policy.info.name} keeps a cache in the host's memory, which programs over a mesh do not; leave one of the two out"
        )
    return get_shard(mesh, config, joint_heads=policy.info.joint_heads)


def state_partitions(policy: Policy, specs: Sequence[LayerSpec]) -> tuple[Any, ...]:
    """How the caches are dealt: which axis of every array grows with rows and which with KV heads is found by making both more."""
    return tuple(_layer_partitions(policy, spec) for spec in specs)


def over_mesh(function: Callable[..., Any], shard: Shard, inputs: Any, outputs: Any) -> Callable[..., Any]:
    """The function on all devices at once, each with its part; `inputs` and `outputs` tell how arrays are dealt."""
    return jax.shard_map(function, mesh=shard.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def placed(shard: Shard, partitions: Any, arrays: Any) -> Any:
    """Arrays, or shapes, where a mesh wants them; what is there already is not copied.

    Args:
        partitions: a tree that the arrays' tree begins with.
    """

    def put(partition: PartitionSpec, tree: Any) -> Any:
        sharding = NamedSharding(_mesh(shard), partition)
        return jax.tree.map(lambda x: _put(x, sharding), tree)

    return jax.tree.map(put, partitions, arrays, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _put(x: Any, sharding: NamedSharding) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return x if getattr(x, "sharding", None) == sharding else jax.device_put(x, sharding)


@lru_cache(maxsize=1024)
def _layer_partitions(policy: Policy, spec: LayerSpec) -> Any:
    def shapes(**sizes: int) -> Any:
        return jax.eval_shape(policy.layer(dataclasses.replace(spec, **sizes)).init)

    def axis(one: Sequence[int], more: Sequence[int], name: str) -> dict[int, str]:
        return {i: name for i, (a, b) in enumerate(zip(one, more, strict=True)) if a != b}

    lone = dataclasses.replace(spec, shard=ONE_DEVICE)
    with_rows = {"batch": 2 * spec.batch, "shard": ONE_DEVICE}
    with_heads = {"num_heads": 2 * spec.num_heads, "num_kv_heads": 2 * spec.num_kv_heads, "shard": ONE_DEVICE}
    one = jax.eval_shape(policy.layer(lone).init)
    rows = shapes(**with_rows)
    heads = one if spec.shard.heads == 1 else shapes(**with_heads)

    def partition(a: Any, b: Any, c: Any) -> PartitionSpec:
        dealt = axis(a.shape, b.shape, DATA) | axis(a.shape, c.shape, HEADS)
        if len(dealt) > 2:
            raise PolicyError(
                f"{policy.info.name}: an array of its cache of shape {list(a.shape)} grows with rows or KV heads along more than one axis "
                "each, so that it cannot be dealt to the devices of a mesh"
            )
        return PartitionSpec(*(dealt.get(i) for i in range(max(dealt, default=-1) + 1)))

    return jax.tree.map(partition, one, rows, heads)


def _mesh(shard: Shard) -> Mesh:
    assert shard.mesh is not None
    return shard.mesh
