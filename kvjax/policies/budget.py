"""Budgets: a number of tokens, or a fraction of the tokens that a sequence will reach. Exact integer arithmetic."""

from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax._util.arguments import MOST, short

from .info import PolicyError

SHORT = 8
"""A sequence is short if it has fewer tokens than this factor times the slots that a policy needs."""


def budget_tokens(budget: int | float, tokens: int, least: int = 0) -> int:
    """Convert a budget to slots: a number as given, a fraction of `tokens` rounded down.

    Args:
        budget: number of tokens, or a fraction in (0, 1].
        tokens: tokens that the sequence will reach.
        least: minimum that a fraction gives: the slots that the policy needs at any sequence length.

    Example:
        >>> kvjax.policies.budget_tokens(0.25, tokens=1000), kvjax.policies.budget_tokens(64, tokens=1000)
        (250, 64)
    """
    if isinstance(budget, int):
        return budget
    return max(tokens * _ratio(budget).numerator // _ratio(budget).denominator, least)


def budget_rows(budget: int | float, tokens: Int[Array, "*B"], least: int = 0) -> Int[Array, "*B"]:
    """`budget_tokens` for every row.

    Example:
        >>> kvjax.policies.budget_rows(0.25, jnp.asarray([1000, 400])).tolist()
        [250, 100]
    """
    if isinstance(budget, int):
        return jnp.full_like(tokens, budget)
    found = _shares(budget, tokens)
    return jnp.maximum(found, least) if least else found


def budget_counts(budget: int | float, tokens: np.ndarray, least: int = 0) -> np.ndarray:
    """`budget_rows` in NumPy."""
    return np.full_like(tokens, budget) if isinstance(budget, int) else np.maximum(_shares(budget, tokens), least)


def _shares(fraction: float, tokens: Any) -> Any:
    ratio = _ratio(fraction)
    whole, rest = tokens // ratio.denominator, tokens % ratio.denominator
    return whole * ratio.numerator + rest * ratio.numerator // ratio.denominator


def check_least(name: str, budget: int | float, tokens: int, least: int, needs: str, slots: str = "slots") -> None:
    """Raise `PolicyError` if a budget gives a sequence fewer slots than the policy needs.

    A fraction gives short sequences (`SHORT`) the minimum instead: they stay whole, or are cut no further.

    Args:
        name: name of the policy.
        budget: number of tokens, or a fraction.
        tokens: tokens that the sequence will reach.
        least: slots that the policy needs.
        needs: end of the message: what needs the slots, and the fix.
        slots: unit of the budget.
    """
    found = budget_tokens(budget, tokens)
    if found < least and (isinstance(budget, int) or tokens >= SHORT * least):
        raise PolicyError(f"{name}: a budget of {budget} gives {found} {slots}, {needs}")


def check_budget(name: str, budget: Any) -> None:
    """Raise `PolicyError` unless `budget` is a positive number of tokens or a fraction in (0, 1]."""
    tokens = isinstance(budget, int) and not isinstance(budget, bool) and 0 < budget <= MOST
    fraction = isinstance(budget, float) and 0 < budget <= 1
    if not (tokens or fraction):
        raise PolicyError(
            f"{name}: budget={short(budget)} is not valid. Give a positive whole number of tokens (512), up to {MOST}, or a fraction of "
            "prompt + new tokens (0.2)."
        )


def _ratio(fraction: float) -> Fraction:
    return Fraction(fraction).limit_denominator(10_000)
