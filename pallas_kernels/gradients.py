"""Raise a clear error where a derivative is not implemented. `Op.__call__` and policies that fit caches use this."""

from typing import Any, TypeVar

import jax

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
