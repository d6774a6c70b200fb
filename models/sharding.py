"""Where a model's weights lie on a mesh: what a user asks for, and which axis of each is dealt to which devices.

A mesh has rows along `data` and shares a model along `model`; where the model has fewer KV heads than `model` has devices, several of
them hold the same heads and divide only the matrices. So do the devices along `sequence`, which share the slots of these heads' caches
besides. KV heads, with the query heads that read them, are dealt among `heads` devices; the columns of the two matrices that end a
layer's halves, the MLP's width and the vocabulary among all that share the model (`kvjax.cache.shard`). What does not divide is padded
with zeros, which change no result: silu(0) · 0 is 0, and logits beyond the vocabulary are cut off.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PRNGKeyArray

from kvjax._util.arguments import shown
from kvjax.cache import Shard
from kvjax.cache.shard import COPIES, DATA, HEADS, MODEL, ONE_DEVICE, SLOTS
from kvjax.config import ModelConfig
from kvjax.pallas_kernels import is_quantized

from .params import Params, abstract, init, initial, name_of, tree_map_named

AXES = "data", "model", "sequence"
"""Axes of a mesh that a user gives: rows; KV heads, matrices and the vocabulary; slots of a cache, and again matrices and the vocabulary."""

_ROWS = dict.fromkeys(("q", "k", "v", "q_bias", "k_bias", "v_bias"), HEADS) | dict.fromkeys(
    ("gate", "up", "gate_bias", "up_bias", "embed", "head"), MODEL
)
"""By the last part of a parameter's name: the mesh axes that its outputs, its first axis, are dealt along."""

_COLUMNS = ("o", "down")
"""Matrices whose inputs are dealt along `MODEL`: the last axis, that of groups of inputs in a matrix of 4 bits."""

_FIELDS = ("levels", "scale", "minimum", "scale_unit", "minimum_unit")
"""Arrays of a matrix in 8 or 4 bits, which follow its name."""

_ALLOWED = (
    'give a jax.sharding.Mesh with some of the axes "data" (rows), "model" (KV heads and matrices) and "sequence" (slots of the cache, and '
    'matrices), or text such as "data=2,model=4"'
)


def get_mesh(mesh: Mesh | str) -> Mesh:
    """A mesh of the axes `data`, `model` and `sequence`, from one that has some of them, or from text such as "data=2,model=4".

    Has NCCL, unless it is told otherwise or has begun already, make graphs of its kernels alone: with nodes for events in them, which are for
    programs that communicate in a graph and outside of one at the same time, CUDA takes no loop.

    Raises:
        ValueError: it has other axes, or there are fewer devices than it asks for.
    """
    if isinstance(mesh, str):
        sizes = parse_mesh(mesh)
        axes, count, there = tuple(sizes), math.prod(sizes.values()), jax.devices()
        if count > len(there):
            raise ValueError(f"mesh={mesh!r} asks for {count} devices, but there are {len(there)}; give a smaller mesh")
        return get_mesh(Mesh(np.asarray(there[:count]).reshape(tuple(sizes.values())), axes))
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh={shown(mesh)}; {_ALLOWED}")
    _check_axes(mesh)
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    devices = mesh.devices.transpose([mesh.axis_names.index(axis) for axis in AXES if axis in mesh.axis_names])
    processes = {device.process_index for device in devices.flat}
    if jax.process_count() > 1 and jax.process_index() not in processes:
        raise ValueError(
            f"the mesh has {devices.size} devices, none of them in process {jax.process_index()} of {jax.process_count()}; give one with devices of "
            f"every process, of which there are {jax.device_count()} in all"
        )
    return Mesh(devices.reshape([mesh.shape.get(axis, 1) for axis in AXES]), AXES)


def is_of_one_process(mesh: Mesh | AbstractMesh | None) -> bool:
    """Whether all of a mesh's devices are this process' own."""
    return isinstance(mesh, Mesh) and all(x.process_index == jax.process_index() for x in mesh.devices.flat)


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes of a mesh's axes, from text such as "data=2,model=4".

    Raises:
        ValueError: it is none.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (x.strip() for x in part.partition("="))
        if axis not in AXES or not size.isdecimal() or int(size) < 1 or axis in sizes:
            raise ValueError(f"mesh={text!r}; {_ALLOWED}")
        sizes[axis] = int(size)
    return sizes


