"""Parses settings written as text, ``name=value``, by the types of their fields."""

import ast
import types
import typing
from typing import Any, Literal, get_args, get_origin

MAX_INT = 2**31 - 1
"""Maximum count of tokens or examples, as positions are 32-bit numbers."""


LITERAL_ERRORS = ValueError, SyntaxError, MemoryError, RecursionError
"""Exceptions that Python raises for text that is not a value; the last two for text that is nested too deeply."""


def split_setting(setting: str) -> tuple[str, str]:
    """Split ``name=value``. Hyphens in the name count as underscores.

    Raises:
        ValueError: there is no equals sign.
    """
    name, equals, value = setting.partition("=")
    if not equals:
        raise ValueError(f"{setting!r}: write NAME=VALUE")
    return name.strip().replace("-", "_"), value.strip()


def parse_value(text: str, hint: Any) -> Any:
    """Parse a value as the declared type of its field.

    Args:
        text: the text; ``none`` is None if the field allows it.
        hint: int, float, bool, str, None, a `Literal`, a tuple of these, or a union.

    Raises:
        ValueError: the field does not allow the value. The message lists what it allows.
    """
    limit = ""
    for kind in _alternatives(hint):
        try:
            return _parse(text, kind)
        except OverflowError as error:
            limit = f" {error}"
        except LITERAL_ERRORS:
            continue
    allowed = [kind for kind in _alternatives(hint) if not (kind is int and float in _alternatives(hint))]
    raise ValueError("give " + " or ".join(_name(kind) + ("" if kind is type(None) else limit) for kind in allowed))


def _alternatives(hint: Any) -> tuple[Any, ...]:
    union = get_origin(hint) in (typing.Union, types.UnionType)
    return get_args(hint) if union else (hint,)


def _parse(text: str, kind: Any) -> Any:
    if kind is type(None) and text.lower() == "none":
        return None
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind in (int, float, str):
        return _in_range(kind(text))
    if get_origin(kind) is Literal:
        return {str(value): value for value in get_args(kind)}[text] if text in map(str, get_args(kind)) else _refuse()
    if get_origin(kind) is tuple:
        value = ast.literal_eval(text if text.startswith("(") else f"({text},)")
        return tuple(map(_in_range, value)) if isinstance(value, tuple) else _refuse()
    return _refuse()


def _in_range(value: Any) -> Any:
    """Return a value.

    Raises:
        OverflowError: it is a number that exceeds 32 bits. The message continues what is allowed.
    """
    number, most = isinstance(value, int | float) and not isinstance(value, bool), 3e38
    if isinstance(value, int):
        most = MAX_INT
    if number and not abs(value) <= most:
        raise OverflowError(f"from {-most} to {most}")
    return value


def _refuse() -> typing.NoReturn:
    raise ValueError


def _name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(str(value) for value in get_args(kind))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    if get_origin(kind) is tuple:
        return "values separated by commas"
    return names.get(kind, "a value from Python: the command line cannot write this one")
