"""Rank promotion within kvjax, independent of the caller's `jax_numpy_rank_promotion`."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def any_rank(function: Callable[P, R]) -> Callable[P, R]:
    """Allow rank promotion within a function, even if the flag is "raise" or "warn"."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return called
