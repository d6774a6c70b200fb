"""Run-time checks of the shapes and types that kvjax promises in its annotations, for the time tests run."""

import functools
from collections.abc import Callable
from typing import Any

import beartype
import beartype.roar
import jaxtyping

UNCHECKED = {
    "kvjax.runtime.compiling",
    "kvjax.runtime.engine",
    "kvjax.conversion.state_dict",
    "kvjax.conversion.writing",
    "kvjax.runtime.generation",
    "kvjax.policies.text",
    "kvjax.runtime.prompts",
    "kvjax.runtime.request",
    "kvjax.runtime.sampling.make_sampler",
    "kvjax.runtime.session",
}
"""Modules and functions that take whatever users pass, and are tested for the errors that they answer with."""


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have beartype check the arguments and the result of `function`.

    Three kinds are left unchecked: constructors, since JAX rebuilds pytrees with placeholders, abstract shapes and shardings
    as leaves; functions whose annotations have no run-time check (`typing.Self`, a plain `typing.Protocol`); and
    what is `UNCHECKED`.
    """
    names = {function.__module__, f"{function.__module__}.{function.__qualname__}"}
    if function.__name__ == "__init__" or names & UNCHECKED:
        return function
    checked: Callable[..., Any] | None = None

    @functools.wraps(function)
    def checked_when_called(*args: Any, **options: Any) -> Any:
        # Beartype takes a millisecond a function, and most processes call few of the thousands.
        nonlocal checked
        if checked is None:
            try:
                checked = beartype.beartype(function)
            except beartype.roar.BeartypeDecorHintException:
                checked = function
        return checked(*args, **options)

    return checked_when_called


def install() -> None:
    """Check every function of kvjax that is imported from now on."""
    jaxtyping.install_import_hook("kvjax", "runtime_types.check")
