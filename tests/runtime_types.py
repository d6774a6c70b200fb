"""Run-time checks of the shapes and types that kvjax promises in its annotations, for the time tests run."""

from collections.abc import Callable
from typing import Any

import beartype
import beartype.roar
import jaxtyping

_TAKE_ANYTHING = (
    "kvjax.conversion.state_dict",
    "kvjax.conversion.writing",
    "kvjax.generation",
    "kvjax.policies.registry",
)


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have beartype check the arguments and the result of `function`.

    Three kinds are left unchecked: constructors, since JAX rebuilds pytrees with placeholders, abstract shapes and shardings
    as leaves; functions whose annotations have no run-time check (`typing.Self`, a plain `typing.Protocol`); and
    modules that take whatever users pass and are tested for the errors they answer with.
    """
    if function.__name__ == "__init__" or function.__module__ in _TAKE_ANYTHING:
        return function
    try:
        return beartype.beartype(function)
    except beartype.roar.BeartypeDecorHintException:
        return function


def install() -> None:
    """Check every function of kvjax that is imported from now on."""
    jaxtyping.install_import_hook("kvjax", "runtime_types.check")
