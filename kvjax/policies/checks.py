"""Errors of a policy's own functions. They name the policy, the function, and the shapes returned and expected."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from .info import PolicyError


@contextlib.contextmanager
def calling(layer: Any, function: str) -> Iterator[None]:
    """Add to an error raised within which function of which policy was called, and in which layer."""
    try:
        yield
    except Exception as error:
        note = f"In {function}() of policy {layer.policy.info.name!r}, layer {layer.spec.layer}."
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def expect_shape(policy: Any, function: str, returned: Any, names: str, shape: tuple[int, ...]) -> None:
    """Raise `PolicyError` unless an array that a policy's function returned has the expected shape.

    Args:
        policy: a `Policy`.
        function: name of the function.
        returned: what it returned.
        names: names of the axes, such as "B K T".
        shape: the expected shape.
    """
    found = getattr(returned, "shape", None)
    if found != shape:
        what = type(returned).__name__ if found is None else f"shape {found}"
        raise PolicyError(f"{policy.info.name}: {function} returned {what}; return an array [{names}] of shape {shape}")


def expect_same_state(layer: Any, function: str, before: Any, after: Any) -> None:
    """Raise `PolicyError` unless a layer's state has the structure, shapes and types that it had before a function was called."""
    was, structure = jax.tree.flatten_with_path(before)
    now, found = jax.tree.flatten(after)
    name = layer.policy.info.name
    if structure != found:
        raise PolicyError(
            f"{name}: {function} returned a state of structure {found}; return the state's own, {structure}"
        )
    for (path, old), new in zip(was, now, strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise PolicyError(
                f"{name}: {function} returned {new.dtype}{list(new.shape)} for state{jax.tree_util.keystr(path)}; return "
                f"{old.dtype}{list(old.shape)}, as a state never changes its shapes and types"
            )
