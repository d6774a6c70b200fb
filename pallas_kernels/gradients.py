"""Derivatives of kernels, which are those of XLA's form, and errors where a derivative does not exist."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

Tree = TypeVar("Tree")


def without_gradient(tree: Tree, error: Exception) -> Tree:
    """Return the tree unchanged, but make every derivative of its arrays raise `error`.

    An array that occurs several times in the tree remains one array. Otherwise kernels that update it in place would
    have to copy it.

    Args:
        tree: any pytree; leaves that are not JAX arrays are returned as they are.
        error: raised when JAX differentiates through the tree.
    """

    @jax.custom_jvp
    def same(arrays: list[jax.Array]) -> list[jax.Array]:
        return arrays

    @same.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise error

    leaves, kind = jax.tree.flatten(tree)
    arrays = {id(leaf): leaf for leaf in leaves if isinstance(leaf, jax.Array)}
    arrays = dict(zip(arrays, same(list(arrays.values())), strict=True))
    return jax.tree.unflatten(kind, [arrays.get(id(leaf), leaf) for leaf in leaves])


@functools.cache
def differentiable(kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel, with the derivatives of the reference. Both take the same arguments and return the same arrays.

    Derivatives are computed from the arguments. The kernel's result is only used where nothing is differentiated.
    """

    def function(*args: Any, **options: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, options))
        # An array that occurs several times remains one array. Otherwise a kernel that updates it in place would copy it.
        arrays = {id(leaf): leaf for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray)}
        names = list(arrays)

        def given(values: list[Any]) -> Any:
            found = dict(zip(names, values, strict=True))
            return jax.tree.unflatten(tree, [found.get(id(leaf), leaf) for leaf in leaves])

        @jax.custom_jvp
        def run(values: list[Any]) -> Any:
            own, how = given(values)
            return kernel(*own, **how)

        @run.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            def by_reference(values: list[Any]) -> Any:
                own, how = given(values)
                return reference(*own, **how)

            return jax.jvp(by_reference, primals, tangents)

        return run(list(arrays.values()))

    return function
