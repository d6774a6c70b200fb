"""What takes a while says how far it is, also where there is no terminal to draw on."""

import re
import time

import pytest

from kvjax.cli import console, progress
from kvjax.conversion.progress import pause


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    monkeypatch.setattr(progress, "EVERY", 0.05)


def test_by_default_the_first_line_comes_after_two_seconds() -> None:
    assert progress.PATIENCE <= 2
    assert progress.EVERY <= 10


def test_lines_say_what_is_done_and_how_long_it_took(impatient: None, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.bar() as begin:
        report = begin("one")
        time.sleep(0.15)
        report(3, 20)
        time.sleep(0.15)
        begin("two")
        time.sleep(0.5)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.split("\n")[:-1]
    assert re.fullmatch(r"one: \d+ s", lines[0])
    assert any(re.fullmatch(r"one: 3 of 20, \d+ s", line) for line in lines)
    assert re.fullmatch(r"two: \d+ s", lines[-1])
    assert err.replace("\n", "").isprintable()


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", "CLICOLOR_FORCE"])
def test_a_file_has_lines_also_where_colours_are_forced(
    impatient: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """CI services set these variables for all programs, and keep their output in files."""
    monkeypatch.setenv(variable, "1")
    with progress.waiting("Compiling"):
        time.sleep(0.2)
    with progress.bar() as begin:
        begin("one")
        time.sleep(0.2)
    assert re.fullmatch(r"(Compiling: \d+ s\n)+(one: \d+ s\n)+", capsys.readouterr().err)


def test_waiting_says_so_too(impatient: None, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.waiting("Compiling"):
        time.sleep(0.2)
    assert re.match(r"Compiling: \d+ s\n", capsys.readouterr().err)


def test_lines_come_ever_more_seldom() -> None:
    """In ten minutes of work a log has 13 lines."""
    elapsed, lines = progress.PATIENCE, 1
    while (elapsed := elapsed + pause(elapsed, progress.EVERY)) <= 600:
        lines += 1
    assert lines == 13


def test_a_quiet_command_says_nothing(impatient: None, capsys: pytest.CaptureFixture[str]) -> None:
    with console.quietly(), progress.bar() as begin, progress.waiting("Compiling"), progress.unwatched("Loading"):
        begin("one")(1, 2)
        time.sleep(0.2)
    assert capsys.readouterr() == ("", "")


def test_what_is_soon_done_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.bar() as begin:
        begin("one")(1, 2)
    with progress.waiting("Compiling"):
        pass
    assert capsys.readouterr() == ("", "")


def test_an_error_ends_the_lines(impatient: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), progress.waiting("Compiling"):
        raise KeyError
    capsys.readouterr()
    time.sleep(0.15)
    assert capsys.readouterr() == ("", "")
