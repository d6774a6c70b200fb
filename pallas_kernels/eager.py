"""One program for an operation that is called outside `jax.jit`."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer


def in_one_program(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """`function(*args, **options)`. Outside `jax.jit` it is compiled as one program, and not one for each of its steps.

    Arrays are arguments of that program; all else is part of it, as is what the function reads of the module that it is in when it is
    first called with these. Step by step it goes where something else is not hashable.
    """
    leaves, tree = jax.tree.flatten((args, options))
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return function(*args, **options)
    arrays = [leaf if isinstance(leaf, jax.Array | np.ndarray | np.generic) else None for leaf in leaves]
    # With their types, since True, 1 and 1.0 are equal and give programs that differ.
    constants = tuple((type(x), x) if array is None else None for x, array in zip(leaves, arrays, strict=True))
    try:
        program = _program(function, tree, constants)
    except TypeError:
        return function(*args, **options)
    return program(arrays)


@functools.lru_cache(maxsize=256)
def _program(
    function: Callable[..., Any], tree: Any, constants: tuple[tuple[type, Hashable] | None, ...]
) -> Callable[..., Any]:
    """The function of a list of arrays, compiled; the list has None where `constants` has a value."""

    @jax.jit
    def program(arrays: list[Any]) -> Any:
        leaves = [array if x is None else x[1] for array, x in zip(arrays, constants, strict=True)]
        args, options = jax.tree.unflatten(tree, leaves)
        return function(*args, **options)

    return program
