"""`kvjax chat`: each line is a message of one session."""

import importlib
from pathlib import Path
from typing import Any

import pytest

import kvjax
from kvjax.models import Params

OPTIONS = ["--policy", "streaming_llm:24", "--room", "90", "--max-new-tokens", "8"]


def test_lines_are_messages_of_a_session(kvjax_command: Any, checkpoint: Path, params: Params) -> None:
    result = kvjax_command("chat", "--model", checkpoint, *OPTIONS, "--system", "be", stdin="hi\n\nwho?\n")
    said = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    session = kvjax.Session(params, said, "streaming_llm:24", max_new_tokens=90)
    texts = [session.answer(8).text, session.chat("who?", 8).text]
    assert (result.exit_code, result.stdout) == (0, "".join(f"{text}\n" for text in texts))


def test_an_answer_that_is_interrupted(kvjax_command: Any, checkpoint: Path, monkeypatch: Any) -> None:
    """The next message is answered."""
    stream, calls = kvjax.Session.stream, []

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(args[0])
        for piece in stream(self, *args, **options):
            yield piece
            if len(calls) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(kvjax.Session, "stream", interrupted)
    result = kvjax_command("chat", "--model", checkpoint, *OPTIONS, stdin="hi\nwho?\n")
    assert (result.exit_code, calls) == (0, [None, "who?"])


def test_room_that_is_used_up(kvjax_command: Any, checkpoint: Path) -> None:
    result = kvjax_command("chat", "--model", checkpoint, *OPTIONS[:3], "8", *OPTIONS[4:], stdin="hi\nwho?\n")
    assert result.exit_code == 0
    assert "the room of 8 tokens is used up" in result.stderr


def test_refusals(kvjax_command: Any, checkpoint: Path) -> None:
    result = kvjax_command("chat", "--model", checkpoint, "--temperature", "-1", stdin="hi\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "temperature=-1.0" in result.stderr


@pytest.mark.parametrize(
    ("stdin", "says"),
    [
        (b"a line that does not end", "standard input: more than 9 characters in a line; give a shorter prompt"),
        (b"a\xff\n", "standard input: not utf-8 text (invalid start byte at byte 1)"),
    ],
)
def test_lines_that_are_no_messages(
    kvjax_command: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stdin: bytes, says: str
) -> None:
    monkeypatch.setattr(importlib.import_module("kvjax.cli.options"), "TEXT_BYTES", 9)
    result = kvjax_command("chat", "--model", checkpoint, *OPTIONS, stdin=stdin)
    assert (result.exit_code, result.stdout) == (1, "")
    assert says in result.stderr
