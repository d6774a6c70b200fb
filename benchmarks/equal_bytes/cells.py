"""Of whom it is asked: every policy at the budget at which it holds a given share of the full cache's bytes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kvjax.cache import bucket
from kvjax.evals.budgets import bytes_held, matched
from kvjax.models import Params
from kvjax.policies import Full, Policy, PolicyError, get_policy

from .suite import Suite

ABOVE = 1.02
"""Of the bytes asked for, so many times over is as good as equal: slots are rounded."""

SLACK = 1.001
"""What a policy keeps besides slots, counters of a few bytes, must not cost it a whole step of slots."""

SEEING = ("adakv", "catekv", "chunkkv", "h2o", "pyramidkv", "rkv", "snapkv", "tova")
"""Policies that score a prompt's tokens by its queries, so that it matters to them whether the question is among these."""


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """One policy at one share of the full cache's bytes.

    Attributes:
        policy: as it was asked for.
        target: the share; None for the full cache.
        seen: whether the policy sees the question when it compresses the prompt.
        fitted: the policy with the budget that it takes.
        held, full: bytes that one row holds under it, on device and host together, and in the full cache.
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
    full = _held(suite, params, Full())
    found = [Cell(suite, "full", None, False, Full(), full, full)]
    for share in shares:
        for policy in policies:
            if policy == "full":
                continue
            fitted, held, why = fit(suite, params, policy, round(share * full))
            unseen = Cell(suite, policy, share, False, fitted, held, full, why)
            found.append(unseen)
            if policy.partition(":")[0] in seeing:
                found.append(dataclasses.replace(unseen, seen=True))
    return found


def fit(suite: Suite, params: Params, policy: str, target: int) -> tuple[Policy | None, int, str]:
    """The policy with the largest budget (or number of bits) at which it holds `target` bytes, what it holds, and why it cannot."""
    try:
        asked = get_policy(policy)
        asked.bind(params.config)  # for what it says itself, such as that it has no profile of this model
        if "bits" in {field.name for field in dataclasses.fields(asked)}:
            tried = [get_policy(asked, bits=bits) for bits in (2, 4, 8)]
            fitting = [each for each in tried if _held(suite, params, each) <= ABOVE * target]
            fitted = (fitting or tried[:1])[-1]
        else:
            fitted = matched(asked, round(SLACK * target), params.config, *_shape(suite), params.dtype)
        fitted.bind(params.config).validate(sum(_shape(suite)))
        held = _held(suite, params, fitted)
    except PolicyError as error:
        return None, 0, str(error)
    full = _held(suite, params, Full())
    why = "" if held <= ABOVE * target else f"holds {100 * held / full:.1f} % of the full cache's bytes at the least"
    return fitted, held, why


def _shape(suite: Suite) -> tuple[int, int]:
    """Tokens of a prompt, and room after it, as programs have them."""
    return bucket(suite.prompt), suite.new


def _held(suite: Suite, params: Params, policy: Policy) -> int:
    return bytes_held(policy.bind(params.config), params.config, *_shape(suite), params.dtype)
