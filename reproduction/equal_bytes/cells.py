"""Policies of the leaderboard, each with the budget at which it holds a given share of the full cache's bytes."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from kvjax.cache import layer_specs
from kvjax.models import Params
from kvjax.policies import Full, Policy, PolicyError, get_policy

from .suite import Suite

ABOVE = 1.02
"""Bytes up to this multiple of the target count as equal, since slots are rounded."""

SLACK = 1.001
"""Tolerance of the search, so that counters of a few bytes besides the slots do not cost a whole step of slots."""

SEEING = ("adakv", "catekv", "chunkkv", "h2o", "pyramidkv", "rkv", "snapkv", "tova")
"""Policies that score a prompt's tokens by its queries, so that it matters to them whether the question is among these."""


STEPS = 1000
"""Budgets are multiples of 1 / STEPS."""

BITS = (2, 4, 8)
"""Bits to try for policies that quantise instead of evicting."""


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """One policy at one share of the full cache's bytes.

    Attributes:
        policy: as it was asked for.
        target: the share; None for the full cache.
        seen: whether the policy sees the question when it compresses the prompt.
        fitted: the policy with the budget that it takes, a fraction of each row's own tokens.
        held, full: bytes of one row, on device and host together, under the policy and in the full cache. They are means over the rows,
            each counted as if it ran alone.
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


class Wanted(NamedTuple):
    """A policy at a share of the full cache's bytes, before it is known with which budget; see `Cell`."""

    suite: Suite
    policy: str
    target: float | None
    seen: bool


def wanted(suite: Suite, policies: Sequence[str], shares: Sequence[float], seeing: Sequence[str]) -> list[Wanted]:
    """The full cache, then all policies at the first share, at the next, ...; those named in `seeing` twice each."""
    found = [Wanted(suite, "full", None, False)]
    for share in shares:
        for policy in policies:
            if policy != "full":
                sights = (False, True) if policy.partition(":")[0] in seeing else (False,)
                found += [Wanted(suite, policy, share, seen) for seen in sights]
    return found


class Budgets:
    """A file of budgets (JSON lines), so that the search runs once. For many policies it takes minutes.

    Args:
        path: the file; None for none.
        model: identifies the model and the dtype of its cache.
    """

    def __init__(self, path: Path | None, model: str) -> None:
        self._path, self._model = path, model
        text = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if path is not None and whole != text:  # its last line was cut short
            path.write_text(whole, encoding="utf-8")
        self._found = {tuple(row["key"]): row for row in map(json.loads, whole.splitlines())}

    def get(self, entry: Wanted) -> Cell | None:
        """The cell of an earlier search, or None."""
        row = self._found.get(self._key(entry))
        return None if row is None else Cell(*entry, get_policy(row["fitted"]), row["held"], row["full"], row["why"])

    def keep(self, entry: Wanted, cell: Cell) -> None:
        """Write down a cell, unless it has no policy, or its policy is more than its text says, as with a profile."""
        if self._path is None or cell.fitted is None or get_policy(str(cell.fitted)) != cell.fitted:
            return
        row = {
            "key": self._key(entry),
            "fitted": str(cell.fitted),
            "held": cell.held,
            "full": cell.full,
            "why": cell.why,
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _key(self, entry: Wanted) -> tuple[str, ...]:
        sizes = entry.suite.settings["sizes"]["seen" if entry.seen else "unseen"]
        return tuple(map(str, (self._model, entry.suite.name, sizes, *entry[1:])))


def cells(params: Params, entries: Iterable[Wanted], budgets: Budgets | None = None) -> list[Cell]:
    """Cells with their budgets, or with the reason why there is none."""
    full: dict[tuple[str, bool], int] = {}
    found = []
    for entry in entries:
        if budgets is not None and (there := budgets.get(entry)) is not None:
            found.append(there)
            continue
        suite, policy, target, seen = entry
        key = suite.name, seen
        if key not in full:
            full[key] = row_bytes(suite, params, Full(), seen)
        if target is None:
            found.append(Cell(suite, policy, None, seen, Full(), full[key], full[key]))
        else:
            fitted, held, why = fit(suite, params, policy, target, full[key], seen)
            found.append(Cell(suite, policy, target, seen, fitted, held, full[key], why))
        if budgets is not None:
            budgets.keep(entry, found[-1])
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
        asked.for_model(params.config)  # for what it says itself, such as that it has no profile of this model
        if "bits" in _fields(asked):
            tried = [each for bits in BITS if (each := _with_bits(asked, bits)) is not None]
            fitting = [each for each in tried if row_bytes(suite, params, each, seen) <= ABOVE * target]
            fitted = (fitting or tried[:1])[-1]
        elif _budgeted(asked, 1.0) is not None:
            fitted = _largest(suite, params, asked, SLACK * target, seen)
        else:
            fitted = asked
        for tokens in (suite.shortest, suite.longest(seen) + suite.new(seen)):
            fitted.for_model(params.config).validate(tokens)
        held = row_bytes(suite, params, fitted, seen)
    except PolicyError as error:
        return None, 0, str(error)
    why = "" if held <= ABOVE * target else f"needs at least {100 * held / full:.1f} % of the full cache's bytes"
    return fitted, held, why


def _fields(policy: Policy) -> set[str]:
    return {field.name for field in dataclasses.fields(policy)}


def _with_bits(policy: Policy, bits: int) -> Policy | None:
    """The policy with `bits` bits; None if its scheme does not support them."""
    try:
        return get_policy(policy, bits=bits)
    except PolicyError:
        return None


def _budgeted(policy: Policy, budget: float) -> Policy | None:
    """With this budget, which may be that of a policy inside, as of `critical(snapkv)`; None if there is none."""
    if "budget" in _fields(policy):
        return get_policy(policy, budget=budget)
    inner = getattr(policy, "policy", None)
    changed = None if inner is None else _budgeted(inner, budget)
    return None if changed is None else dataclasses.replace(policy, policy=changed)  # pyright: ignore[reportCallIssue]


def _largest(suite: Suite, params: Params, policy: Policy, target: float, seen: bool) -> Policy:
    """The policy with the largest budget, as a fraction, at which rows hold at most `target` bytes; else with the smallest that works.

    Raises:
        PolicyError: no budget works in these prompts.
    """

    def of(steps: int) -> Policy:
        made = _budgeted(policy, steps / STEPS)
        assert made is not None
        return made

    def fits(steps: int) -> bool | None:
        """Whether that budget's bytes do; None where the policy cannot work with it, as with one too small."""
        try:
            tried = of(steps)
            tried.for_model(params.config).validate(suite.shortest)
            return row_bytes(suite, params, tried, seen) <= target
        except PolicyError:
            return None

    low, high = 0, STEPS + 1  # `low` fits or is too small; `high` does not fit or is beyond the last step
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle) is False:
            high = middle
        else:
            low = middle
    if low and fits(low):
        return of(low)
    return of(next((steps for steps in range(high, STEPS + 1) if fits(steps) is not None), STEPS))


def row_bytes(suite: Suite, params: Params, policy: Policy, seen: bool) -> int:
    """Bytes that a row holds, on device and host together, as if it ran alone: the mean over a suite's rows."""
    bound, new, counts = policy.for_model(params.config), suite.new(seen), Counter(suite.lengths(seen))
    total = 0
    for length, count in counts.items():
        for spec in layer_specs(params.config, 1, length, new, params.dtype):
            alone = dataclasses.replace(spec, prompt_len=length)  # no longer than it is, padded to no bucket
            leaves = jax.tree.leaves(jax.eval_shape(bound.layer(alone).init))
            total += count * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return round(total / counts.total())
