"""Budgets at which policies take equal bytes, because equal nominal ratios take different bytes."""

import dataclasses
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.policies import Policy, PolicyError, get_policy
from kvjax.runtime.engine import Engine

_STEP, _TRIES = 32, 64
"""Tokens between the larger budgets that are tried, at least; and how many are tried, at most."""


def bytes_held(policy: Policy, config: ModelConfig, prompt: int, new: int, dtype: Any) -> int:
    """Bytes of one row's cache, on device and host together."""
    shape = config, 1, prompt, new, dtype
    return policy.nbytes(*shape) + policy.host_nbytes(*shape)


def row_bytes(
    policy: Policy, config: ModelConfig, prompt: int, new: int, dtype: Any, block: int | None = None
) -> dict[str, int]:
    """Bytes of one row's cache, by the names of result files. They are those of one device without a mesh.

    Args:
        policy: the policy.
        config: the model.
        prompt, new: tokens of the longest prompt of the batch, and maximum number of new tokens.
        dtype: dtype of keys and values.
        block: block size of chunked prefill in tokens, if any.
    """
    engine = Engine(config, policy, prompt_len=prompt, max_new_tokens=new, block=block, dtype=dtype)
    names = "cache_bytes", "host_cache_bytes", "full_cache_bytes"
    return {name: getattr(engine, name) for name in names}


def matched(policy: Policy, target: int, config: ModelConfig, prompt: int, new: int, dtype: Any) -> Policy:
    """Return the policy with the largest budget, in tokens, whose cache takes at most `target` bytes.

    Args:
        policy: the policy.
        target: bytes of one row's cache.
        config: the model.
        prompt, new: tokens of the longest prompt, and maximum number of new tokens.
        dtype: dtype of keys and values.

    Returns:
        The policy. If every budget takes more bytes, it has the smallest budget that works. A policy without a budget
        is returned as it is.

    Raises:
        PolicyError: no budget works for a sequence of this length.
    """
    if "budget" not in {field.name for field in dataclasses.fields(policy)}:
        return policy

    def fits(budget: int) -> bool | None:
        """Whether a budget fits. None if the policy cannot work with it, for example because it is too small."""
        try:
            tried = get_policy(policy, budget=budget).bind(config)
            tried.validate(prompt + new)
            return bytes_held(tried, config, prompt, new, dtype) <= target
        except PolicyError:
            return None

    low, high = 0, prompt + new + 1  # low fits or is too small for the policy, high does not fit or is the maximum
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle) is False:
            high = middle
        else:
            low = middle
    # Rounding of layer sizes makes some policies smaller at a larger budget, so a larger one may fit as well.
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
