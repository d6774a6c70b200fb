"""Progress: a bar on a terminal, lines elsewhere; only where it is wanted, and for work that takes a while."""

import io
import sys

import pytest

from kvjax.conversion import progress
from kvjax.conversion.progress import Meter


def work(show: bool | None) -> None:
    with Meter("Loading something", 4_000_000, show) as meter:
        for _ in range(4):
            meter.advance(1_000_000)


@pytest.mark.parametrize("show", [True, None])
def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, show: bool | None) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    work(show)
    assert "Loading something" in terminal.getvalue()
    assert "\x1b" in terminal.getvalue()


def test_a_line_every_few_seconds_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 0.0, 3.0, 6.0, 10.0, 12.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    work(show=True)
    captured = capsys.readouterr()
    assert captured.err == "Loading something: 2.0 MB of 4.0 MB, 50%\nLoading something: 4.0 MB of 4.0 MB, 100%\n"
    assert captured.out == "", "what is piped on stays clean"


def test_a_line_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(file := io.BytesIO()))
    progress.Lines("Loading something").tell("half")
    assert file.getvalue() == b"Loading something: half\n", "before the buffer is full"


@pytest.mark.parametrize("show", [False, None])
def test_quiet_otherwise(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, show: bool | None
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    work(show)
    assert capsys.readouterr() == ("", "")


def test_quick_work_needs_no_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 60.0)
    work(show=True)
    assert capsys.readouterr() == ("", "")