def get_shard(mesh: Mesh | AbstractMesh | str | None, config: ModelConfig, *, joint_heads: bool = False) -> Shard:
    """How the devices of a mesh share a model; `ONE_DEVICE` without a mesh.

    Args:
        mesh: an abstract one has some of the axes, too.
        joint_heads: whether each device is to have all KV heads. Then those along `model` share slots, as along `sequence`: caches of
            unequal sizes come to equal bytes so.

    Raises:
        ValueError: see `get_mesh`, also of an abstract mesh; or the model's query heads cannot be dealt among devices that hold the same KV heads.
    """
    if mesh is None:
        return ONE_DEVICE
    given = mesh if isinstance(mesh, AbstractMesh) else get_mesh(mesh)
    _check_axes(given)
    data, model, slots = (given.shape.get(axis, 1) for axis in AXES)
    heads = 1 if joint_heads else math.gcd(config.num_kv_heads, model)
    copies, width = model // heads, config.num_heads // heads * config.head_dim
    if width % (copies * slots):
        asked = ",".join(f"{axis}={size}" for axis, size in zip(AXES[1:], (model, slots), strict=True) if size > 1)
        raise ValueError(
            f"{asked}: {heads} times {copies * slots} devices cannot share {config.num_heads} query heads of {config.head_dim} on "
            f"{config.num_kv_heads} KV heads; give a number of devices that divides {config.num_heads * config.head_dim}"
        )
    axes = DATA, HEADS, COPIES, SLOTS
    sizes = (data, 1, 1, copies * slots) if joint_heads else (data, heads, copies, slots)
    if isinstance(given, AbstractMesh):
        return Shard(AbstractMesh(sizes, axes))
    return Shard(Mesh(given.devices.reshape(sizes), axes))


def partition(name: str, ndim: int) -> PartitionSpec:
    """How the parameter of this name is dealt; names as `tree_map_named` gives them."""
    part = _matrix(name).rpartition(".")[2]
    if part in _COLUMNS:
        return PartitionSpec(*[None] * (ndim - 1), MODEL) if ndim > 1 else PartitionSpec()
    return PartitionSpec(_ROWS[part]) if part in _ROWS else PartitionSpec()


def partitions(params: Params) -> Params:
    """`partition` of every parameter, in a tree of the same structure."""
    leaves, tree = jax.tree.flatten(params)
    return _partitions(tree, tuple(leaf.ndim for leaf in leaves))


@lru_cache(maxsize=64)
def _partitions(tree: Any, ndims: tuple[int, ...]) -> Params:
    return tree_map_named(partition, tree.unflatten(ndims))


