"""Policies by name."""

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
    """Make a policy class available by its `about.name`, as a decorator."""
    name = cls.about.name
    if not name or _POLICIES.get(name, cls).__qualname__ != cls.__qualname__:
        raise PolicyError(
            f"{cls.__qualname__}.about.name = {name!r} is empty or taken; give every policy a name of its own"
        )
    _POLICIES[name] = cls
    return cls


def policies(*, trained: bool = True) -> dict[str, type[Policy]]:
    """All registered policies, by name.

    Args:
        trained: whether those are among them that need weights which were trained for a model.
    """
    return {name: cls for name, cls in sorted(_POLICIES.items()) if trained or not cls.about.trained}


def policy_class(name: str) -> type[Policy]:
    """The policy of a name; of this only letters and digits matter, and not their case: "StreamingLLM" is "streaming_llm".

    Raises:
        PolicyError: there is no such policy. The message names all, and the nearest.
    """
    found = same(name, policies())
    if found is None:
        known, asked = {letters(other): other for other in policies()}, letters(name)
        near = [other for other in known if asked and (asked in other or other in asked)]
        near = near or difflib.get_close_matches(asked, known, n=1, cutoff=0.5)
        hint = f" Did you mean {known[near[0]]!r}?" if near else ""
        raise PolicyError(f"unknown policy {short(name)}; known: {', '.join(policies())}.{hint}")
    return _POLICIES[found]


def make_policy(name: str, hyperparameters: dict[str, Any]) -> Policy:
    """A registered policy with hyperparameters, as `policy_class` reads its name. One that has no budget takes any.

    Raises:
        PolicyError: the name is unknown, the policy has no such hyperparameter, or does not take that value.
    """
    cls = policy_class(name)
    return _made(cls, cls.about, {}, hyperparameters)


def replaced(policy: Policy, hyperparameters: dict[str, Any]) -> Policy:
    """A policy with other hyperparameters. For its budget see `Policy.with_budget`.

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
    """What to say of a hyperparameter that a policy does not have."""
    takes = f"it takes {', '.join(allowed)}" if allowed else "it takes no hyperparameters"
    return f"policy {policy!r} has no hyperparameter {short(name)}; {takes}.{hint(name, allowed)}"


def load_policies(source: str) -> None:
    """Load a module for the policies that it registers, which can then be used by name.

    Raises:
        FileNotFoundError, ImportError: as `load_module`.
        ValueError: the module registers no policy.
    """
    before = policies()
    own = f"{load_module(source).__name__}."
    # In a process that has loaded the module before, its policies are registered already.
    if not any(before.get(name) is not cls or f"{cls.__module__}.".startswith(own) for name, cls in policies().items()):
        raise ValueError(f"{source}: it registers no policy; put @kvjax.register above a policy class")
