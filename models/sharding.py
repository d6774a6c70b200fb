"""Shards a model's weights over a mesh.

A user's mesh has three axes. `data` shards the batch. `model` shards KV heads with their query heads, matrices and the
vocabulary. If there are fewer KV heads than devices along `model`, several devices hold the same heads and shard only
the matrices. Devices along `sequence` also hold the same heads, and shard the slots of their caches.

KV heads are sharded over `heads` devices. Columns of the output and down projections, the MLP's width and the
vocabulary are sharded over all devices of `model` and `sequence` (`kvjax.cache.shard`). Sizes that do not divide evenly
are padded with zeros, which do not change results: silu(0) · 0 is 0, and logits beyond the vocabulary are dropped.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import PRNGKeyArray

from kvjax._util.arguments import shown
from kvjax.cache import Shard
from kvjax.cache.shard import COPIES, DATA, HEADS, MODEL, ONE_DEVICE, SLOTS
from kvjax.config import AttentionConfig, ModelConfig, MoEConfig
from kvjax.pallas_kernels import is_quantized

from .params import EXPERTS, Params, abstract, gain_of, init, initial, name_of, tree_map_named

AXES = "data", "model", "sequence"
"""Axes of a user's mesh: the batch; KV heads, matrices and the vocabulary; cache slots, and also matrices and the vocabulary."""

_RECURRENT = "z", "alpha", "beta", "q_conv", "k_conv", "v_conv", "log_decay", "dt_bias"
"""Parameters of a gated delta net whose rows are those of heads."""

_ROWS = dict.fromkeys(("q", "k", "v", "q_bias", "k_bias", "v_bias", "sinks", *_RECURRENT), HEADS) | dict.fromkeys(
    ("gate", "up", "gate_bias", "up_bias", "embed", "head", *EXPERTS, *(f"{name}_bias" for name in EXPERTS)), MODEL
)
"""Last part of a parameter's name → mesh axes that shard its first axis (outputs)."""

_COLUMNS = ("o", "down")
"""Matrices whose inputs are sharded along `MODEL`: their last axis, which is that of groups in a 4-bit matrix."""

_FIELDS = ("levels", "scale", "minimum", "scale_unit", "minimum_unit")
"""Arrays of a quantised matrix, whose names follow that of the matrix."""

_ALLOWED = (
    'give a jax.sharding.Mesh with some of the axes "data" (rows), "model" (KV heads and matrices) and "sequence" (slots of the cache, and '
    'matrices), or text such as "data=2,model=4"'
)


def get_mesh(mesh: Mesh | str) -> Mesh:
    """Normalise a mesh, or text such as "data=2,model=4", to a mesh with axes `data`, `model` and `sequence`.

    Sets NCCL_GRAPH_MIXING_SUPPORT=0 unless the variable is set. Without it, NCCL adds event nodes to CUDA graphs, which
    loops do not support. Only programs that communicate inside and outside of a graph at the same time need such nodes.
    The variable has no effect once NCCL is initialised.

    Raises:
        ValueError: the mesh has other axes, or needs more devices than there are.
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
            f"every process; there are {jax.device_count()} in all"
        )
    return Mesh(devices.reshape([mesh.shape.get(axis, 1) for axis in AXES]), AXES)


def is_of_one_process(mesh: Mesh | AbstractMesh | None) -> bool:
    """Whether all devices of a mesh belong to this process."""
    return isinstance(mesh, Mesh) and all(x.process_index == jax.process_index() for x in mesh.devices.flat)


def parse_mesh(text: str) -> dict[str, int]:
    """Parse the axis sizes of a mesh from text such as "data=2,model=4".

    Raises:
        ValueError: the text is not a mesh.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (x.strip() for x in part.partition("="))
        if axis not in AXES or not size.isdecimal() or int(size) < 1 or axis in sizes:
            raise ValueError(f"mesh={text!r}; {_ALLOWED}")
        sizes[axis] = int(size)
    return sizes


