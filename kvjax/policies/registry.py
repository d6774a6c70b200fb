"""The registry: policies by name."""

import dataclasses
import difflib
from typing import Any, TypeVar

from kvjax._util.arguments import plain, short
from kvjax._util.suggestions import hint, letters, same
from kvjax._util.user_code import load_module

from .base import Policy
from .budget import check_budget
from .info import PolicyError, PolicyInfo

P = TypeVar("P", bound=type[Policy])

_POLICIES: dict[str, type[Policy]] = {}


def register(cls: P) -> P:
    """Make a policy class available by its `about.name`. Use it as a decorator.

    Raises:
        PolicyError: the name is empty, or another class has it.

    Example:
        >>> @kvjax.register
        ... class Nearest(kvjax.SnapKV):
        ...     about = kvjax.policies.PolicyInfo(name="nearest", summary="as SnapKV")
        >>> kvjax.get_policy("nearest:64").budget
        64
    """
    name = cls.about.name
    if not name or _POLICIES.get(name, cls).__qualname__ != cls.__qualname__:
        raise PolicyError(
            f"{cls.__qualname__}.about.name = {name!r} is empty or already registered. Give every policy a unique name."
        )
    _POLICIES[name] = cls
    return cls


def policies(*, trained: bool = True) -> dict[str, type[Policy]]:
    """Return all registered policies by name.

    Args:
        trained: whether to include policies that need weights trained for a model.

    Example:
        >>> kvjax.policies.policies()["snapkv"] is kvjax.SnapKV
        True
    """
    return {name: cls for name, cls in sorted(_POLICIES.items()) if trained or not cls.about.trained}


def policy_class(name: str) -> type[Policy]:
    """Return the policy class of a name.

    Only letters and digits of the name matter, and not their case: "StreamingLLM" is "streaming_llm".

    Raises:
        PolicyError: there is no such policy. The message lists all names, and suggests the nearest.

    Example:
        >>> kvjax.policies.policy_class("StreamingLLM") is kvjax.StreamingLLM
        True
    """
    found = same(name, policies())
    if found is None:
        known, asked = {letters(other): other for other in policies()}, letters(name)
        near = [other for other in known if asked and (asked in other or other in asked)]
        near = near or difflib.get_close_matches(asked, known, n=1, cutoff=0.5)
        hint = f" Did you mean {known[near[0]]!r}?" if near else ""
        raise PolicyError(f"unknown policy {short(name)}. Known policies: {', '.join(policies())}.{hint}")
    return _POLICIES[found]


def make_policy(name: str, hyperparameters: dict[str, Any]) -> Policy:
    """Return a registered policy with hyperparameters. A policy that takes no budget accepts any.

    Args:
        name: name of the policy, as for `policy_class`.
        hyperparameters: values by field.

    Raises:
        PolicyError: the name is unknown, the policy has no such hyperparameter, or does not take that value.
    """
    cls = policy_class(name)
    return _made(cls, cls.about, {}, hyperparameters)


def replaced(policy: Policy, hyperparameters: dict[str, Any]) -> Policy:
    """Return a policy with other hyperparameters. For its budget see `Policy.with_budget`.

    Raises:
        PolicyError: the policy has no such hyperparameter, or does not take that value.
    """
    values = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    if "budget" in hyperparameters and "budget" not in values:
        changed = policy.with_budget(hyperparameters["budget"])
        return replaced(changed, {name: value for name, value in hyperparameters.items() if name != "budget"})
    return _made(type(policy), policy.info, values, hyperparameters)


def _made(cls: type[Policy], info: PolicyInfo, values: dict[str, Any], given: dict[str, Any]) -> Policy:
    allowed = [field.name for field in dataclasses.fields(cls)]
    if not info.takes_budget and "budget" in given:
        given = dict(given)
        check_budget(info.name, plain(given.pop("budget")))
    for name in given:
        if name not in allowed:
            raise PolicyError(unknown_hyperparameter(info.name, name, allowed))
    return cls(**values | given)


def unknown_hyperparameter(policy: str, name: str, allowed: list[str]) -> str:
    """Return the error message for a hyperparameter that a policy does not have."""
    takes = f"It takes {', '.join(allowed)}" if allowed else "It takes no hyperparameters"
    return f"policy {policy!r} has no hyperparameter {short(name)}. {takes}.{hint(name, allowed)}"


def load_policies(source: str) -> None:
    """Load a module and register its policies, which can then be used by name.

    Args:
        source: name or path of the module, as for `load_module`.

    Raises:
        FileNotFoundError, ImportError: as `load_module`.
        ValueError: the module registers no policy.
    """
    before = policies()
    own = f"{load_module(source).__name__}."
    # In a process that has loaded the module before, its policies are registered already.
    if not any(before.get(name) is not cls or f"{cls.__module__}.".startswith(own) for name, cls in policies().items()):
        raise ValueError(f"{source}: it registers no policy. Put @kvjax.register above a policy class.")
