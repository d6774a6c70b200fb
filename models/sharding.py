"""Where a model's weights lie on a mesh: which axis of each is dealt to which devices.

KV heads, with the query heads that read them, are dealt among `heads` devices; the columns of the two matrices that end a layer's halves,
the MLP's width and the vocabulary among all that share the model (`kvjax.cache.shard`). What does not divide is padded with zeros,
which change no result: silu(0) · 0 is 0, and logits beyond the vocabulary are cut off.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.cache import Shard
from kvjax.cache.shard import DATA, HEADS, MODEL

from .config import ModelConfig
from .params import Params, tree_map_named

_DEALT: dict[str, tuple[Any, ...]] = {
    "q": (HEADS,),
    "k": (HEADS,),
    "v": (HEADS,),
    "q_bias": (HEADS,),
    "k_bias": (HEADS,),
    "v_bias": (HEADS,),
    "o": (None, MODEL),
    "gate": (MODEL,),
    "up": (MODEL,),
    "gate_bias": (MODEL,),
    "up_bias": (MODEL,),
    "down": (None, MODEL),
    "embed": (MODEL,),
    "head": (MODEL,),
}
"""By the last part of a parameter's name: the mesh axes of its axes. All others are on every device."""


def partition(name: str) -> PartitionSpec:
    """How the parameter of this name is dealt; names as `tree_map_named` gives them."""
    return PartitionSpec(*_DEALT.get(name.rpartition(".")[2], ()))


def partitions(params: Params) -> Params:
    """`partition` of every parameter, in a tree of the same structure."""
    return tree_map_named(lambda name, _: partition(name), params)


def place(shard: Shard, name: str, array: Any) -> Any:
    """One parameter, padded and put where it belongs; of a `jax.ShapeDtypeStruct`, the shape with its place.

    One that is there already is not copied.
    """
    sharding = NamedSharding(_mesh(shard), partition(name))
    padding = [(0, -size % pieces) for size, pieces in zip(array.shape, _pieces(shard, name, array.ndim), strict=True)]
    if isinstance(array, jax.ShapeDtypeStruct):
        shape = tuple(size + more for size, (_, more) in zip(array.shape, padding, strict=True))
        return jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)
    return jax.device_put(jnp.pad(array, padding) if any(more for _, more in padding) else array, sharding)


def place_all(shard: Shard, params: Params) -> Params:
    """All parameters where they belong on a mesh."""
    return tree_map_named(lambda name, leaf: place(shard, name, leaf), params)


def mesh_of(params: Params) -> jax.sharding.Mesh | None:
    """The mesh that weights lie on, with the axes `data` and `model`; None if that is one device."""
    sharding = getattr(params.embed, "sharding", None)
    if not isinstance(sharding, NamedSharding) or set(sharding.mesh.axis_names) != {DATA, *MODEL}:
        return None
    devices = sharding.mesh.devices
    return jax.sharding.Mesh(devices.reshape(len(devices), -1), (DATA, "model"))


def split(config: ModelConfig, devices: int) -> tuple[int, int]:
    """Among how many devices a model's KV heads are dealt, of so many that share it, and how many hold the same ones.

    Raises:
        ValueError: the query heads' numbers cannot be dealt among those that hold the same ones.
    """
    heads = math.gcd(config.num_kv_heads, devices)
    copies, width = devices // heads, config.num_heads // heads * config.head_dim
    if width % copies:
        raise ValueError(
            f"model={devices}: this model's {config.num_heads} query heads of {config.head_dim} cannot be dealt among {heads} groups of "
            f"{copies} devices; give a number of devices that divides {config.num_heads * config.head_dim}"
        )
    return heads, copies


def device_bytes(tree: Any) -> int:
    """Bytes that arrays, or shapes with places, take on each device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape) if getattr(x, "sharding", None) else x.shape) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def _pieces(shard: Shard, name: str, ndim: int) -> list[int]:
    """Into how many pieces each axis of a parameter is cut."""
    sizes = {None: 1, HEADS: shard.heads, MODEL: shard.model}
    axes = partition(name)
    return [sizes[axes[i] if i < len(axes) else None] for i in range(ndim)]


def _mesh(shard: Shard) -> jax.sharding.Mesh:
    assert shard.mesh is not None
    return shard.mesh