def place(shard: Shard, name: str, weight: Any) -> Any:
    """One parameter, padded and put where it belongs; of a `jax.ShapeDtypeStruct`, the shape with its place.

    One that is there already is not copied.

    Raises:
        ValueError: inputs that share a scale would be on different devices.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(weight)
    names = [".".join(filter(None, (name, name_of(path)))) for path, _ in paths]
    return tree.unflatten([_placed(shard, each, array) for each, (_, array) in zip(names, paths, strict=True)])


def place_from(shard: Shard, name: str, shapes: Any, read: Callable[[slice, slice | None], Any]) -> Any:
    """One parameter where it belongs, of which a process reads no more than its own devices are to have, and that once.

    The process holds that much on the host besides.

    Args:
        shapes: of the parameter, or of the arrays of a matrix in 8 or 4 bits.
        read: `read(rows, columns)` gives one row or more on the host, and of a matrix columns of its last axis, that of the levels where it is in
            8 or 4 bits; or all columns, where they cannot be read apart.

    Raises:
        ValueError: as `place`.
    """
    wanted, tree = jax.tree.flatten(place(shard, name, shapes))
    own = jax.tree.leaves(shapes)
    indices = [array.sharding.addressable_devices_indices_map(array.shape) for array in wanted]
    parts: dict[Any, list[Any]] = {}
    for device in indices[0]:
        part = tuple(
            tuple(each.indices(size)[:2] for each, size in zip(index[device], array.shape, strict=True))
            for index, array in zip(indices, wanted, strict=True)
        )
        parts.setdefault(part, []).append(device)
    together: dict[Any, list[Any]] = {}  # parts that lie side by side are read at once
    by_rows, by_columns = (_runs({part[0][axis] for part in parts}) for axis in (0, -1))
    for part in parts:
        together.setdefault((by_rows[part[0][0]], by_columns[part[0][-1]]), []).append(part)
    held: list[list[jax.Array]] = [[] for _ in wanted]
    for (rows, columns), group in together.items():
        rows = _within(rows, own[0].shape[0])
        columns = _within(columns, own[0].shape[-1]) if own[0].ndim > 1 else None
        if any(each.start == each.stop for each in (rows, columns) if each is not None):
            found, cut = [np.zeros((0,) * shape.ndim, shape.dtype) for shape in own], True  # padding alone
        else:
            found = jax.tree.leaves(read(rows, columns))
            cut = columns is not None and found[0].shape[-1] == columns.stop - columns.start
        for i, (array, arrays) in enumerate(zip(found, held, strict=True)):
            first = [min(part[i][axis][0] for part in group) if cut or not axis else 0 for axis in range(array.ndim)]
            for part in group:
                ranges = [(start - at, stop - at) for (start, stop), at in zip(part[i], first, strict=True)]
                mine = _filled(array[tuple(slice(*each) for each in ranges)], [stop - start for start, stop in ranges])
                arrays += [jax.device_put(mine, device) for device in parts[part]]
    placed = [
        jax.make_array_from_single_device_arrays(array.shape, array.sharding, arrays)
        for array, arrays in zip(wanted, held, strict=True)
    ]
    return tree.unflatten(placed)


def _runs(ranges: set[tuple[int, int]]) -> dict[tuple[int, int], tuple[int, int]]:
    """For each range the one that it makes with all that are next to it."""
    found: list[list[tuple[int, int]]] = []
    for each in sorted(ranges):
        if found and found[-1][-1][1] == each[0]:
            found[-1].append(each)
        else:
            found.append([each])
    return {each: (run[0][0], run[-1][1]) for run in found for each in run}


def _within(part: tuple[int, int], size: int) -> slice:
    """A range without what is padding."""
    return slice(*(min(end, size) for end in part))


def _filled(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The array, with zeros behind it where the shape is larger."""
    if array.shape == tuple(shape):
        return array
    whole = np.zeros(shape, array.dtype)
    whole[tuple(map(slice, array.shape))] = array
    return whole


def init_on(
    shard: Shard, config: ModelConfig, key: PRNGKeyArray, dtype: Any, weights: str = "float", embedding: str = "float"
) -> Params:
    """Random parameters where they belong, as `init` makes them; of those on a mesh each device makes its own part alone.

    Args:
        dtype, weights, embedding: as for `abstract`.

    Raises:
        ValueError: as for `place`.
    """
    if shard.mesh is None:
        return init(config, key, dtype, weights=weights, embedding=embedding)
    programs, tree = _making(shard, config, dtype, weights, embedding)
    keys = jax.random.split(key, len(programs))
    return tree.unflatten([program(each) for program, each in zip(programs, keys, strict=True)])


def compile_init_on(
    shard: Shard, config: ModelConfig, dtype: Any, weights: str = "float", embedding: str = "float"
) -> None:
    """Have the programs of `init_on` for a mesh in the compilation cache. (Those for one device are small, and compiled at once.)"""
    if shard.mesh is None:
        return
    key = jax.eval_shape(lambda: jax.random.key(0))
    for program in dict.fromkeys(_making(shard, config, dtype, weights, embedding)[0]):
        program.lower(key).compile()


def _making(shard: Shard, config: ModelConfig, dtype: Any, weights: str, embedding: str) -> tuple[list[Any], Any]:
    """For each parameter the program that makes it of a key, and the tree of all parameters."""
    shapes = abstract(config, dtype, weights=weights, embedding=embedding)
    paths, tree = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=is_quantized)
    programs: list[Any] = []
    for path, leaf in paths:
        arrays, structure = jax.tree.flatten(leaf)
        programs.append(_made(shard, name_of(path).rpartition(".")[2], structure, tuple(arrays)))
    return programs, tree


