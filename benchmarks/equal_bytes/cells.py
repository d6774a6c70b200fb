"""Of whom it is asked: every policy at the budget at which it holds a given share of the full cache's bytes."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvjax.cache import layer_specs
from kvjax.models import Params
from kvjax.policies import Full, Policy, PolicyError, get_policy
from kvjax.policies.base import held_bytes

from .suite import Suite

ABOVE = 1.02
"""Of the bytes asked for, so many times over is as good as equal: slots are rounded."""

SLACK = 1.001
"""What a policy keeps besides slots, counters of a few bytes, must not cost it a whole step of slots."""

SEEING = ("adakv", "catekv", "chunkkv", "h2o", "pyramidkv", "rkv", "snapkv", "tova")
"""Policies that score a prompt's tokens by its queries, so that it matters to them whether the question is among these."""


STEPS = 1000
"""Budgets are whole multiples of one in so many."""


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """One policy at one share of the full cache's bytes.

    Attributes:
        policy: as it was asked for.
        target: the share; None for the full cache.
        seen: whether the policy sees the question when it compresses the prompt.
        fitted: the policy with the budget that it takes, a fraction of each row's own tokens.
        held, full: bytes that one row holds under it, on device and host together, and in the full cache: means over the rows, each of
            which is counted as if it ran alone.
        why: why there is nothing to run; empty if there is.
    """

    suite: Suite
    policy: str
    target: float | None
    seen: bool
    fitted: Policy | None
    held: int
    full: int
    why: str = ""

    @property
    def key(self) -> dict[str, Any]:
        """What its rows begin with."""
        return {"suite": self.suite.name, "policy": self.policy, "target": self.target, "seen": self.seen}


def cells(
    suite: Suite, params: Params, policies: Sequence[str], shares: Sequence[float], seeing: Sequence[str]
) -> list[Cell]:
    """The full cache, then share by share all policies: question unseen, and of those in `seeing` seen as well."""
    full = {seen: row_bytes(suite, params, Full(), seen) for seen in (False, True)}
    found = [Cell(suite, "full", None, False, Full(), full[False], full[False])]
    for share in shares:
        for policy in policies:
            if policy == "full":
                continue
            for seen in (False, True) if policy.partition(":")[0] in seeing else (False,):
                fitted, held, why = fit(suite, params, policy, share, full[seen], seen)
                found.append(Cell(suite, policy, share, seen, fitted, held, full[seen], why))
    return found


def fit(
    suite: Suite, params: Params, policy: str, share: float, full: int, seen: bool
) -> tuple[Policy | None, int, str]:
    """The policy with the largest budget (or number of bits) at which rows hold a share of `full`, what they hold, and why they cannot.

    Budgets are fractions of each row's own tokens, so that a prompt shorter than the others is compressed as much as they are.
    """
    target = round(share * full)
    try:
        asked = get_policy(policy)
        asked.bind(params.config)  # for what it says itself, such as that it has no profile of this model
        names = {field.name for field in dataclasses.fields(asked)}
        if "bits" in names:
            tried = [get_policy(asked, bits=bits) for bits in (2, 4, 8)]
            fitting = [each for each in tried if row_bytes(suite, params, each, seen) <= ABOVE * target]
            fitted = (fitting or tried[:1])[-1]
        elif "budget" in names:
            fitted = _largest(suite, params, asked, SLACK * target, seen)
        else:
            fitted = asked
        for tokens in (suite.shortest, suite.longest(seen) + suite.new(seen)):
            fitted.bind(params.config).validate(tokens)
        held = row_bytes(suite, params, fitted, seen)
    except PolicyError as error:
        return None, 0, str(error)
    why = "" if held <= ABOVE * target else f"holds {100 * held / full:.1f} % of the full cache's bytes at the least"
    return fitted, held, why


def _largest(suite: Suite, params: Params, policy: Policy, target: float, seen: bool) -> Policy:
    """With the largest fraction as budget at which rows hold no more than `target`; where none does, with the least that works.

    Raises:
        PolicyError: no budget works in these prompts.
    """

    def fits(steps: int) -> bool | None:
        """Whether that budget's bytes do; None where the policy cannot work with it, as with one too small."""
        try:
            tried = get_policy(policy, budget=steps / STEPS)
            tried.bind(params.config).validate(suite.shortest)
            return row_bytes(suite, params, tried, seen) <= target
        except PolicyError:
            return None

    low, high = 0, STEPS + 1  # what fits or is too small, and what does not fit or is all there is
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle) is False:
            high = middle
        else:
            low = middle
    if low and fits(low):
        return get_policy(policy, budget=low / STEPS)
    working = next((steps for steps in range(high, STEPS + 1) if fits(steps) is not None), STEPS)
    return get_policy(policy, budget=working / STEPS)


def row_bytes(suite: Suite, params: Params, policy: Policy, seen: bool) -> int:
    """Bytes that a row holds, on device and host together, as if it ran alone: the mean over a suite's rows."""
    bound, new, counts = policy.bind(params.config), suite.new(seen), Counter(suite.lengths(seen))
    total = 0
    for length, count in counts.items():
        for spec in layer_specs(params.config, 1, length, new, params.dtype):
            alone = dataclasses.replace(spec, prompt_len=length)  # no longer than it is, padded to no bucket
            total += count * sum(held_bytes(bound.layer(alone)))
    return round(total / counts.total())
