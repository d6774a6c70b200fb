"""Error handling of every command: one clear line, and an exit code."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import typer
import typer.core

from kvjax._util.standard_streams import EPIPE_EXIT
from kvjax._util.user_files import expanded

from . import console
from .interruption import INTERRUPTED, start_jax

FAILED, USAGE, PIPE_CLOSED = 1, 2, EPIPE_EXIT

_UsageError = typer.BadParameter.__bases__[0]
"""Click's class, obtained through typer, as the click package depends on typer's version."""


_QUIET = "kvjax.quiet"
"""Key in a command's context for whether to show no progress."""


class Command(typer.core.TyperCommand):
    """A command that reports expected failures (bad values, damaged or missing files) in one line on standard error.

    Exit codes are 1 for errors of the library, 2 for wrong usage, 130 after Ctrl-C, and 141 if the reader of the output
    has gone. With `--json`, messages are JSON objects, one per line, and standard output has the result or nothing.
    `kvjax --debug` shows the traceback. `--quiet`, before the command or among its options, hides progress.
    """

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the arguments."""
        asked, quiet = "--json" in args, "--quiet" in _options(args)
        args = [each for i, each in enumerate(args) if each != "--quiet" or i >= len(_options(args))]
        try:
            context = super().make_context(info_name, args, parent, **extra)
            context.meta[_QUIET] = quiet or context.find_root().params.get("quiet", False)
            return context
        except Exception as error:
            if asked and isinstance(error, _UsageError):
                with console.only_json():
                    _refuse(error)
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command. `~` in a path is expanded, also where the shell does not, as in `--out=~/results`."""
        ctx.params |= {name: expanded(value) for name, value in ctx.params.items() if isinstance(value, Path)}
        try:
            with contextlib.ExitStack() as stack:
                if ctx.params.get("as_json"):
                    stack.enter_context(console.only_json())
                if ctx.meta[_QUIET]:
                    stack.enter_context(console.quietly())
                stack.enter_context(_warnings_as_lines())
                return self._told(ctx)
        except BrokenPipeError:
            raise typer.Exit(PIPE_CLOSED) from None

    def _told(self, ctx: Any) -> Any:
        try:
            start_jax()
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise
        except Exception as error:
            if _interrupted(error):
                raise typer.Exit(INTERRUPTED) from None
            if isinstance(error, _UsageError) and console.as_json():
                _refuse(error)
            if ctx.find_root().params.get("debug") or not _expected(error):
                raise
            console.say("error", _sentence(error), type=type(error).__name__)
            raise typer.Exit(FAILED) from None


def _options(args: list[str]) -> list[str]:
    """Arguments before `--`. All arguments after it are values."""
    return args[: args.index("--")] if "--" in args else args


def _refuse(error: Any) -> NoReturn:
    console.say("error", error.format_message(), type=type(error).__name__)
    raise typer.Exit(USAGE) from None


def _interrupted(error: BaseException | None) -> bool:
    """Whether the error was caused by Ctrl-C. Importing a compiled module turns it into an ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _expected(error: Exception) -> bool:
    """Whether the error is expected (a refusal by the library or the machine) and not a bug."""
    # JAX's error (such as out of device memory) is compared by name, so as not to import JAX.
    return (
        isinstance(error, ValueError | OSError | ImportError | MemoryError) or type(error).__name__ == "JaxRuntimeError"
    )


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    said: set[str] = set()

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        text = str(message)
        if text not in said:
            said.add(text)
            console.say("warning", text, type=type(message).__name__)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