@lru_cache(maxsize=256)
def _made(shard: Shard, name: str, structure: Any, arrays: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
    whole = structure.unflatten(arrays)
    places = place(shard, name, whole)

    def made(key: PRNGKeyArray) -> Any:
        def padded(x: jax.Array, to: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.pad(x, [(0, more - size) for size, more in zip(x.shape, to.shape, strict=True)])

        return jax.tree.map(padded, initial(name, whole, key), places)

    return jax.jit(made, out_shardings=jax.tree.map(lambda x: x.sharding, places))


def place_all(shard: Shard, params: Params) -> Params:
    """All parameters where they belong on a mesh; errors as for `place`."""
    return tree_map_named(lambda name, leaf: _placed(shard, name, leaf), params)


def own_shape(name: str, shape: Sequence[int], matrix: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """The shape of a parameter that a mesh may have padded without what it was padded with.

    Args:
        matrix: shapes of parameters, by name.
    """
    outputs, *inputs = matrix[_matrix(name)]
    padded = len(inputs) == 1 and len(shape) == 2 and (name.endswith(".levels") or _matrix(name) == name)
    return (outputs, *(inputs if padded else shape[1:]))


def unpadded(params: Params) -> Params:
    """Parameters without what a mesh may have padded them with; where they are."""
    if mesh_of(params) is None:
        return params
    whole = abstract(params.config)
    shapes = {name_of(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(whole)}

    def cut(name: str, leaf: Any) -> Any:
        own = own_shape(name, leaf.shape, shapes)
        return leaf if own == leaf.shape else leaf[tuple(map(slice, own))]

    return tree_map_named(cut, params)


def mesh_of(params: Params) -> Mesh | None:
    """The mesh that weights lie on, with the axes `data`, `model` and `sequence`; None if that is one device."""
    sharding = getattr(params.norm, "sharding", None)
    if not isinstance(sharding, NamedSharding) or set(sharding.mesh.axis_names) != {DATA, *MODEL}:
        return None
    devices = np.asarray(sharding.mesh.devices)
    return Mesh(devices.reshape(len(devices), -1, devices.shape[-1]), AXES)


def bytes_per_device(tree: Any) -> int:
    """Bytes that arrays, or shapes with places, take on each device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape) if getattr(x, "sharding", None) else x.shape) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def _check_axes(mesh: Mesh | AbstractMesh) -> None:
    if not mesh.axis_names or set(mesh.axis_names) - set(AXES):
        raise ValueError(f"mesh has the axes {list(mesh.axis_names)}; {_ALLOWED}")


def _placed(shard: Shard, name: str, array: Any) -> Any:
    axes = partition(name, array.ndim)
    sharding, sizes = NamedSharding(_mesh(shard), axes), {None: 1, HEADS: shard.heads, MODEL: shard.model}
    pieces = [sizes[axes[i] if i < len(axes) else None] for i in range(array.ndim)]
    padding = [(0, -size % count) for size, count in zip(array.shape, pieces, strict=True)]
    in_groups = array.ndim == 3 or (array.ndim == 2 and _matrix(name) != name and not name.endswith(".levels"))
    if in_groups and padding[-1][1]:
        sharing = (
            f"model={shard.model} devices" if shard.slots == 1 else f"{shard.model} devices along model and sequence"
        )
        raise ValueError(
            f"{name}: inputs are in {array.shape[-1]} groups of one scale, which {sharing} do not divide; give a number of devices that "
            "does, or other weights, such as int8"
        )
    if isinstance(array, jax.ShapeDtypeStruct):
        shape = tuple(size + more for size, (_, more) in zip(array.shape, padding, strict=True))
        return jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)
    if isinstance(array, np.ndarray):  # from a file: each device is sent its part alone
        whole = np.pad(array, padding) if any(more for _, more in padding) else array
        return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])
    return jax.device_put(jnp.pad(array, padding) if any(more for _, more in padding) else array, sharding)


def _matrix(name: str) -> str:
    """The name of the parameter that an array is of."""
    matrix, _, field = name.rpartition(".")
    return matrix if field in _FIELDS else name


def _mesh(shard: Shard) -> Mesh | AbstractMesh:
    assert shard.mesh is not None
    return shard.mesh
