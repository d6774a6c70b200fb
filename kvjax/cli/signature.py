"""From a function to a command: options that are declared once, for all commands or for those that share them."""

import contextlib
import dataclasses
import functools
import inspect
import os
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from kvjax._util.user_code import POLICIES

PoliciesFromOption = Annotated[
    str | None,
    typer.Option(
        "--policies-from",
        metavar="MODULE",
        envvar=POLICIES,
        help="Python file or module that registers policies of your own, for use by name.",
        show_default=False,
    ),
]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as a command, which has the option `--policies-from`, too.

    A parameter that is a dataclass becomes an option for each of its fields.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}

    def add(parameter: inspect.Parameter, name: str, annotation: Any, default: Any) -> None:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(parameter.replace(name=name, kind=kind, annotation=annotation, default=default))

    hints = typing.get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        kind = hints[parameter.name]
        if dataclasses.is_dataclass(kind):
            groups[parameter.name], options = kind, typing.get_type_hints(kind, include_extras=True)
            for field in dataclasses.fields(kind):
                add(parameter, field.name, options[field.name], field.default)
        else:
            add(parameter, parameter.name, kind, parameter.default)
    add(parameters[0], "policies_from", PoliciesFromOption, None)

    @functools.wraps(function)
    def run(policies_from: str | None, **values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in dataclasses.fields(kind)})
        with _own_policies(policies_from):
            function(**values)

    run.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run


@contextlib.contextmanager
def _own_policies(source: str | None) -> Iterator[None]:
    """Within it the policies of a module are known by name, also in processes that are started."""
    before = os.environ.get(POLICIES, "")
    if source:
        from kvjax.policies.registry import load_policies

        load_policies(source)
        os.environ[POLICIES] = source
    try:
        yield
    finally:
        os.environ[POLICIES] = before
