"""Parameters from and to the trees of other JAX libraries: tunix, gemma and MaxText."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta

from kvjax.config import ModelConfig
from kvjax.models import Params, abstract
from kvjax.models.params import TREES, tree_map_named
from kvjax.models.sharding import unpadded

from .errors import CheckpointError, listed
from .tree_config import tree_config
from .tree_layout import TreeLayout, TreeTensor, axis_sizes, tree_layout

_WRAPPERS = ("params.", "transformer.")
"""Outer levels of some trees, which contain all of their arrays."""

_VISION = ("vision_encoder.", "embedder.mm_")
"""Beginnings of the names of arrays that text does not need."""


def from_tree(tree: Any, layout: str, config: Any, *, dtype: Any = None, tokenizer: Any = None) -> Params:
    """Make parameters from the tree of another JAX library.

    Arrays that both libraries store alike are shared, others are copied.

    Args:
        tree: nested mappings of arrays, or an `nnx.State`. An outer level "params" and a vision encoder are skipped.
        layout: the library: "tunix", "gemma" or "maxtext". MaxText's layers may be stacked along axis 1 or separate.
        config: the model: a `ModelConfig`, a Hugging Face configuration (an object, or the contents of a config.json),
            or the configuration of the library. The latter names no end tokens and no window.
        dtype: type of the parameters. By default that of the embedding.
        tokenizer: tokenizer to attach, such as `kvjax.conversion.Tokenizer`.

    Returns:
        The parameters, on the devices of the tree's arrays.

    Raises:
        CheckpointError: the model is not supported in this layout, or an array is missing, unexpected or of another
            shape. The message names the array, its shape and the expected shape.

    Example:
        >>> tree = kvjax.conversion.to_tree(params, "tunix")
        >>> copy = kvjax.conversion.from_tree(tree, "tunix", params.config)
        >>> copy.config == params.config, bool((copy.embed == params.embed).all())
        (True, True)
    """
    config = tree_config(config, layout)
    found = {name: leaf for name, leaf in _without_wrappers(named(tree)).items() if not name.startswith(_VISION)}
    table = tree_layout(config, layout, stacked=not any(name.startswith("decoder.layers_") for name in found))
    _check(found, table, layout, config)
    parts: dict[str, Any] = {}
    for name, tensor in table.items():
        parts |= _read(jnp.asarray(found[name]), tensor)
    dtype = parts["embed"].dtype if dtype is None else np.dtype(dtype)
    shapes = abstract(config, dtype, tokenizer)
    return tree_map_named(lambda name, leaf: parts[name].reshape(leaf.shape).astype(dtype), shapes)


def to_tree(params: Params, layout: str, *, stacked: bool = True) -> dict[Any, Any]:
    """Write parameters as the tree of another JAX library.

    Args:
        params: loaded parameters, not quantised.
        layout: "tunix", "gemma" or "maxtext".
        stacked: whether MaxText's layers are stacked along axis 1, as with its option `scan_layers`, or separate.

    Returns:
        Nested dicts of arrays, without an outer level "params". Layers of tunix are numbered with integers.

    Raises:
        CheckpointError: the layout has no place for a part of the model, or a matrix is quantised.

    Example:
        >>> tree = kvjax.conversion.to_tree(params, "maxtext")
        >>> tree["token_embedder"]["embedding"].shape  # vocabulary, width
        (64, 48)
    """
    table = tree_layout(params.config, layout, stacked)
    parts: dict[str, Any] = {}
    tree_map_named(lambda name, leaf: parts.setdefault(name, leaf), unpadded(params))
    tree: dict[Any, Any] = {}
    for name, tensor in table.items():
        if missing := [part for part in tensor.holds if part not in parts]:
            raise CheckpointError(f"{missing[0]} is quantised; load the model with float weights to write its tree")
        *folders, leaf = (int(part) if part.isdigit() else part for part in name.split("."))
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[leaf] = _written([parts[part] for part in tensor.holds], tensor, params.config)
    return tree


def named(tree: Any) -> dict[str, Any]:
    """Arrays of an `nnx.State` or of nested mappings, by dotted name. Boxes of `flax.linen` are opened."""
    tree = nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree
    return dict(_named(meta.unbox(tree), ""))


def _named(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        yield name, tree
        return
    for key, value in tree.items():
        yield from _named(value, f"{name}.{key}" if name else str(key))


def _without_wrappers(found: dict[str, Any]) -> dict[str, Any]:
    found = {name.replace("/", "."): leaf for name, leaf in found.items()}
    for wrapper in _WRAPPERS * 2:
        if found and all(name.startswith(wrapper) for name in found):
            found = {name.removeprefix(wrapper): leaf for name, leaf in found.items()}
    return found


def _check(found: Mapping[str, Any], table: TreeLayout, layout: str, config: ModelConfig) -> None:
    if missing := table.keys() - found.keys():
        raise CheckpointError(f"{layout}: the tree has no {listed(missing)}. Pass all parameters of the model.")
    if unknown := found.keys() - table.keys():
        raise CheckpointError(
            f"{layout}: {listed(unknown)} has no counterpart in a {config.family} model. Pass the parameters alone, with "
            "adapters merged into them, and a configuration that fits."
        )
    for name, tensor in table.items():
        size, expected = tuple(np.shape(found[name])), tensor.shape(config)
        if size != expected:
            raise CheckpointError(
                f"{layout}: {name} has the shape {size}, but the configuration needs {expected}. Pass the configuration of "
                "this model."
            )


def _read(array: jax.Array, tensor: TreeTensor) -> dict[str, jax.Array]:
    """The parameters in an array, with their axes apart."""
    at = tensor.axes.find("*")
    parts = [array] if at < 0 else [jnp.take(array, i, axis=at) for i in range(len(tensor.holds))]
    axes = tensor.axes.replace("*", "")
    found = {}
    for name, part in zip(tensor.holds, parts, strict=True):
        own = tensor.own_axes(name)
        part = part.transpose([axes.index(axis) for axis in own]) if own != axes else part
        if tensor.pairs:
            h = own.index("H")
            even, odd = (jnp.take(part, jnp.arange(first, part.shape[h], 2), axis=h) for first in (0, 1))
            part = jnp.concatenate([even, odd], axis=h)
        found[name] = _scaled(part, tensor.factor)
    return found


def _written(parts: list[Any], tensor: TreeTensor, config: ModelConfig) -> jax.Array:
    """The array that contains the parameters: the inverse of `_read`."""
    axes, written = tensor.axes.replace("*", ""), []
    for name, given in zip(tensor.holds, parts, strict=True):
        own, sizes = tensor.own_axes(name), axis_sizes(config, name)
        part = _scaled(given, 1 / tensor.factor)
        if len(own) > 1:
            part = part.reshape([sizes[axis] for axis in own])
        if tensor.pairs:
            h = own.index("H")
            halves = jnp.split(part, 2, axis=h)
            part = jnp.stack(halves, axis=h + 1).reshape(part.shape)
        written.append(part.transpose([own.index(axis) for axis in axes]) if own != axes else part)
    at = tensor.axes.find("*")
    return written[0] if at < 0 else jnp.stack(written, axis=at)


def _scaled(array: jax.Array, factor: float) -> jax.Array:
    """The product with a factor, computed in float32."""
    if factor == 1:
        return array
    return (array.astype(jnp.float32) * jnp.float32(factor)).astype(array.dtype)


TREES.read, TREES.write = from_tree, to_tree
