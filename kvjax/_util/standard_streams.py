"""Standard input, output and errors of a process whose streams may be closed, full, or in another encoding."""

import codecs
import contextlib
import errno
import io
import os
import sys
from typing import Any

EPIPE_EXIT = 141
"""Exit code after the reader of the output went away, as of a process that SIGPIPE ends."""


def in_utf8() -> None:
    """Start this process again in Python's UTF-8 mode, where the locale knows nothing but ASCII.

    Such a locale (`C`) says nothing of arguments, paths and terminals, which are in UTF-8 nearly everywhere.
    """
    ascii_only = codecs.lookup(sys.getfilesystemencoding()).name == "ascii"
    if ascii_only and os.environ.get("PYTHONUTF8") != "1":  # with it, the variable is ignored (python -E)
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)


def reason(error: OSError) -> str:
    """Why a standard stream failed."""
    return "it is closed" if error.errno == errno.EBADF else error.strerror or str(error)


class Output(io.FileIO):
    """A descriptor to write to, which fails once.

    The error names the stream. What is written after it is dropped, so that flushing at exit does not fail again.

    Args:
        descriptor: what to write to.
        name: what errors call it; None drops the first error too.

    Attributes:
        error: the first one.
    """

    def __init__(self, descriptor: int, name: str | None) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._called = name
        self.error: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write bytes.

        Raises:
            OSError: the first time that it fails.
        """
        if self.error is None:
            try:
                return super().write(data)
            except OSError as error:
                self.error = OSError(error.errno, reason(error), self._called)
                if self._called is not None:
                    raise self.error from None
        return memoryview(data).nbytes


def guard() -> Output:
    """Replace this process's standard streams by ones that can always be used; gives standard output's descriptor.

    Closed ones are opened: reading and writing fail as they do on a closed one, and no file that is opened later takes their place. Text that the
    encoding of a stream lacks is escaped. Errors of writing to standard error are dropped, for there is nowhere to say them.
    """
    for descriptor, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        _open_closed(descriptor, mode)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")  # some locales have halves of surrogate pairs for what is no text
    output, errors = Output(1, "standard output"), Output(2, None)
    sys.stdout, sys.stderr = _text(output, sys.stdout), _text(errors, sys.stderr)
    return output


def close(output: Output, code: int) -> int:
    """Flush what `guard` made; the exit code that is right then, which a failed output changes.

    Args:
        code: of everything else.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    error = output.error
    if error is not None and error.errno == errno.EPIPE:
        return EPIPE_EXIT
    if error is not None and not code:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return code


def _open_closed(descriptor: int, mode: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        opened = os.open(os.devnull, mode)
        if opened != descriptor:
            os.dup2(opened, descriptor)
            os.close(opened)


def _text(raw: Output, like: Any) -> io.TextIOWrapper:
    """A text stream as Python had it, with errors of encoding escaped."""
    unbuffered = like is not None and like.write_through  # python -u
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),  # pyright: ignore[reportArgumentType]  # as Python itself does
        encoding="utf-8" if like is None else like.encoding,
        errors="backslashreplace",
        line_buffering=like is not None and like.line_buffering,
        write_through=unbuffered,
    )
