"""The shares into which long tests are divided."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from long_share import PARTS, ROTATED, SHARES, VARIABLE, Choice, assign, choose, expected_runs, group, rotate

ROOT = Path(__file__).parents[1]
NAMES = [f"tests/test_{file}.py::test_{test}[{case}]" for file in "ab" for test in "cd" for case in range(100)]
SECONDS = {name: 1.0 + i % 7 for i, name in enumerate(NAMES)}


def test_shares_are_stable() -> None:
    """They do not depend on the process, the order of the tests, or which others there are."""
    shares = assign(NAMES, 20, {})
    assert [shares[name] for name in NAMES[:6]] == [4, 18, 6, 18, 17, 14]
    assert assign(reversed(NAMES), 20, {}) == shares
    assert assign(NAMES[:5], 20, {}) == {name: shares[name] for name in NAMES[:5]}


@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("seconds", [{}, SECONDS], ids=["unrecorded", "recorded"])
def test_every_test_is_in_one_share(count: int, seconds: dict[str, float]) -> None:
    shares = assign(NAMES, count, seconds)
    assert list(shares) == NAMES
    assert set(shares.values()) == set(range(count))


def test_tests_with_the_same_parameters_are_together() -> None:
    assert group("tests/a.py::test_b[c::d[e]]") == "tests/a.py[c::d[e]]" == group("tests/a.py::test_f[c::d[e]]")
    assert group("tests/a.py::test_b") == "tests/a.py"
    for seconds in ({}, SECONDS):
        shares = assign(NAMES, 20, seconds)
        assert all(shares[name] == shares[name.replace("test_c", "test_d")] for name in NAMES)


def test_recorded_seconds_balance_the_shares() -> None:
    shares, loads = assign(NAMES, 20, SECONDS), Counter[int]()
    for name, share in shares.items():
        loads[share] += int(SECONDS[name])
    assert max(loads.values()) <= 1.1 * min(loads.values())


def test_a_new_test_moves_no_other() -> None:
    new = "tests/test_a.py::test_new[unseen]"
    assert assign([*NAMES, new], 20, SECONDS) == {**assign(NAMES, 20, SECONDS), new: assign([new], 20, {})[new]}


@pytest.mark.parametrize("ci", [False, True])
def test_the_variable_selects_a_share(ci: bool) -> None:
    assert choose("3/7", "abc1234f", ci) == Choice(3, 7, f"chosen by {VARIABLE}=3/7")
    assert choose("all", "abc1234f", ci) == Choice(None, 1, f"{VARIABLE}=all")


def test_the_commit_selects_a_share_in_ci() -> None:
    index = 0xABC1234F % SHARES
    reason = f"chosen by commit abc1234 ({VARIABLE}={index}/{SHARES} runs it again)"
    assert choose(None, "abc1234f", ci=True) == choose("", "abc1234f", ci=True) == Choice(index, SHARES, reason)
    assert choose(f"{index}/{SHARES}", None, ci=True).index == index


def test_without_a_commit_the_first_share_runs() -> None:
    choice = choose(None, None, ci=True)
    assert choice.index == 0
    assert choice.reason == f"no commit found ({VARIABLE}=0/{SHARES} runs it again)"


def test_outside_ci_all_tests_run() -> None:
    assert choose(None, "abc1234f", ci=False).index is None


@pytest.mark.parametrize("value", ["3", "20/20", "1/0", "-1/20", "3 / 20", "3/20/4", "ALL", "²/3"])
def test_what_is_no_share_is_refused(value: str) -> None:
    message = (
        f'{VARIABLE}={value!r} is not a share. Use "all" or INDEX/COUNT with 0 <= INDEX < COUNT, such as 3/{SHARES}.'
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        choose(value, "abc1234f", ci=True)


def test_every_part_is_as_likely() -> None:
    assert SHARES % PARTS == 0


def test_the_documented_number_of_runs() -> None:
    text = (ROOT / "docs/testing.md").read_text(encoding="utf-8")
    assert expected_runs(3) == pytest.approx(5.5)
    assert f"{expected_runs(SHARES):.0f} runs" in text
    assert f"{SHARES} shares" in text
    assert f"{expected_runs(PARTS):.0f} runs are expected until every part has run at least once" in text


def pytest_in(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Pytest in a folder, with this plugin and nothing else of this repository."""
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE and not k.startswith("PYTEST")}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # to import others takes longer than all the rest
    environment |= {"PYTHONPATH": str(ROOT / "tests"), "CI": "true", **variables}
    command = [sys.executable, "-m", "pytest", "-p", "long_share", "-v", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("tier", ROTATED)
def test_parts_of_rotating_tests_together_are_all(tmp_path: Path, tier: str) -> None:
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers = {tier}\n    rotating\n")
    (tmp_path / "test_it.py").write_text(
        f"import pytest\npytestmark = pytest.mark.{tier}\n"
        "@pytest.mark.rotating\n@pytest.mark.parametrize('x', range(12))\ndef test_of_each(x): pass\n"
        "def test_always(): pass\n"
    )
    ran: list[str] = []
    for index in (0, 10, 20, 30, 40, 50, 60, 70, 89):
        run = pytest_in(tmp_path, "-m", tier, **{VARIABLE: f"{index}/{SHARES}"})
        assert run.returncode == 0, run.stdout + run.stderr
        assert f"rotating tests: share {index} of {SHARES}, chosen by" in run.stdout
        ran += re.findall(r"(\S+) PASSED", run.stdout)
    each = [f"test_it.py::test_of_each[{x}]" for x in range(12)]
    assert sorted(ran) == sorted([*each, *PARTS * ["test_it.py::test_always"]])
    run = pytest_in(tmp_path, "-m", tier, **{VARIABLE: "all"})
    assert len(re.findall(" PASSED", run.stdout)) == 13


def test_pytest_runs_the_share_and_names_it(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.long\n@pytest.mark.parametrize('x', range(12))\ndef test_long(x): pass\n"
        "def test_quick(): pass\n"
    )
    ran: list[str] = []
    for index in range(2):
        run = pytest_in(tmp_path, "-m", "long", **{VARIABLE: f"{index}/2"})
        assert run.returncode == 0, run.stdout + run.stderr
        assert f"long tests: share {index} of 2, chosen by {VARIABLE}={index}/2" in run.stdout
        ran += re.findall(r"(\S+) PASSED", run.stdout)
    assert sorted(ran) == sorted(f"test_it.py::test_long[{x}]" for x in range(12))
    other = pytest_in(tmp_path, "-m", "not long", **{VARIABLE: "0/2"})
    assert re.findall(r"(\S+) PASSED", other.stdout) == ["test_it.py::test_quick"]
    assert "tests: share" not in other.stdout
    refused = pytest_in(tmp_path, "-m", "long", **{VARIABLE: "2/2"})
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: {VARIABLE}='2/2' is not a share." in refused.stderr


@pytest.mark.parametrize("options", [[], ["-p", "xdist.plugin", "-n", "1"]], ids=["here", "in a process"])
def test_a_share_without_a_test_passes(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long\n")
    (tmp_path / "test_it.py").write_text("import pytest\n@pytest.mark.long\ndef test_long(): pass\n")
    index = assign(["test_it.py::test_long"], 2, {})["test_it.py::test_long"]
    command = "-m", "long", *options
    assert pytest_in(tmp_path, *command, **{VARIABLE: f"{index}/2"}).returncode == 0
    empty = pytest_in(tmp_path, *command, **{VARIABLE: f"{1 - index}/2"})
    assert empty.returncode == 0, empty.stdout + empty.stderr
    nothing = pytest_in(tmp_path, "-m", "not long", **{VARIABLE: f"{1 - index}/2"})
    assert nothing.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_of_many_cases_some_run_always() -> None:
    found = rotate([("a", 1), ("b", 2), ("c", 3)], always=[("b", 2)])
    assert [param.values for param in found] == [("a", 1), ("b", 2), ("c", 3)]
    assert [[mark.name for mark in param.marks] for param in found] == [["rotating"], [], ["rotating"]]
    assert [param.values for param in rotate(range(2), always=range(1))] == [(0,), (1,)]
    with pytest.raises(ValueError, match=r"'d' is no case"):
        rotate("abc", always="bd")
