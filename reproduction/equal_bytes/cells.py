"""Policies of the leaderboard, each with the budget at which it holds or reads a given share."""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from kvjax.cache import layer_specs
from kvjax.config import ModelConfig
from kvjax.models import Params
from kvjax.policies import Full, Policy, PolicyError, get_policy, prompt_only
from reproduction.make_profiles import path as profile_path

from .suite import Suite

ABOVE = 1.02
"""Bytes up to this multiple of the target count as equal, since slots are rounded."""

SLACK = 1.001
"""Tolerance of the search, so that counters of a few bytes besides the slots do not cost a whole step of slots."""

Convention = Literal["bytes", "prompt", "read"]
"""What a share is of: "bytes" of the full cache that are held; tokens of the "prompt" that are kept, while new tokens are kept in addition,
as kvpress counts; or tokens of the prompt that are "read" by a query of a policy that holds all.
"""

MEMORIES: dict[Convention, tuple[str, ...]] = {
    "bytes": ("full", "freed", "sparse", "quantized"),
    "prompt": ("freed",),
    "read": ("sparse",),
}
"""For each convention the policies that it applies to, by `PolicyInfo.memory`."""

WHOLE_HEADS = 1.15
"""A policy that holds more than this multiple of its budget has heads that keep everything, which count as well."""

STEPS = 1000
"""Budgets are multiples of 1 / STEPS."""

BITS = (2, 4, 8)
"""Bits to try for policies that quantise instead of evicting."""


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """One policy at one share.

    Attributes:
        policy: as it was asked for.
        target: the share; None for the full cache.
        seen: whether the policy sees the question when it compresses the prompt.
        of: what the share is of.
        fitted: the policy with the budget that it takes, a fraction of each row's own tokens.
        held, full: bytes of one row, on device and host together, under the policy and in the full cache. They are means over the rows,
            each counted as if it ran alone.
        why: why there is nothing to run; empty if there is.
    """

    suite: Suite
    policy: str
    target: float | None
    seen: bool
    of: Convention
    fitted: Policy | None
    held: int
    full: int
    why: str = ""

    @property
    def key(self) -> dict[str, Any]:
        """What its rows begin with. Rows without `of` are of "bytes"."""
        of = {} if self.of == "bytes" else {"of": self.of}
        return {"suite": self.suite.name, "policy": self.policy, "target": self.target, "seen": self.seen, **of}


class Wanted(NamedTuple):
    """A policy at a share, before it is known with which budget; see `Cell`."""

    suite: Suite
    policy: str
    target: float | None
    seen: bool
    of: Convention = "bytes"


def wanted(
    suite: Suite, policies: Sequence[str], shares: Mapping[Convention, Sequence[float]], seeing: Sequence[str] | None
) -> list[Wanted]:
    """The full cache, then all policies that a convention applies to at its first share, at the next, ...

    Args:
        suite: the tasks.
        policies: as kvjax takes them.
        shares: of each convention.
        seeing: names of policies that are asked with the question in sight as well. By default these are all policies at a share of the
            prompt, and none at others.
    """
    found = [Wanted(suite, "full", None, False)]
    memories = {policy: get_policy(policy).info.memory for policy in policies if policy != "full"}
    for of, each in shares.items():
        for share in each:
            for policy in (policy for policy, memory in memories.items() if memory in MEMORIES[of]):
                twice = of == "prompt" if seeing is None else policy.partition(":")[0] in seeing
                found += [Wanted(suite, policy, share, seen, of) for seen in ((False, True) if twice else (False,))]
    return found


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes policies of a model.

    Attributes:
        config: of the model.
        profiles: folder of profiles. A policy takes one from it if it needs one that does not come with kvjax. None for no folder.
    """

    config: ModelConfig
    profiles: Path | None = None

    def __call__(self, policy: str | Policy) -> Policy:
        """The policy, with the folder's profile if it needs one.

        Raises:
            PolicyError: the model cannot have it, as without a profile.
        """
        made = self._profiled(get_policy(policy))
        made.for_model(self.config)
        return made

    def _profiled(self, policy: Policy) -> Policy:
        if isinstance(inner := getattr(policy, "policy", None), Policy):
            return dataclasses.replace(policy, policy=self._profiled(inner))  # pyright: ignore[reportCallIssue]
        if self.profiles is None or getattr(policy, "profile", ...) is not None:
            return policy
        try:
            policy.for_model(self.config)
        except PolicyError:
            file = self._file(policy)
            return get_policy(policy, profile=str(file)) if file.is_file() else policy
        return policy

    def bare(self, policy: Policy) -> Policy:
        """The policy without the folder's profile."""
        if isinstance(inner := getattr(policy, "policy", None), Policy):
            return dataclasses.replace(policy, policy=self.bare(inner))  # pyright: ignore[reportCallIssue]
        if self.profiles is None or getattr(policy, "profile", None) != str(self._file(policy)):
            return policy
        return dataclasses.replace(policy, profile=None)  # pyright: ignore[reportCallIssue]

    def _file(self, policy: Policy) -> Path:
        assert self.profiles is not None
        return profile_path(self.profiles, policy.info.name, self.config)


def profiles_of(policy: Policy) -> dict[str, str]:
    """Hashes of a policy's profiles, by the names of their files, which are the same wherever the folder is."""
    found = profiles_of(inner) if isinstance(inner := getattr(policy, "policy", None), Policy) else {}
    if isinstance(file := getattr(policy, "profile", None), str) and Path(file).is_file():
        found[Path(file).name] = f"SHA-256 {hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]}"
    return found


