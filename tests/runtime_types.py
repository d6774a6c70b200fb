"""Run-time checks of the shapes and types that kvjax promises in its annotations, for the time tests run."""

from collections.abc import Callable
from typing import Any

import beartype
import beartype.roar
import jaxtyping


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have beartype check the arguments and the result of `function`.

    Two kinds are left unchecked: constructors, since JAX rebuilds pytrees with placeholders, abstract shapes and shardings
    as leaves; and functions whose annotations have no run-time check
    (`typing.Self`, a plain `typing.Protocol`).
    """
    if function.__name__ == "__init__":
        return function
    try:
        return beartype.beartype(function)
    except beartype.roar.BeartypeDecorHintException:
        return function


def install() -> None:
    """Check every function of kvjax that is imported from now on."""
    jaxtyping.install_import_hook("kvjax", "runtime_types.check")
