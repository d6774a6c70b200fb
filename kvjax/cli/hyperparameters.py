"""Builds policies from `--policy`, `--budget` and `--set name=value`."""

import dataclasses
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import typer

from kvjax._util.settings import parse_value, split_setting
from kvjax._util.suggestions import hint

from . import checks

if TYPE_CHECKING:
    from kvjax.policies import Policy

T = TypeVar("T")


def read_policy(text: str, budget: str | None, settings: Sequence[str] | None = None) -> "Policy":
    """Policy of `--policy`, `--budget` and `--set`.

    Raises:
        PolicyError: the policy is unknown, or does not accept these values.
    """
    from kvjax.policies import PolicyError
    from kvjax.policies.registry import replaced
    from kvjax.policies.text import parse_policy
    from kvjax.policies.unbound import check_unbound

    given: dict[str, str] = {} if budget is None else {"budget": budget}
    for setting in settings or ():
        key, value = _split(setting)
        given[key] = value
    policy = parse_policy(text)
    hints = {"budget": int | float} | typing.get_type_hints(
        type(policy)
    )  # every policy accepts a budget, if only to ignore it
    fields = {field.name for field in dataclasses.fields(policy)} | {"budget"}
    values: dict[str, Any] = dict(given)  # unknown names are kept, so that the error lists the known ones
    for key in given.keys() & fields:
        try:
            values[key] = parse_value(given[key], hints[key])
        except ValueError as error:
            raise PolicyError(f"{text}: {key}={given[key]!r}; {error}") from None
    policy = replaced(policy, values)
    policy.validate(_LONG)
    check_unbound(policy)
    _check_files(policy)
    return policy


_LONG = 1 << 30
"""Number of tokens at which a budget that is too small is too small for any text."""


def _check_files(policy: Any) -> None:
    """Validate the files that a policy names, including those of policies within it."""
    _check_profile(policy)
    _check_weights(policy)
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        for inner in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(inner):
                _check_files(inner)


def _check_profile(policy: "Policy") -> None:
    from kvjax.calibration.make_profile import METHODS
    from kvjax.policies.profile import load

    profile = getattr(policy, "profile", None)
    if isinstance(profile, str) and profile not in METHODS and policy.info.name in METHODS:
        load(profile, METHODS[policy.info.name].profile)


def _check_weights(policy: "Policy") -> None:
    from kvjax.policies.families.surrogates import load

    weights, read = (getattr(policy, name, None) for name in ("weights", "read"))
    if isinstance(weights, str) and read is not None:
        load(weights, read)


def read_policies(names: str, budgets: str | None, settings: Sequence[str], option: str) -> "list[Policy]":
    """Every policy at every budget, both separated by commas.

    A policy without a budget occurs once. A setting applies to the policies that have it; at least one has to.

    Args:
        names: the policies.
        budgets: the budgets; None for the policies' defaults.
        settings: texts ``name=value``.
        option: the option that names the policies.

    Raises:
        PolicyError: a policy is unknown or does not accept these values, or no policy has a setting.
    """
    from kvjax.policies import PolicyError
    from kvjax.policies.text import parse_policy, split_policies

    texts = split_policies(names)
    given = [parse_policy(text) for text in texts]
    checks.once([str(policy) for policy in given], option)
    wanted = [None] if budgets is None else checks.listed(budgets, "--budget")
    chosen, taken = [], set()
    for text, policy in zip(texts, given, strict=True):
        fields = {field.name for field in dataclasses.fields(policy)}
        own = [setting for setting in settings if _split(setting)[0] in fields]
        taken.update(own)
        for budget in wanted if "budget" in fields else wanted[:1]:
            chosen.append(read_policy(text, budget, own))
    for setting in settings:
        if setting not in taken:
            known = {field.name for policy in given for field in dataclasses.fields(policy)}
            raise PolicyError(
                f"{setting}: none of {', '.join(texts)} has this hyperparameter.{hint(_split(setting)[0], known)}"
            )
    return chosen


def read_settings(cls: type[T], settings: Sequence[str]) -> T:
    """Build a dataclass of settings from `--set name=value`. Other fields keep their defaults.

    Raises:
        ValueError: the setting is unknown, or does not accept the value.
    """
    hints = {field.name: typing.get_type_hints(cls)[field.name] for field in dataclasses.fields(cast(Any, cls))}
    values = {}
    for setting in settings:
        name, text = _split(setting)
        if name not in hints:
            raise ValueError(
                f"there is no setting {name!r}; there are {', '.join(hints) or 'none'}.{hint(name, hints)}"
            )
        try:
            values[name] = parse_value(text, hints[name])
        except ValueError as error:
            raise ValueError(f"{name}={text!r}; {error}") from None
    return cls(**values)


def _split(setting: str) -> tuple[str, str]:
    try:
        return split_setting(setting)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--set") from None
