"""Run-time checks of the shapes and types that kvjax promises in its annotations, for the time tests run."""

import functools
import types
import typing
from collections.abc import Callable
from typing import Any

import beartype
import beartype.roar
import jaxtyping

UNCHECKED = {
    "kvjax.runtime.aot",
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


CHECKS: dict[types.CodeType, tuple[dict[str, Any], Callable[..., Any] | None]] = {}
"""Of functions in functions, by their code: the annotations, and the check of one of them, which is made anew for each by `_bound`."""


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have beartype check the arguments and the result of `function`, the sizes in whose shapes mean the same throughout a call.

    Four kinds are left unchecked: constructors, since JAX rebuilds pytrees with placeholders, abstract shapes and shardings
    as leaves; functions whose annotations have no run-time check (`typing.Self`, a plain `typing.Protocol`), or that have none;
    and what is `UNCHECKED`.
    """
    names = {function.__module__, f"{function.__module__}.{function.__qualname__}"}
    if function.__name__ == "__init__" or names & UNCHECKED or not function.__annotations__:
        return function
    checked: Callable[..., Any] | None = None
    sized = True

    @functools.wraps(function)
    def checked_when_called(*args: Any, **options: Any) -> Any:
        # Beartype takes a millisecond a function, and most processes call few of the thousands.
        nonlocal checked, sized
        __tracebackhide__ = True
        if checked is None:
            checked, sized = _checked(function), _has_sizes(function)
        if not sized:
            return checked(*args, **options)
        with sizes("context"):
            return checked(*args, **options)

    return checked_when_called


def _has_sizes(function: Any) -> bool:
    """Whether a function's annotations have shapes. Most have none, and a context for their sizes takes longer than the checks."""
    hints = [_resolved(hint, function) for hint in function.__annotations__.values()]
    while hints:
        hint = hints.pop()
        if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
            return True
        hints.extend(typing.get_args(hint))
    return False


def _checked(function: Any) -> Callable[..., Any]:
    """The function with beartype's check. Functions that are made again and again, in others, share it."""
    annotations, made = CHECKS.get(function.__code__, (None, None))
    if annotations != function.__annotations__:
        made = _check_of(function)
        if "<locals>" in function.__qualname__:
            CHECKS[function.__code__] = dict(function.__annotations__), made
    return function if made is None else _bound(made, function)


def _check_of(function: Any) -> Callable[..., Any] | None:
    """Beartype's check of a function, which holds on to nothing that the function does; None if there is nothing that can be checked."""
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    like = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
    like.__qualname__, like.__module__ = function.__qualname__, function.__module__
    like.__annotations__ = {name: _resolved(hint, function) for name, hint in function.__annotations__.items()}
    try:
        made = beartype.beartype(like)
    except beartype.roar.BeartypeDecorHintException:
        return None
    return None if made is like else made


def _resolved(hint: Any, function: Any) -> Any:
    """A hint without names in quotes; anything, where they are not known when programs run."""
    if not isinstance(hint, str) and "ForwardRef(" not in repr(hint):
        return hint
    try:
        return typing.get_type_hints(
            types.SimpleNamespace(__annotations__={"it": hint}), function.__globals__, include_extras=True
        )["it"]
    except Exception:  # whatever evaluating it raises
        return Any


def _bound(made: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A check that calls this function: beartype's has the one that it calls as a default of an argument."""
    found = types.FunctionType(made.__code__, made.__globals__, made.__name__, made.__defaults__, made.__closure__)
    found.__kwdefaults__ = made.__kwdefaults__ | {"__beartype_func": function}
    return found


sizes = jaxtyping.jaxtyped
"""`sizes("context")`: sizes in shapes have no values yet, and lose them at its end."""


def install() -> None:
    """Check every function of kvjax that is imported from now on.

    Jaxtyping's import hook puts its decorator on all functions and classes. That decorator makes two functions of each to be checked,
    at once, which takes as long as all other imports; and has beartype check arguments twice. `check` replaces it in what the hook reads.
    """

    def decorator(*args: Any, **options: Any) -> Any:
        if args or options.get("typechecker") is None:
            return sizes(*args, **options)
        return lambda made: made if isinstance(made, type) else check(made)

    jaxtyping.jaxtyped = decorator
    jaxtyping.install_import_hook("kvjax", "runtime_types.check")
