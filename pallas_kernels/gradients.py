"""What has no gradient says so to whoever asks for one."""

from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")


def without_gradient(tree: Tree, error: Exception) -> Tree:
    """The same, but that whoever asks for derivatives of what follows from its arrays gets the error.

    An array that is there several times is one array still: kernels that change it in place would have it copied else.
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
