"""Budgets at which policies hold the same bytes: equal budgets are unequal memory, as each method counts something else."""

from typing import Any

from kvjax.config import ModelConfig
from kvjax.policies import Policy, PolicyError, get_policy

from .plan import Plan

_STEP, _TRIES = 32, 64
"""Minimum number of tokens between the larger budgets that are tried, and maximum number of tries."""


def bytes_held(policy: Policy, config: ModelConfig, prompt: int, new: int, dtype: Any) -> int:
    """Bytes that one sequence holds, on device and host together."""
    shape = config, 1, prompt, new, dtype
    return policy.nbytes(*shape) + policy.host_nbytes(*shape)


def matched(policy: Policy, target: int | float, plan: Plan) -> Policy:
    """The policy with the largest budget, in tokens, at which it holds at most `target` bytes per example of a plan.

    Returns:
        The policy with that budget. If it holds more bytes at every budget, the policy with the smallest budget that works. A policy
        without a budget is returned unchanged.

    Raises:
        PolicyError: no budget works for sequences of these lengths.
    """
    if not hasattr(policy, "budget"):
        return policy

    def fits(budget: int) -> bool | None:
        """Whether the policy holds at most `target` bytes; None if it cannot work with this budget, as with one too small."""
        try:
            return plan.bytes_held(get_policy(policy, budget=budget)) <= target
        except PolicyError:
            return None

    # `low` fits or is too small to work; `high` does not fit, or is more than the longest sequence has.
    low, high = 0, plan.longest + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle) is False:
            high = middle
        else:
            low = middle
    # Sizes of layers are rounded, so some policies hold fewer bytes at a larger budget: a larger one may fit, too.
    step = max(_STEP, low // _TRIES)
    low = next((larger for larger in range(min(2 * low, plan.longest), low, -step) if fits(larger)), low)
    if low and fits(low):
        return get_policy(policy, budget=low)
    working = next((budget for budget in range(high, plan.longest + 1) if fits(budget) is not None), None)
    if working is None:
        raise PolicyError(
            f"{policy.info.name}: no budget up to {plan.longest} tokens works for a sequence of that length"
        )
    return get_policy(policy, budget=working)
