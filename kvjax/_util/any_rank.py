"""Broadcasting in kvjax's own code, which is right whatever `jax_numpy_rank_promotion` says of the caller's."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def any_rank(function: Callable[P, R]) -> Callable[P, R]:
    """The function, in which arrays of different ranks broadcast also where the flag is "raise" or "warn"."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return called
