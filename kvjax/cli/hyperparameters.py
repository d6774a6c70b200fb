"""From `--policy`, `--budget` and `--set name=value` to a policy."""

import ast
import dataclasses
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args, get_origin

import typer

from kvjax.nearest import hint
from kvjax.texts import read_text

from . import checks

if TYPE_CHECKING:
    from kvjax.policies import Policy

T = TypeVar("T")


def read_policy(name: str, budget: str | None, settings: Sequence[str] | None = None) -> "Policy":
    """The policy that `--policy`, `--budget` and `--set` ask for.

    Raises:
        PolicyError: it does not exist, or does not take these values.
    """
    from kvjax.policies import PolicyError, get_policy, policy_class

    given: dict[str, str] = {} if budget is None else {"budget": budget}
    for setting in settings or ():
        given[setting_name(setting)] = setting.partition("=")[2].strip()
    cls = policy_class(name)
    hints = {"budget": int | float} | typing.get_type_hints(cls)  # which every policy takes, if only to ignore it
    fields = {field.name for field in dataclasses.fields(cls)} | {"budget"}
    values: dict[str, Any] = dict(given)  # unknown names go through as they are: get_policy knows what to say of them
    for key in given.keys() & fields:
        try:
            values[key] = parse_value(given[key], hints[key])
        except ValueError as error:
            raise PolicyError(f"{name}: {key}={given[key]!r}; {error}") from None
    unset = [key for key, value in values.items() if value is None]  # which get_policy would take for "not given"
    policy = get_policy(name, **values)
    policy = dataclasses.replace(policy, **dict.fromkeys(unset)) if unset else policy
    policy.validate(_LONG)
    _check_profile(policy)
    return policy


_LONG = 1 << 30
"""Tokens of a text so long that a budget which is too small for it is too small for any."""


def _check_profile(policy: "Policy") -> None:
    from kvjax.calibration.making import METHODS
    from kvjax.policies.profile import load

    profile = getattr(policy, "profile", None)
    if isinstance(profile, str) and profile not in METHODS:
        read_text(Path(profile))
        load(profile, METHODS[policy.info.name].profile)


def read_policies(names: str, budgets: str | None, settings: Sequence[str], option: str) -> "list[Policy]":
    """Every policy at every budget, both separated by commas.

    A policy without a budget is there once. Settings go to those policies that have them; one of them at least must.

    Args:
        option: which names the policies.

    Raises:
        PolicyError: a policy does not exist, does not take these values, or a setting is none's.
    """
    from kvjax.policies import PolicyError, policy_class

    classes = [policy_class(name) for name in checks.listed(names, option)]
    checks.once([cls.about.name for cls in classes], option)
    wanted = [None] if budgets is None else checks.listed(budgets, "--budget")
    chosen, taken = [], set()
    for cls in classes:
        fields = {field.name for field in dataclasses.fields(cls)}
        own = [setting for setting in settings if setting_name(setting) in fields]
        taken.update(own)
        for budget in wanted if "budget" in fields else wanted[:1]:
            chosen.append(read_policy(cls.about.name, budget, own))
    for setting in settings:
        if setting not in taken:
            known = {field.name for cls in classes for field in dataclasses.fields(cls)}
            names = ", ".join(cls.about.name for cls in classes)
            raise PolicyError(
                f"{setting}: none of {names} has this hyperparameter.{hint(setting_name(setting), known)}"
            )
    return chosen


def read_settings(cls: type[T], settings: Sequence[str]) -> T:
    """A dataclass of settings from `--set name=value`, what is not set at its default.

    Raises:
        ValueError: there is no such setting, or it does not take that value.
    """
    hints = {field.name: typing.get_type_hints(cls)[field.name] for field in dataclasses.fields(cast(Any, cls))}
    values = {}
    for setting in settings:
        name, text = setting_name(setting), setting.partition("=")[2].strip()
        if name not in hints:
            raise ValueError(
                f"there is no setting {name!r}; there are {', '.join(hints) or 'none'}.{hint(name, hints)}"
            )
        try:
            values[name] = parse_value(text, hints[name])
        except ValueError as error:
            raise ValueError(f"{name}={text!r}; {error}") from None
    return cls(**values)


def setting_name(setting: str) -> str:
    """The name in ``name=value``; hyphens count as underscores."""
    name, equals, _ = setting.partition("=")
    if not equals:
        raise typer.BadParameter(f"{setting!r}: write NAME=VALUE", param_hint="--set")
    return name.strip().replace("-", "_")


def parse_value(text: str, hint: Any) -> Any:
    """A hyperparameter written on the command line, as the type its field is declared with.

    Args:
        text: what was written; ``none`` is None where the field allows it.
        hint: int, float, bool, str, None, a `Literal`, a tuple of these, or a union.

    Raises:
        ValueError: `text` is none of what the field allows, which the message lists.
    """
    for kind in _alternatives(hint):
        try:
            return _parse(text, kind)
        except (ValueError, SyntaxError):
            continue
    allowed = [kind for kind in _alternatives(hint) if not (kind is int and float in _alternatives(hint))]
    raise ValueError(f"give {' or '.join(map(_name, allowed))}")


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
    """A number that 32 bits hold, or anything else."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return _refuse() if number and not abs(value) <= (checks.MOST if isinstance(value, int) else 3e38) else value


def _refuse() -> typing.NoReturn:
    raise ValueError


def _name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(str(value) for value in get_args(kind))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    if get_origin(kind) is tuple:
        return "values separated by commas"
    return names.get(kind, "a value from Python: the command line cannot write this one")
