"""Run-time checks of the shapes and types that kvjax promises in its annotations, for the time tests run."""

from collections.abc import Callable
from typing import Any

import beartype
import jaxtyping


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have beartype check the arguments and the result of `function`, constructors excepted.

    JAX rebuilds pytrees with placeholders, abstract shapes and whole arrays of shardings as leaves, so what a field of a
    pytree holds is checked where it is used, not where it is stored.
    """
    return function if function.__name__ == "__init__" else beartype.beartype(function)


def install() -> None:
    """Check every function of kvjax that is imported from now on."""
    jaxtyping.install_import_hook("kvjax", "runtime_types.check")
