"""Policies by name."""

import dataclasses
import difflib
from typing import Any, TypeVar

from kvjax.suggestions import hint

from .base import Policy, PolicyError, check_budget

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


def policy_class(name: str) -> type[Policy]:
    """The policy of a name; of this only letters and digits matter, and not their case: "StreamingLLM" is "streaming_llm".

    Raises:
        PolicyError: there is no such policy. The message names all, and the nearest.
    """
    known, asked = {_letters(other): other for other in policies()}, _letters(name)
    if asked not in known:
        near = [other for other in known if asked and (asked in other or other in asked)]
        near = near or difflib.get_close_matches(asked, known, n=1, cutoff=0.5)
        hint = f" Did you mean {known[near[0]]!r}?" if near else ""
        raise PolicyError(f"unknown policy {name!r}; known: {', '.join(policies())}.{hint}")
    return _POLICIES[known[asked]]


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def takes_budget(policy: Policy) -> bool:
    """Whether a budget bears on what a policy holds or reads: one of its own, or of a policy that it is made of."""
    values = [getattr(policy, field.name) for field in dataclasses.fields(policy)]
    parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    return hasattr(policy, "budget") or any(takes_budget(part) for part in parts if isinstance(part, Policy))


def get_policy(policy: str | Policy, **hyperparameters: Any) -> Policy:
    """A policy from its name and hyperparameters (those left out, or None, take the method's defaults).

    A `Policy` is returned as it is, with the given hyperparameters replaced. Names are read as `policy_class` says. A policy that has
    no budget, such as `full` and `kivi`, takes any `budget`, which then has no effect: a sweep needs no exception for it.

    Raises:
        PolicyError: the name is unknown, the policy has no such hyperparameter, or does not take that value.
    """
    given = {k: v for k, v in hyperparameters.items() if v is not None}
    if isinstance(policy, str):
        make: Any = policy_class(policy)
        budgeted = hasattr(make, "budget")
    elif isinstance(policy, Policy):
        make = type(policy)
        budgeted = takes_budget(policy)
        given = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)} | given
    else:
        raise PolicyError(f"policy={policy!r}; give a name ({', '.join(sorted(_POLICIES))}) or a Policy")
    if not budgeted and "budget" in given:
        check_budget(make.name if isinstance(policy, str) else policy.name, given.pop("budget"))
    allowed = [f.name for f in dataclasses.fields(make)]
    for name in given:
        if name not in allowed:
            takes = f"it takes {', '.join(allowed)}" if allowed else "it takes no hyperparameters"
            raise PolicyError(f"policy {make.name!r} has no hyperparameter {name!r}; {takes}.{hint(name, allowed)}")
    return make(**given)
