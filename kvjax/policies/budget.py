"""Budgets: a number of tokens, or a fraction of the tokens that a sequence will reach; in exact integer arithmetic."""

from fractions import Fraction
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from .info import PolicyError


def budget_tokens(budget: int | float, tokens: int) -> int:
    """A budget in slots: as given, or as a fraction of the `tokens` a sequence will reach, rounded down."""
    return budget if isinstance(budget, int) else tokens * _ratio(budget).numerator // _ratio(budget).denominator


def budget_rows(budget: int | float, tokens: Int[Array, "*B"]) -> Int[Array, "*B"]:
    """`budget_tokens` for every row."""
    if isinstance(budget, int):
        return jnp.full_like(tokens, budget)
    ratio = _ratio(budget)
    whole, rest = tokens // ratio.denominator, tokens % ratio.denominator
    return whole * ratio.numerator + rest * ratio.numerator // ratio.denominator


def check_budget(name: str, budget: Any) -> None:
    """Raise `PolicyError` unless `budget` is a positive number of tokens or a fraction in (0, 1]."""
    tokens = isinstance(budget, int) and not isinstance(budget, bool) and budget > 0
    fraction = isinstance(budget, float) and 0 < budget <= 1
    if not (tokens or fraction):
        raise PolicyError(
            f"{name}: budget={budget!r}; give a positive whole number of tokens (512) or a fraction of prompt + new tokens (0.2)"
        )


def _ratio(fraction: float) -> Fraction:
    return Fraction(fraction).limit_denominator(10_000)
