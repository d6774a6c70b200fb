"""Programs over a mesh of devices: what a user asks for, and how a program is run on all of them at once.

A mesh has rows along `data` and shares a model along `model`; where the model has fewer KV heads than `model` has devices, several of
them hold the same heads and divide only the matrices. Each device runs the whole program on its part (`jax.shard_map`), loops
included; XLA's partitioner decides nothing.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.arguments import shown
from kvjax.cache import LayerSpec, Shard
from kvjax.cache.shard import COPIES, DATA, HEADS, ONE_DEVICE
from kvjax.models import ModelConfig
from kvjax.models.sharding import split
from kvjax.policies import Policy, PolicyError

AXES = "data", "model"
"""Axes of a mesh that a user gives."""

ALL, ROWS = PartitionSpec(), PartitionSpec(DATA)
"""On every device; dealt by rows."""


def get_mesh(mesh: Mesh | str) -> Mesh:
    """A mesh of the axes `data` and `model`, from one that has some of them, or from text such as "data=2,model=4".

    Raises:
        ValueError: it has other axes, or there are fewer devices than it asks for.
    """
    if isinstance(mesh, Mesh):
        sizes, devices = dict(mesh.shape), mesh.devices
    elif isinstance(mesh, str):
        sizes, devices = _sizes(mesh), None
    else:
        raise ValueError(f"mesh={shown(mesh)}; {_ALLOWED}")
    if not sizes or set(sizes) - set(AXES):
        raise ValueError(f"mesh has the axes {list(sizes)}; {_ALLOWED}")
    shape = [sizes.get(axis, 1) for axis in AXES]
    if devices is None:
        there, count = jax.devices(), math.prod(shape)
        if count > len(there):
            raise ValueError(f"mesh={mesh!r} asks for {count} devices, but there are {len(there)}; give a smaller mesh")
        devices = np.asarray(there[:count])
    elif [axis for axis in mesh.axis_names if axis in AXES] == ["model", "data"]:
        devices = devices.T
    return Mesh(devices.reshape(shape), AXES)


_ALLOWED = 'give a jax.sharding.Mesh with the axes "data" (rows) and "model" (KV heads and matrices), or text such as "data=2,model=4"'


def get_shard(mesh: Mesh | str | None, config: ModelConfig, policy: Policy | None = None) -> Shard:
    """How the devices of a mesh share a model with this bound policy's cache.

    Raises:
        ValueError: see `get_mesh`, and the model cannot be shared by so many devices.
        PolicyError: the policy keeps its cache in the host's memory.
    """
    if mesh is None:
        return ONE_DEVICE
    given = get_mesh(mesh)
    data, model = (given.shape[axis] for axis in AXES)
    heads, copies = split(config, model)
    if policy is not None:
        if policy.info.transform == "offloaded":
            raise PolicyError(f"{policy.info.name} keeps a cache in the host's memory, which a mesh does not do yet; leave one of them out")
        if policy.info.joint_heads:
            heads, copies = 1, model
            if config.num_heads * config.head_dim % copies:
                split(dataclasses.replace(config, num_kv_heads=1), model)
    return Shard(Mesh(given.devices.reshape(data, heads, copies), (DATA, HEADS, COPIES)))


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


def _sizes(text: str) -> dict[str, int]:
    """From "data=2,model=4"."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (x.strip() for x in part.partition("="))
        if not size.isdecimal() or int(size) < 1 or axis in sizes:
            raise ValueError(f"mesh={text!r}; {_ALLOWED}")
        sizes[axis] = int(size)
    return sizes


def _mesh(shard: Shard) -> Mesh:
    assert shard.mesh is not None
    return shard.mesh