def get_shard(mesh: Mesh | AbstractMesh | str | None, config: ModelConfig, *, heads_coupled: bool = False) -> Shard:
    """How the devices of a mesh share a model; `ONE_DEVICE` without a mesh.

    Args:
        mesh: the mesh, which may be abstract.
        config: the model's configuration.
        heads_coupled: whether each device holds all KV heads. Devices along `model` then share slots, as along
            `sequence`, so that caches of unequal heads are balanced.

    Raises:
        ValueError: as `get_mesh`, the query heads cannot be sharded over devices with the same KV heads, or the number
            of devices does not divide that of experts.
    """
    if mesh is None:
        return ONE_DEVICE
    given = mesh if isinstance(mesh, AbstractMesh) else get_mesh(mesh)
    return _get_shard(given, config, heads_coupled)


@lru_cache(maxsize=64)
def _get_shard(given: Mesh | AbstractMesh, config: ModelConfig, heads_coupled: bool) -> Shard:
    _check_axes(given)
    data, model, slots = (given.shape.get(axis, 1) for axis in AXES)
    of_keys = [config.num_kv_heads, *(mixer.key_heads for mixer in config.recurrent_kinds)]
    heads = 1 if heads_coupled else math.gcd(model, *of_keys)
    copies, widths = model // heads, [kind.mixer.output_width for kind in config.kinds]
    if any(width // heads % (copies * slots) for width in widths):
        asked = ",".join(f"{axis}={size}" for axis, size in zip(AXES[1:], (model, slots), strict=True) if size > 1)
        raise ValueError(
            f"{asked}: {heads} times {copies * slots} devices cannot share {config.heads_text}; give a number of devices that "
            f"divides {math.gcd(*widths)}"
        )
    for kind in config.kinds:
        if heads > 1 and isinstance(kind.mixer, AttentionConfig) and kind.mixer.joint_qk_norm:
            raise ValueError(
                f"{heads} devices along model cannot share heads whose queries and keys are normalised together; shard rows along data"
            )
        if isinstance(kind.mlp, MoEConfig) and kind.mlp.experts % (model * slots):
            raise ValueError(
                f"{model * slots} devices along model and sequence cannot share {kind.mlp.experts} experts, which each has "
                f"whole; give a number of devices that divides {kind.mlp.experts}"
            )
    axes = DATA, HEADS, COPIES, SLOTS
    sizes = (data, 1, 1, copies * slots) if heads_coupled else (data, heads, copies, slots)
    if isinstance(given, AbstractMesh):
        return Shard(AbstractMesh(sizes, axes))
    return Shard(Mesh(given.devices.reshape(sizes), axes))


def partition(name: str, ndim: int) -> PartitionSpec:
    """Partition of a parameter, by its name as in `tree_map_named` and its number of axes."""
    part = _matrix(name).rpartition(".")[2]
    if part in _COLUMNS:
        return PartitionSpec(*[None] * (ndim - 1), MODEL) if ndim > 1 else PartitionSpec()
    return PartitionSpec(_ROWS[part]) if part in _ROWS else PartitionSpec()


def partitions(params: Params) -> Params:
    """Partitions of all parameters, in a tree of the same structure."""
    leaves, tree = jax.tree.flatten(params)
    return _partitions(tree, tuple(leaf.ndim for leaf in leaves))


@lru_cache(maxsize=64)
def _partitions(tree: Any, ndims: tuple[int, ...]) -> Params:
    return tree_map_named(partition, tree.unflatten(ndims))


def place(shard: Shard, name: str, weight: Any) -> Any:
    """Pad a parameter and place it on its devices. For a `jax.ShapeDtypeStruct`, return the padded shape with its sharding.

    A parameter that is already in place is not copied.

    Raises:
        ValueError: inputs that share a scale would be on different devices.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(weight)
    names = [".".join(filter(None, (name, name_of(path)))) for path, _ in paths]
    return tree.unflatten([_placed(shard, each, array) for each, (_, array) in zip(names, paths, strict=True)])


def place_from(shard: Shard, name: str, shapes: Any, read: Callable[[slice, slice | None], Any]) -> Any:
    """Read a parameter and place it on its devices. Each process reads only the parts of its own devices, once each.

    Host memory temporarily holds these parts.

    Args:
        shard: the devices.
        name: the parameter's name.
        shapes: shape of the parameter, or of the arrays of a quantised matrix.
        read: `read(rows, columns)` returns at least one row on the host. For a matrix, `columns` slices the last axis,
            which is that of the codes if it is quantised. All columns are returned if they cannot be read separately.

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
    together: dict[Any, list[Any]] = {}  # adjacent parts are read at once
    by_rows, by_columns = (_runs({part[0][axis] for part in parts}) for axis in (0, -1))
    for part in parts:
        together.setdefault((by_rows[part[0][0]], by_columns[part[0][-1]]), []).append(part)
    held: list[list[jax.Array]] = [[] for _ in wanted]
    for (rows, columns), group in together.items():
        rows = _within(rows, own[0].shape[0])
        columns = _within(columns, own[0].shape[-1]) if own[0].ndim > 1 else None
        if any(each.start == each.stop for each in (rows, columns) if each is not None):
            found, cut = [np.zeros((0,) * shape.ndim, shape.dtype) for shape in own], True  # only padding
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
    """Map each range to the union of the adjacent ranges that it belongs to."""
    found: list[list[tuple[int, int]]] = []
    for each in sorted(ranges):
        if found and found[-1][-1][1] == each[0]:
            found[-1].append(each)
        else:
            found.append([each])
    return {each: (run[0][0], run[-1][1]) for run in found for each in run}


def _within(part: tuple[int, int], size: int) -> slice:
    """Clip a range to the unpadded size."""
    return slice(*(min(end, size) for end in part))


def _filled(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Pad an array with zeros to a shape."""
    if array.shape == tuple(shape):
        return array
    whole = np.zeros(shape, array.dtype)
    whole[tuple(map(slice, array.shape))] = array
    return whole


def init_on(
    shard: Shard, config: ModelConfig, key: PRNGKeyArray, dtype: Any, weights: str = "float", embedding: str = "float"
) -> Params:
    """Initialise random parameters on their devices, as `init` does. On a mesh, each device makes only its own part.

    Args:
        shard: the devices.
        config: the model's configuration.
        key: random key.
        dtype, weights, embedding: as for `abstract`.

    Raises:
        ValueError: as `place`.
    """
    if shard.mesh is None:
        return init(config, key, dtype, weights=weights, embedding=embedding)
    programs, tree = _making(shard, config, dtype, weights, embedding)
    keys = jax.random.split(key, len(programs))
    return tree.unflatten([program(each) for program, each in zip(programs, keys, strict=True)])


def compile_init_on(
    shard: Shard, config: ModelConfig, dtype: Any, weights: str = "float", embedding: str = "float"
) -> None:
    """Compile the programs of `init_on` into the compilation cache. Only needed for a mesh, as those for one device compile fast."""
    if shard.mesh is None:
        return
    key = jax.eval_shape(lambda: jax.random.key(0))
    for program in dict.fromkeys(_making(shard, config, dtype, weights, embedding)[0]):
        program.lower(key).compile()


def _making(shard: Shard, config: ModelConfig, dtype: Any, weights: str, embedding: str) -> tuple[list[Any], Any]:
    """For each parameter, the program that makes it from a key; and the tree of all parameters."""
    shapes = abstract(config, dtype, weights=weights, embedding=embedding)
    paths, tree = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=is_quantized)
    programs: list[Any] = []
    for path, leaf in paths:
        arrays, structure = jax.tree.flatten(leaf)
        programs.append(_made(shard, name_of(path).rpartition(".")[2], structure, tuple(arrays), gain_of(config)))
    return programs, tree


@lru_cache(maxsize=256)
def _made(shard: Shard, name: str, structure: Any, arrays: tuple[jax.ShapeDtypeStruct, ...], gain: float) -> Any:
    whole = structure.unflatten(arrays)
    places = place(shard, name, whole)

    def made(key: PRNGKeyArray) -> Any:
        def padded(x: jax.Array, to: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.pad(x, [(0, more - size) for size, more in zip(x.shape, to.shape, strict=True)])

        return jax.tree.map(padded, initial(name, whole, key, gain), places)

    return jax.jit(made, out_shardings=jax.tree.map(lambda x: x.sharding, places))


def place_all(shard: Shard, params: Params) -> Params:
    """Place all parameters on a mesh. Errors as for `place`."""
    leaves, tree = jax.tree.flatten(params)
    ndims = tuple([leaf.ndim for leaf in leaves])
    there = _shardings(shard, jax.tree.structure(dataclasses.replace(params, tokenizer=None)), ndims)
    # Comparing objects is faster than comparing shardings, and succeeds for weights that were placed here.
    moved = [i for i, leaf in enumerate(leaves) if getattr(leaf, "sharding", None) is not there[i][1]]
    for i in moved:
        leaves[i] = _placed(shard, there[i][0], leaves[i])
    return tree.unflatten(leaves) if moved else params


@lru_cache(maxsize=64)
def _shardings(shard: Shard, tree: Any, ndims: tuple[int, ...]) -> list[tuple[str, NamedSharding]]:
    """Name and sharding of all parameters."""
    names = [name_of(path) for path, _ in jax.tree.leaves_with_path(tree.unflatten(range(tree.num_leaves)))]
    return [(name, _sharding(shard, name, ndim)) for name, ndim in zip(names, ndims, strict=True)]


@lru_cache(maxsize=1 << 14)
def _sharding(shard: Shard, name: str, ndim: int) -> NamedSharding:
    return NamedSharding(_mesh(shard), partition(name, ndim))


def along_data(shard: Shard, params: Params) -> list[tuple[Params, Mesh | None]]:
    """For each index of `data`: the weights on the devices of this index, and the mesh of these devices.

    Weights that are in place are not copied. Without a mesh, there is one entry.

    Raises:
        ValueError: as `place`.
    """
    if shard.mesh is None:
        return [(params, None)]
    mesh, params = _mesh(shard), place_all(shard, params)
    assert isinstance(mesh, Mesh)
    if shard.data == 1:
        return [(params, mesh_of(params))]

    def at(mesh: Mesh) -> Params:
        def held(leaf: jax.Array) -> jax.Array:
            assert isinstance(leaf.sharding, NamedSharding)
            sharding = NamedSharding(mesh, leaf.sharding.spec)
            arrays = {each.device: each.data for each in leaf.addressable_shards}
            own = [arrays[device] for device in mesh.devices.flat]
            return jax.make_array_from_single_device_arrays(leaf.shape, sharding, own)

        return jax.tree.map(held, params)

    found = [at(Mesh(mesh.devices[i : i + 1], mesh.axis_names)) for i in range(shard.data)]
    return [(each, mesh_of(each)) for each in found]


def own_shape(name: str, shape: Sequence[int], matrix: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Shape of a parameter without the padding that a mesh may have added.

    Args:
        name: the parameter's name.
        shape: its possibly padded shape.
        matrix: unpadded shapes of parameters, by name.
    """
    outputs, *inputs = matrix[_matrix(name)]
    padded = len(inputs) == 1 and len(shape) == 2 and (name.endswith(".levels") or _matrix(name) == name)
    return (outputs, *(inputs if padded else shape[1:]))


def unpadded(params: Params) -> Params:
    """Remove the padding that a mesh may have added. The parameters remain on their devices."""
    if mesh_of(params) is None:
        return params
    whole = abstract(params.config)
    shapes = {name_of(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(whole)}

    def cut(name: str, leaf: Any) -> Any:
        own = own_shape(name, leaf.shape, shapes)
        return leaf if own == leaf.shape else leaf[tuple(map(slice, own))]

    return tree_map_named(cut, params)


def mesh_of(params: Params) -> Mesh | None:
    """Mesh of placed weights, with axes `data`, `model` and `sequence`; None if they are on one device."""
    sharding = getattr(params.norm, "sharding", None)
    if not isinstance(sharding, NamedSharding) or set(sharding.mesh.axis_names) != {DATA, *MODEL}:
        return None
    return _users_mesh(sharding.mesh)


@lru_cache(maxsize=64)
def _users_mesh(mesh: Any) -> Mesh:
    devices = np.asarray(mesh.devices)
    return Mesh(devices.reshape(len(devices), -1, devices.shape[-1]), AXES)


def bytes_per_device(tree: Any) -> int:
    """Bytes per device of arrays, or of shapes with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape) if getattr(x, "sharding", None) else x.shape) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def _check_axes(mesh: Mesh | AbstractMesh) -> None:
    if not mesh.axis_names or set(mesh.axis_names) - set(AXES):
        raise ValueError(f"mesh has the axes {list(mesh.axis_names)}; {_ALLOWED}")


def _placed(shard: Shard, name: str, array: Any) -> Any:
    sharding = _sharding(shard, name, array.ndim)
    if isinstance(array, jax.Array) and array.sharding == sharding:
        return array  # which is padded already
    axes, sizes = sharding.spec, {None: 1, HEADS: shard.heads, MODEL: shard.model}
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
    if isinstance(array, np.ndarray):  # from a file: each device receives only its part
        whole = np.pad(array, padding) if any(more for _, more in padding) else array
        return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])
    return moved(_padded(array, tuple(padding)) if any(more for _, more in padding) else array, sharding)


@partial(jax.jit, static_argnums=1)
def _padded(array: jax.Array, padding: tuple[tuple[int, int], ...]) -> jax.Array:
    return jnp.pad(array, padding)


def moved(array: jax.Array, sharding: Sharding) -> jax.Array:
    """Place an array on its devices, not by way of the host.

    `jax.device_put` copies shards between devices, but copies the array to the host and back if it has not all of the
    wanted shards. An array that is in place is not copied.

    Args:
        array: the array. If neither its devices nor its shards are the wanted ones, each of its devices temporarily
            holds all of it.
        sharding: the wanted devices and shards.
    """
    own, wanted = _shards(array.sharding, array.shape), _shards(sharding, array.shape)
    if len(own) == 1 or not array.is_fully_addressable or set(wanted.values()) <= set(own.values()):
        return jax.device_put(array, sharding)
    if list(own) == list(wanted):
        return _resharding(sharding)(array)
    if own.keys() != wanted.keys():  # for the same devices in another order, `device_put` does this
        everywhere = NamedSharding(Mesh(np.asarray(list(own)), ("copies",)), PartitionSpec())
        array = _resharding(everywhere)(array).addressable_shards[0].data
    return jax.device_put(array, sharding)


def _shards(sharding: Sharding, shape: Sequence[int]) -> dict[Any, tuple[tuple[int, ...], ...]]:
    """Part of an array on each device, in the order of devices."""
    parts = sharding.devices_indices_map(tuple(shape))
    return {
        device: tuple(each.indices(size) for each, size in zip(part or (), shape, strict=True))
        for device, part in parts.items()
    }


@lru_cache(maxsize=256)
def _resharding(sharding: Sharding) -> Any:
    return jax.jit(lambda array: array, out_shardings=sharding)


def _matrix(name: str) -> str:
    """Name of the parameter that an array belongs to."""
    matrix, _, field = name.rpartition(".")
    return matrix if field in _FIELDS else name


def _mesh(shard: Shard) -> Mesh | AbstractMesh:
    assert shard.mesh is not None
    return shard.mesh
