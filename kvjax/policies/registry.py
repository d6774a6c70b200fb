"""Policies by name."""

import dataclasses
import difflib
from typing import Any, TypeVar

from .base import Policy, PolicyError

P = TypeVar("P", bound=type[Policy])

_POLICIES: dict[str, type[Policy]] = {}


def register(cls: P) -> P:
    """Make a policy class available by its `name`, as a decorator."""
    if not cls.name or _POLICIES.get(cls.name, cls).__qualname__ != cls.__qualname__:
        raise PolicyError(
            f"{cls.__qualname__}.name = {cls.name!r} is empty or taken; give every policy a name of its own"
        )
    _POLICIES[cls.name] = cls
    return cls


def policies() -> dict[str, type[Policy]]:
    """All registered policies, by name."""
    return dict(sorted(_POLICIES.items()))


def get_policy(policy: str | Policy, **hyperparameters: Any) -> Policy:
    """A policy from its name and hyperparameters (those left out, or None, take the method's defaults).

    A `Policy` is returned as it is, with the given hyperparameters replaced.

    Raises:
        PolicyError: the name is unknown, the policy has no such hyperparameter, or does not take that value.
    """
    given = {k: v for k, v in hyperparameters.items() if v is not None}
    if isinstance(policy, str):
        if policy not in _POLICIES:
            close = difflib.get_close_matches(policy, _POLICIES, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise PolicyError(f"unknown policy {policy!r}; known: {', '.join(sorted(_POLICIES))}.{hint}")
        make: Any = _POLICIES[policy]
    elif isinstance(policy, Policy):
        make = type(policy)
        given = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)} | given
    else:
        raise PolicyError(f"policy={policy!r}; give a name ({', '.join(sorted(_POLICIES))}) or a Policy")
    allowed = [f.name for f in dataclasses.fields(make)]
    for name in given:
        if name not in allowed:
            takes = f"it takes {', '.join(allowed)}" if allowed else "it takes no hyperparameters"
            raise PolicyError(f"policy {make.name!r} has no hyperparameter {name!r}; {takes}")
    return make(**given)
