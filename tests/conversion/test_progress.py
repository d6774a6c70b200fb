"""The progress bar: drawn where it is wanted, and only for work that takes a while."""

import pytest

from kvjax.conversion import progress
from kvjax.conversion.progress import Meter


def work(show: bool | None) -> None:
    with Meter("Loading something", 4_000_000, show) as meter:
        for _ in range(4):
            meter.advance(1_000_000)


def test_drawn_on_request(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    work(show=True)
    captured = capsys.readouterr()
    assert "Loading something" in captured.err
    assert captured.out == "", "what is piped on stays clean"


@pytest.mark.parametrize("show", [False, None])
def test_quiet_otherwise(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, show: bool | None
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    work(show)
    assert capsys.readouterr() == ("", "")


def test_quick_work_needs_no_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 60.0)
    work(show=True)
    assert capsys.readouterr() == ("", "")
