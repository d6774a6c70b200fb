"""Checks of hyperparameters against the types that their dataclass declares."""

import dataclasses
import functools
import math
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvjax._util.arguments import MOST, plain, short

from .budget import check_budget
from .info import PolicyError


def check_fields(policy: Any, **least: int | float) -> None:
    """Raise `PolicyError` if a hyperparameter of `policy` is out of range.

    A `budget` is checked by `check_budget`, and a budget in tokens by `policy.validate`, too. A `Literal` field must
    have one of its values, and a numeric field a finite number. NumPy and JAX numbers become Python's, and those of a
    field of type `float` become floats.

    Args:
        policy: a policy that is being constructed.
        least: minimum of each field. None is not a number and passes where its field allows it.
    """
    name = policy.info.name
    for field in dataclasses.fields(policy):  # so that NumPy and JAX numbers give equal policies
        object.__setattr__(policy, field.name, plain(getattr(policy, field.name)))
    values = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    if "budget" in values:
        check_budget(name, values["budget"])
    try:
        hints = _hints(type(policy))
    except NameError:  # a user's policy, whose annotations use names of an enclosing function
        hints = {}
    for field, hint in hints.items():
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        allowed = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
        if field not in values or (values[field] is None and type(None) in kinds):
            continue
        if allowed and values[field] not in allowed:
            raise PolicyError(
                f"{name}: {field}={values[field]!r} is unknown. Give one of {', '.join(map(repr, allowed))}."
            )
        if {int, float, type(None)}.issuperset(kinds) and not _is_number(values[field], whole=float not in kinds):
            raise PolicyError(
                f"{name}: {field}={values[field]!r} is not valid. Give a {'number' if float in kinds else 'whole number'}."
            )
        if isinstance(values[field], int) and values[field] > MOST:
            raise PolicyError(f"{name}: {field}={short(values[field])} is too large. Give {MOST} or less.")
        if float in kinds and int not in kinds:  # 1 and 1.0 give equal policies where they mean the same
            object.__setattr__(policy, field, float(values[field]))
    for field, bound in least.items():
        if values[field] is not None and values[field] < bound:
            raise PolicyError(f"{name}: {field}={values[field]} is too small. Give {bound} or more.")
    if isinstance(getattr(policy, "budget", None), int):
        policy.validate(0)


@functools.lru_cache(maxsize=1024)
def _hints(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


def _is_number(value: Any, whole: bool) -> bool:
    """Whether it is a finite number. Booleans are not."""
    return isinstance(value, int if whole else int | float) and not isinstance(value, bool) and math.isfinite(value)
