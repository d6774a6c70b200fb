"""Budgets at which policies hold the same bytes: a nominal ratio means different things to different methods."""

import dataclasses
from typing import Any

from kvjax.config import ModelConfig
from kvjax.policies import Policy, PolicyError, get_policy
from kvjax.runtime.engine import Engine

_STEP, _TRIES = 32, 64
"""Tokens between the larger budgets that are tried, at least; and how many are tried, at most."""


def bytes_held(policy: Policy, config: ModelConfig, prompt: int, new: int, dtype: Any) -> int:
    """Bytes that one row holds, on device and host together."""
    shape = config, 1, prompt, new, dtype
    return policy.nbytes(*shape) + policy.host_nbytes(*shape)


def row_bytes(
    policy: Policy, config: ModelConfig, prompt: int, new: int, dtype: Any, block: int | None = None
) -> dict[str, int]:
    """Bytes that one row holds as one device has it, whatever mesh it is on, by the names that result files have for them.

    Args:
        prompt, new: tokens of the longest prompt of the batch, and room for new ones.
        block: tokens of a block, where prompts are read in blocks.
    """
    engine = Engine(config, policy, prompt_len=prompt, max_new_tokens=new, block=block, dtype=dtype)
    names = "cache_bytes", "host_cache_bytes", "full_cache_bytes"
    return {name: getattr(engine, name) for name in names}


def matched(policy: Policy, target: int, config: ModelConfig, prompt: int, new: int, dtype: Any) -> Policy:
    """The policy with the largest budget, in tokens, at which it holds no more than `target` bytes.

    Args:
        prompt, new: tokens of the longest prompt and room for new ones.

    Returns:
        Where the policy holds more whatever its budget, it with the smallest one that works; a policy without a budget as it is.

    Raises:
        PolicyError: no budget works for a sequence of this length.
    """
    if "budget" not in {field.name for field in dataclasses.fields(policy)}:
        return policy

    def fits(budget: int) -> bool | None:
        """Whether that budget's bytes do; None where the policy cannot work with it, as with one too small."""
        try:
            tried = get_policy(policy, budget=budget).bind(config)
            tried.validate(prompt + new)
            return bytes_held(tried, config, prompt, new, dtype) <= target
        except PolicyError:
            return None

    low, high = 0, prompt + new + 1  # what fits or is too small, and what does not fit or is all there is
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle) is False:
            high = middle
        else:
            low = middle
    # Some policies hold less at a larger budget, where sizes of layers are rounded: a larger one may fit as well.
    step = max(_STEP, low // _TRIES)
    low = next((larger for larger in range(min(2 * low, prompt + new), low, -step) if fits(larger)), low)
    if low and fits(low):
        return get_policy(policy, budget=low)
    working = next((budget for budget in range(high, prompt + new + 1) if fits(budget) is not None), None)
    if working is None:
        raise PolicyError(
            f"{policy.info.name}: no budget up to {prompt + new} tokens works for a sequence of that length"
        )
    return get_policy(policy, budget=working)
