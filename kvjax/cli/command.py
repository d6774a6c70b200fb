"""What every command does when something goes wrong: one clear line, and an exit code."""

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import typer
import typer.core
from rich.text import Text

from .console import errors

FAILED, INTERRUPTED, PIPE_CLOSED = 1, 130, 141


class Command(typer.core.TyperCommand):
    """A command whose expected failures (bad values, damaged or missing files) are told in one line on standard error.

    Exit codes: 1 where the library refuses, 2 for wrong usage, 130 after Ctrl-C, 141 where the reader of the output went
    away. With `--json` messages are JSON objects, one a line. `kvjax --debug` lets the traceback through.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        as_json = bool(ctx.params.get("as_json"))
        try:
            with _warnings_as_lines(as_json):
                result = super().invoke(ctx)
                sys.stdout.flush()
                return result
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Python flushes standard output once more on exit, which must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(PIPE_CLOSED) from None
        except Exception as error:
            if ctx.find_root().params.get("debug") or not _expected(error):
                raise
            _say("error", _sentence(error), as_json, type(error).__name__)
            raise typer.Exit(FAILED) from None


def _expected(error: Exception) -> bool:
    """Whether this is the library or the machine refusing, rather than a mistake in the code."""
    # JAX's own error (out of device memory, say) is named here by its text, so as not to import JAX.
    return (
        isinstance(error, ValueError | OSError | ImportError | MemoryError) or type(error).__name__ == "JaxRuntimeError"
    )


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


@contextlib.contextmanager
def _warnings_as_lines(as_json: bool) -> Iterator[None]:
    said: set[str] = set()

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        text = str(message)
        if text not in said:
            said.add(text)
            _say("warning", text, as_json, type(message).__name__)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _say(kind: str, message: str, as_json: bool, name: str) -> None:
    if as_json:
        print(json.dumps({kind: message, "type": name}, ensure_ascii=False), file=sys.stderr)
    else:
        colour = "bold red" if kind == "error" else "bold yellow"
        errors().print(Text.assemble((f"{kind}:", colour), " ", message), soft_wrap=True)
