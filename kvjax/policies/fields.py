"""Checks of hyperparameters by what their dataclass declares."""

import dataclasses
import math
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvjax._util.arguments import MOST, plain, short

from .budget import check_budget
from .info import PolicyError


def check_fields(policy: Any, **least: int | float) -> None:
    """Raise `PolicyError` if a hyperparameter of `policy` is out of range.

    A `budget` is checked as in `check_budget`, a field declared as a `Literal` against its values, and one declared as a number for
    being one. Numbers of NumPy and JAX become Python's. A budget in tokens is checked by `policy.validate`, too.

    Args:
        least: by field, the least it may be; None, where a field has it, is no number and passes.
    """
    name = policy.info.name
    for field in dataclasses.fields(policy):  # numbers of NumPy and JAX make the same policy as Python's
        object.__setattr__(policy, field.name, plain(getattr(policy, field.name)))
    values = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    if "budget" in values:
        check_budget(name, values["budget"])
    try:
        hints = get_type_hints(type(policy))
    except NameError:  # a policy of somebody's own, declared by names that only its function knows
        hints = {}
    for field, hint in hints.items():
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        allowed = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
        if field not in values or (values[field] is None and type(None) in kinds):
            continue
        if allowed and values[field] not in allowed:
            raise PolicyError(f"{name}: {field}={values[field]!r}; give one of {', '.join(map(repr, allowed))}")
        if {int, float, type(None)}.issuperset(kinds) and not _is_number(values[field], whole=float not in kinds):
            raise PolicyError(
                f"{name}: {field}={values[field]!r}; give a {'number' if float in kinds else 'whole number'}"
            )
        if isinstance(values[field], int) and values[field] > MOST:
            raise PolicyError(f"{name}: {field}={short(values[field])}; give {MOST} or less")
    for field, bound in least.items():
        if values[field] is not None and values[field] < bound:
            raise PolicyError(f"{name}: {field}={values[field]}; give {bound} or more")
    if isinstance(getattr(policy, "budget", None), int):
        policy.validate(0)


def _is_number(value: Any, whole: bool) -> bool:
    """Whether it is a finite number; True and False are none."""
    return isinstance(value, int if whole else int | float) and not isinstance(value, bool) and math.isfinite(value)
