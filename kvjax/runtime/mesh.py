"""Runs programs over a mesh of devices, and shards their arrays.

Each device runs the whole program, loops included, on its part (`jax.shard_map`). XLA's partitioner decides nothing.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from kvjax.cache import RUN, LayerSpec, Shard, global_order, host_memory, shard_order, slots_of_leaves
from kvjax.cache.shard import COPIES, DATA, HEADS, SLOTS
from kvjax.config import ModelConfig
from kvjax.models import Params
from kvjax.models.params import name_of
from kvjax.models.sharding import get_mesh, get_shard, mesh_of, place_all
from kvjax.policies import Policy
from kvjax.policies.partitions import is_partition, state_axes
from kvjax.policies.sharded import sharded
from kvjax.policies.unbound import check_no_host_cache

ALL, ROWS, OWN = PartitionSpec(), PartitionSpec(DATA), PartitionSpec((DATA, HEADS, COPIES, SLOTS))
"""Partitions: replicated; sharded by rows; and a part per device, concatenated along the first axis."""


def policy_shard(mesh: Mesh | AbstractMesh | str | None, config: ModelConfig, policy: Policy) -> Shard:
    """How the devices of a mesh share a model with a bound policy's cache.

    Raises:
        ValueError: as `kvjax.models.sharding.get_shard`.
        PolicyError: the policy keeps a cache in host memory.
    """
    if mesh is not None:
        check_no_host_cache(policy)
    return get_shard(mesh, config, heads_coupled=policy.info.heads_coupled)


def on_mesh(params: Params, mesh: Mesh | str | None, policy: Policy | None = None) -> tuple[Params, Mesh | None]:
    """Place weights on a mesh once, for many calls that would otherwise each shard them. Returns weights and mesh.

    Args:
        params: the weights.
        mesh: the mesh; None uses the mesh that the weights are on, if any.
        policy: policy of the calls; None for calls without a cache.

    Raises:
        ValueError: as `kvjax.models.sharding.get_shard`.
        PolicyError: as `policy_shard`.
    """
    found = mesh_of(params) if mesh is None else get_mesh(mesh)
    if found is None:
        return params, None
    config = params.config
    shard = get_shard(found, config) if policy is None else policy_shard(found, config, policy.for_model(config))
    return place_all(shard, params), found


def state_partitions(policy: Policy, specs: Sequence[LayerSpec]) -> tuple[Any, ...]:
    """Partitions of the caches, see `kvjax.policies.partitions`."""
    return tuple(state_axes(policy, spec) for spec in specs)


def sharded_caches(policy: Policy, specs: Sequence[LayerSpec]) -> int:
    """Number of caches with sharded slots: at most one per layer, or per group of heads."""
    found = 0
    for spec, partitions in zip(specs, state_partitions(policy, specs), strict=True):
        leaves = jax.tree.leaves(partitions, is_leaf=is_partition)
        own = jax.eval_shape(sharded(policy.layer(spec)).init)
        caches = [
            getattr(x, "slot_shards", 1) > 1 for x in jax.tree.leaves(own, is_leaf=lambda x: hasattr(x, "slot_shards"))
        ]
        others = sum(SLOTS in each and not n for each, n in zip(leaves, slots_of_leaves(own), strict=True))
        found += sum(caches) - (-others // 2)  # a sparse layer's store has keys and values, or only values
    return found


def repeated_bytes(policy: Policy, specs: Sequence[LayerSpec]) -> int:
    """Bytes of each device's caches that are replicated on all devices that share slots; 0 if no slots are shared."""
    if not specs or specs[0].shard.slots == 1:
        return 0
    total = 0
    for spec in specs:
        partitions = jax.tree.leaves(state_axes(policy, spec), is_leaf=is_partition)
        own = jax.tree.leaves(jax.eval_shape(sharded(policy.layer(spec)).init))
        total += sum(x.size * x.dtype.itemsize for x, each in zip(own, partitions, strict=True) if SLOTS not in each)
    return total


def over_mesh(function: Callable[..., Any], shard: Shard, inputs: Any, outputs: Any) -> Callable[..., Any]:
    """Run a function on all devices, each with its part. `inputs` and `outputs` are partitions."""
    return jax.shard_map(function, mesh=shard.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def placed(shard: Shard, partitions: Any, arrays: Any, *, shapes: bool = False) -> Any:
    """Place arrays on a mesh. Arrays that are already in place are not copied.

    Args:
        shard: the devices.
        partitions: a prefix of the arrays' tree.
        arrays: the arrays.
        shapes: return shapes with these shardings instead, and leave the arrays where they are.
    """

    def at(partition: PartitionSpec, tree: Any) -> Any:
        sharding = NamedSharding(_mesh(shard), partition)
        if shapes:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
        return jax.tree.map(lambda x: put(x, sharding), tree)

    return jax.tree.map(at, partitions, arrays, is_leaf=is_partition)


def put(x: Any, sharding: NamedSharding) -> Any:
    """Place one array. If it is already in place, it is not copied."""
    there = getattr(x, "sharding", None)
    if there is not None and there.is_equivalent_to(sharding, x.ndim):
        return x
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    whole = np.asarray(x)  # every process has the whole array, and gives its devices their parts
    return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])