class Budgets:
    """A file of budgets (JSON lines), so that the search runs once. For many policies it takes minutes.

    Args:
        path: the file; None for none.
        model: identifies the model and the dtype of its cache.
        make: makes policies of the model.
    """

    def __init__(self, path: Path | None, model: str, make: Maker) -> None:
        self._path, self._model, self._make = path, model, make
        text = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if path is not None and whole != text:  # its last line was cut short
            path.write_text(whole, encoding="utf-8")
        self._found = {tuple(row["key"]): row for row in map(json.loads, whole.splitlines())}

    def get(self, entry: Wanted) -> Cell | None:
        """The cell of an earlier search, or None."""
        row = self._found.get(self._key(entry))
        if row is None:
            return None
        try:
            policy = self._make(row["fitted"])
        except PolicyError:  # as without the profile that it had then
            return None
        if profiles_of(policy) != row.get("profiles", {}):
            return None
        return Cell(*entry, policy, row["held"], row["full"], row["why"])

    def keep(self, entry: Wanted, cell: Cell) -> None:
        """Write down a cell that has a policy."""
        if self._path is None or cell.fitted is None:
            return
        row = {
            "key": self._key(entry),
            "fitted": str(self._make.bare(cell.fitted)),
            "profiles": profiles_of(cell.fitted),
            "held": cell.held,
            "full": cell.full,
            "why": cell.why,
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _key(self, entry: Wanted) -> tuple[str, ...]:
        sizes = entry.suite.settings["sizes"]["seen" if entry.seen else "unseen"]
        of = () if entry.of == "bytes" else (entry.of,)
        return tuple(map(str, (self._model, entry.suite.name, sizes, *entry[1:4], *of)))


def cells(
    params: Params, entries: Iterable[Wanted], budgets: Budgets | None = None, make: Maker | None = None
) -> list[Cell]:
    """Cells with their budgets, or with the reason why there is none. `make` makes policies, by default without profiles."""
    make = make or Maker(params.config)
    full: dict[tuple[str, bool], int] = {}
    found = []
    for entry in entries:
        if budgets is not None and (there := budgets.get(entry)) is not None:
            found.append(there)
            continue
        suite, policy, target, seen, of = entry
        key = suite.name, seen
        if key not in full:
            full[key] = row_bytes(suite, params, Full(), seen)
        if target is None:
            found.append(Cell(suite, policy, None, seen, of, Full(), full[key], full[key]))
        else:
            fit = fit_bytes if of == "bytes" else fit_tokens
            fitted, held, why = fit(suite, params, make, policy, target, full[key], seen)
            found.append(Cell(suite, policy, target, seen, of, fitted, held, full[key], why))
        if budgets is not None:
            budgets.keep(entry, found[-1])
    return found


def fit_tokens(
    suite: Suite, params: Params, make: Maker, policy: str, share: float, full: int, seen: bool
) -> tuple[Policy | None, int, str]:
    """As `fit_bytes`, with the budget that is a share of each prompt's tokens. What is kept of new tokens is in addition.

    Policies that compress while decoding compress the prompt alone. Of policies with heads that keep everything, all heads together keep
    or read the share.
    """
    try:
        asked = make(policy)
        if asked.info.stage == "both":
            asked = prompt_only(asked)
        budget = _rounded(share * suite.prompt_share(seen))
        made = _budgeted(asked, budget)
        if made is None:
            return None, 0, "has no budget"
        held, frees = row_bytes(suite, params, made, seen), made.info.memory == "freed"
        new = suite.new(seen) * params.config.cache_bytes_per_token(params.dtype.itemsize)
        if frees and held - new > WHOLE_HEADS * budget * full:
            made = _largest(suite, params, asked, SLACK * (share * (full - new) + new), seen)
            held = row_bytes(suite, params, made, seen)
        for tokens in (suite.shortest, suite.longest(seen) + suite.new(seen)):
            made.for_model(params.config).validate(tokens)
    except PolicyError as error:
        return None, 0, str(error)
    least = (held - new) / (full - new)
    too_much = frees and held - new > WHOLE_HEADS * max(budget * full, share * (full - new))
    return made, held, f"needs at least {100 * least:.1f} % of the prompt" if too_much else ""


def _rounded(share: float) -> float:
    """A fraction in steps that are fine enough for the smallest shares."""
    return max(round(share * 10 * STEPS), 1) / (10 * STEPS)


def fit_bytes(
    suite: Suite, params: Params, make: Maker, policy: str, share: float, full: int, seen: bool
) -> tuple[Policy | None, int, str]:
    """The policy with the largest budget (or number of bits) at which rows hold a share of `full`, what they hold, and why they cannot.

    Budgets are fractions of each row's own tokens, so that a prompt shorter than the others is compressed as much as they are.
    """
    target = round(share * full)
    try:
        asked = make(policy)
        if _budgeted(asked, 1.0) is not None:
            fitted = _largest(suite, params, asked, SLACK * target, seen)
        elif "bits" in _fields(asked):
            tried = [each for bits in BITS if (each := _with_bits(asked, bits)) is not None]
            fitting = [each for each in tried if row_bytes(suite, params, each, seen) <= ABOVE * target]
            fitted = (fitting or tried[:1])[-1]
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
