"""Pytest plugin: runs one share of the tests marked `long` or `mesh_long`, and a ninth of the `slow` and `mesh` ones marked `rotating`.

A continuous integration run has time for a part of these tests only. They are divided into shares, and the commit's hash selects one.
Slow and mesh tests that ask the same of every policy or kernel are marked `rotating`. They are divided into `PARTS`.

The environment variable `KVJAX_LONG_SHARE` selects another share: `3/90` is share 3 of 90 (the first is 0), and `all` runs every test. Where the
variable is not set, runs outside CI take all tests.
"""

import hashlib
import json
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "KVJAX_LONG_SHARE"
"""Environment variable that selects a share."""

TIERS = ("long", "mesh_long")
"""Markers whose tests are divided, each tier for itself."""

SHARES = 90
"""Number of shares."""

ROTATING, PARTS = "rotating", 9
"""Marker of tests of which a run takes a part, and the number of parts. The index of the share selects the part."""

ROTATED = ("slow", "mesh")
"""Tiers that have tests with this marker."""

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Choice:
    """One share of `count`, or all tests where `index` is None. `reason` describes how it was chosen."""

    index: int | None
    count: int
    reason: str


def choose(value: str | None, commit: str | None, ci: bool) -> Choice:
    """The share to run.

    Args:
        value: `KVJAX_LONG_SHARE`, or None where it is not set.
        commit: Hash of the commit in hexadecimal digits, or None where it is unknown.
        ci: Whether this is a run of continuous integration.

    Raises:
        ValueError: `value` is neither `all` nor a share.
    """
    if value:
        if value == "all":
            return Choice(None, 1, f"{VARIABLE}=all")
        match = re.fullmatch(r"(\d+)/(\d+)", value, flags=re.ASCII)
        if not match or not int(match[1]) < int(match[2]):
            raise ValueError(
                f'{VARIABLE}={value!r} is not a share. Use "all" or INDEX/COUNT with 0 <= INDEX < COUNT, such as 3/{SHARES}.'
            )
        return Choice(int(match[1]), int(match[2]), f"chosen by {VARIABLE}={value}")
    if not ci:
        return Choice(None, 1, f"{VARIABLE}=0/{SHARES} runs a share")
    index, by = (
        (0, "no commit found") if commit is None else (int(commit, 16) % SHARES, f"chosen by commit {commit[:7]}")
    )
    return Choice(index, SHARES, f"{by} ({VARIABLE}={index}/{SHARES} runs it again)")


def head_commit() -> str | None:
    """Hash of the commit that is checked out, or None without git or a repository."""
    try:
        run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def group(nodeid: str) -> str:
    """Tests of one group are in the same share: those of a file that have the same parameters, which share compiled programs."""
    path, _, test = nodeid.partition("::")
    return path + "".join(test.partition("[")[1:])


def digest(name: str) -> int:
    """A hash that is the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def assign(nodeids: Iterable[str], count: int, seconds: Mapping[str, float]) -> dict[str, int]:
    """Share of each test.

    The hash of a test's group selects its share. Groups with recorded times are instead assigned such that shares take similar times: the
    slowest first, each to the share with the least time so far. New tests therefore do not move others.

    Args:
        nodeids: Pytest's names of the tests.
        count: Number of shares.
        seconds: Recorded time of each test, by name.
    """
    times: defaultdict[str, float] = defaultdict(float)
    for nodeid, time in seconds.items():
        times[group(nodeid)] += time
    loads, shares = [0.0] * count, dict[str, int]()
    for name in sorted(times, key=lambda name: (-times[name], digest(name))):
        shares[name] = loads.index(min(loads))
        loads[shares[name]] += times[name]
    return {nodeid: shares.get(group(nodeid), digest(group(nodeid)) % count) for nodeid in nodeids}


def recorded(tier: str) -> dict[str, float]:
    """Processor seconds of each test of a tier from a result file of `benchmarks.test_times`; empty without the file."""
    file = ROOT / f"benchmarks/results/test-times-{tier.replace('_', '-')}.json"
    if not file.is_file():
        return {}
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return {row["what"]: row["cpu"] for row in rows if "::" in row["what"]}


def rotate(cases: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """Parameters of a test that asks the same in many cases: those in `always` in every run, and the others marked `rotating`."""
    cases = list(cases)
    for case in always:
        if case not in cases:
            raise ValueError(f"{case!r} is no case; use some of {cases}")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if case in always else pytest.mark.rotating,
        )
        for case in cases
    ]


def expected_runs(count: int) -> float:
    """Expected number of runs with random shares until every share has run (coupon collector's problem)."""
    return count * sum(1 / n for n in range(1, count + 1))


CHOICE = pytest.StashKey[Choice]()


def pytest_configure(config: pytest.Config) -> None:
    """Choose a share where one of the tiers is selected."""
    if config.option.markexpr in (*TIERS, *ROTATED):
        ci = os.environ.get("CI", "").lower() in ("1", "true", "yes")
        try:
            config.stash[CHOICE] = choose(os.environ.get(VARIABLE), head_commit(), ci)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None


def pytest_report_header(config: pytest.Config) -> str | None:
    """A line that names the share and the setting that runs it again."""
    if (choice := config.stash.get(CHOICE, None)) is None:
        return None
    tests = config.option.markexpr if config.option.markexpr in TIERS else ROTATING
    what = (
        f"all ({choice.reason})" if choice.index is None else f"share {choice.index} of {choice.count}, {choice.reason}"
    )
    return f"{tests} tests: {what}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of the other shares."""
    choice = config.stash.get(CHOICE, None)
    if choice is None or choice.index is None:
        return
    if config.option.markexpr in TIERS:
        shares = assign((item.nodeid for item in items), choice.count, recorded(config.option.markexpr))
        chosen = [item for item in items if shares[item.nodeid] == choice.index]
    else:
        divided = (item.nodeid for item in items if item.get_closest_marker(ROTATING))
        shares = assign(divided, PARTS, {})
        chosen = [item for item in items if shares.get(item.nodeid, choice.index % PARTS) == choice.index % PARTS]
    if len(chosen) < len(items):
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A share without a test is no error. Small tiers have such shares."""
    choice = session.config.stash.get(CHOICE, None)
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and choice is not None and choice.index is not None:
        session.exitstatus = pytest.ExitCode.OK