def on_host(x: Any) -> np.ndarray:
    """Copy an array to the host. If processes hold parts of it, each gets the whole."""
    whole = not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
    return np.asarray(x if whole else multihost_utils.process_allgather(x, tiled=True))


def saved(policy: Policy, specs: Sequence[LayerSpec], caches: Sequence[Any]) -> tuple[Any, ...]:
    """Copy caches to the host, in the order that a single device has."""

    def ordered(partition: PartitionSpec, whole: Any, place: Any, x: Any) -> np.ndarray:
        x = on_host(x)
        return global_order(x, spec.shard.slots, whole.shape[place["axis"]], **place) if SLOTS in partition else x

    found: list[Any] = []
    for spec, cache in zip(specs, caches, strict=True):
        whole = jax.eval_shape(policy.layer(spec.whole).init)
        partitions = jax.tree.leaves(state_axes(policy, spec), is_leaf=is_partition)
        leaves = map(ordered, partitions, jax.tree.leaves(whole), _slot_places(policy, spec), jax.tree.leaves(cache))
        found.append(jax.tree.unflatten(jax.tree.structure(whole), leaves))
    return tuple(found)


def resumed(policy: Policy, specs: Sequence[LayerSpec], caches: Sequence[Any]) -> tuple[Any, ...]:
    """Reorder saved caches for these devices.

    Raises:
        ValueError: the caches have other sizes, or are of another policy.
    """
    if len(caches) != len(specs):
        raise ValueError(
            f"this state is of a model of {len(caches)} layers; give it to an engine with as many, not {len(specs)}"
        )
    found: list[Any] = []
    for spec, cache in zip(specs, caches, strict=True):
        traced, whole = jax.make_jaxpr(policy.layer(spec.whole).init, return_shape=True)()
        partitions = state_axes(policy, spec)
        have, want = arrays_of(cache), arrays_of(whole)
        if have != want:
            other, own = (min(a - b, default="nothing else") for a, b in ((have, want), (want, have)))
            raise ValueError(
                f"layer {spec.layer} of this state has {other}, but {policy.info.name} at this engine's sizes has {own}; give an engine of the "
                "policy, budget and sizes of the one that saved it"
            )

        def put(partition: PartitionSpec, aval: Any, place: Any, x: Any, devices: int = spec.shard.slots) -> Any:
            if aval.memory_space == jax.memory.Space.Host:
                return host_memory.to_host(x)
            return shard_order(x, devices, **place) if SLOTS in partition else x

        each = jax.tree.leaves(partitions, is_leaf=is_partition)
        leaves = map(put, each, traced.out_avals, _slot_places(policy, spec), jax.tree.leaves(cache))
        found.append(jax.tree.unflatten(jax.tree.structure(partitions, is_leaf=is_partition), leaves))
    return tuple(found)


def arrays_of(tree: Any) -> set[str]:
    """Describe the arrays of a tree by name, type and shape. Leaves that are not arrays have a type only."""

    def told(x: Any) -> str:
        is_array = hasattr(x, "shape") and hasattr(x, "dtype")
        return f"{jnp.dtype(x.dtype).name}{list(x.shape)}" if is_array else f"the Python type {type(x).__name__}"

    return {f"{name_of(path)} of {told(x)}" for path, x in jax.tree.leaves_with_path(tree)}


def first_row(policy: Policy, specs: Sequence[LayerSpec], caches: Sequence[Any]) -> tuple[Any, ...]:
    """First row of saved caches."""
    return _each_row(policy, specs, caches, lambda x, axis: np.take(x, [0], axis))


def repeated_row(policy: Policy, specs: Sequence[LayerSpec], caches: Sequence[Any]) -> tuple[Any, ...]:
    """Repeat the caches of `first_row` for all rows of the specs on all devices."""
    rows = specs[0].whole.batch
    return _each_row(policy, specs, caches, lambda x, axis: np.repeat(x, rows, axis))


def _each_row(
    policy: Policy, specs: Sequence[LayerSpec], caches: Sequence[Any], take: Callable[[np.ndarray, int], np.ndarray]
) -> tuple[Any, ...]:
    partitions = jax.tree.leaves(state_partitions(policy, specs), is_leaf=is_partition)
    leaves, tree = jax.tree.flatten(tuple(caches))
    taken = [
        take(x, list(partition).index(DATA)) if DATA in partition else x
        for x, partition in zip(leaves, partitions, strict=True)
    ]
    return tree.unflatten(taken)


@lru_cache(maxsize=1024)
def _slot_places(policy: Policy, spec: LayerSpec) -> list[dict[str, int]]:
    """For each array with sharded slots: its slot axis, and its number of entries per run of slots."""
    own = jax.eval_shape(sharded(policy.layer(spec)).init)
    partitions = jax.tree.leaves(state_axes(policy, spec), is_leaf=is_partition)
    axes = [partition.index(SLOTS) if SLOTS in partition else 0 for partition in partitions]
    sizes = zip(axes, slots_of_leaves(own), jax.tree.leaves(own), strict=True)
    return [{"axis": axis, "run": RUN * x.shape[axis] // slots if slots else RUN} for axis, slots, x in sizes]


def _mesh(shard: Shard) -> Mesh | AbstractMesh:
    assert shard.mesh is not None
    return shard.mesh
