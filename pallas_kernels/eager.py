"""Compile an operation as one program outside `jax.jit`, and trace it once inside. `Op.__call__` uses this."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .device import target


def in_one_program(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return `function(*args, **options)`, compiled as one program if called outside `jax.jit`.

    Without this, JAX would compile and dispatch every primitive by itself. Inside `jax.jit`, a program for a CPU traces
    the function once for equal shapes and static arguments, and inlines the result in every layer. Tracing takes much of
    the time of a start with cached programs. Programs for other devices are traced in full, because constants of inlined
    functions become part of loop bodies. Arrays are arguments of the program; all
    other arguments are static, and so are the globals that the function reads when it is first traced. If a static
    argument is not hashable, the function runs primitive by primitive.

    Args:
        function: a function of arrays and static values.
        args: positional arguments.
        options: keyword arguments.
    """
    leaves, tree = jax.tree.flatten((args, options))
    traced = any(isinstance(leaf, Tracer) for leaf in leaves)
    if traced and target().platform != "cpu":
        return function(*args, **options)
    arrays = [leaf if isinstance(leaf, jax.Array | np.ndarray | np.generic) else None for leaf in leaves]
    # The types are part of the key, since True, 1 and 1.0 are equal but give different programs.
    constants = tuple((type(x), x) if array is None else None for x, array in zip(leaves, arrays, strict=True))
    try:
        program = _program(function, tree, constants, traced)
    except TypeError:
        return function(*args, **options)
    return program(arrays)


@functools.lru_cache(maxsize=256)
def _program(
    function: Callable[..., Any], tree: Any, constants: tuple[tuple[type, Hashable] | None, ...], inline: bool
) -> Callable[..., Any]:
    """Compile the function as a function of a list of arrays, which has None where `constants` has a value."""

    @functools.partial(jax.jit, inline=inline)
    def program(arrays: list[Any]) -> Any:
        leaves = [array if x is None else x[1] for array, x in zip(arrays, constants, strict=True)]
        args, options = jax.tree.unflatten(tree, leaves)
        return function(*args, **options)

    return program
