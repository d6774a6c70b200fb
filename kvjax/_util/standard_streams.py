"""Makes standard streams usable that are closed, full, or in another encoding."""

import codecs
import contextlib
import errno
import io
import os
import sys
from typing import Any

EPIPE_EXIT = 141
"""Exit code if the reader of the output has gone, as for a process killed by SIGPIPE."""


def in_utf8() -> None:
    """Restart this process in Python's UTF-8 mode if the locale supports only ASCII.

    Arguments, paths and terminals are nearly always in UTF-8, whatever such a locale (`C`) implies.
    """
    ascii_only = codecs.lookup(sys.getfilesystemencoding()).name == "ascii"
    if ascii_only and os.environ.get("PYTHONUTF8") != "1":  # if it is set, Python was told to ignore it (python -E)
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)


def reason(error: OSError) -> str:
    """Reason why a standard stream failed."""
    return "it is closed" if error.errno == errno.EBADF else error.strerror or str(error)


class Output(io.FileIO):
    """A descriptor to write to, which fails only once.

    The first error names the stream. Later output is dropped, so that flushing at exit does not fail again.

    Args:
        descriptor: file descriptor to write to.
        name: name of the stream in errors; None also drops the first error.

    Attributes:
        error: the first error.
    """

    def __init__(self, descriptor: int, name: str | None) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._called = name
        self.error: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write bytes.

        Raises:
            OSError: the first write that fails.
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
    """Replace this process's standard streams by ones that are always usable. Returns standard output's descriptor.

    Closed streams are opened, so that no file that is opened later takes their descriptor. Reading and writing them
    fails as on a closed stream. Characters that a stream's encoding lacks are escaped. Errors of writing to standard
    error are dropped, as they cannot be reported.
    """
    for descriptor, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        _open_closed(descriptor, mode)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")  # some locales map invalid bytes to halves of surrogate pairs
    output, errors = Output(1, "standard output"), Output(2, None)
    sys.stdout, sys.stderr = _text(output, sys.stdout), _text(errors, sys.stderr)
    return output


def close(output: Output, code: int) -> int:
    """Flush the streams of `guard`, and return the exit code, which a failed output changes.

    Args:
        output: what `guard` returned.
        code: exit code if the output succeeds.
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
    """A text stream like Python's own, which escapes characters that cannot be encoded."""
    unbuffered = like is not None and like.write_through  # python -u
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),  # pyright: ignore[reportArgumentType]  # as Python itself does
        encoding="utf-8" if like is None else like.encoding,
        errors="backslashreplace",
        line_buffering=like is not None and like.line_buffering,
        write_through=unbuffered,
    )
