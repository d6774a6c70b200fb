"""`python -m kvjax` is the `kvjax` command."""

import os
import sys

# All other imports are within `main`: a Ctrl-C ends them without a traceback.


def main() -> None:
    """Run the command line; the entry point of the `kvjax` script."""
    try:
        from kvjax._util import standard_streams

        standard_streams.in_utf8()
        sys.unraisablehook = unraisable
        output = standard_streams.guard()
        code = standard_streams.close(output, run())
    except KeyboardInterrupt:
        code = 130
    # What is left is Python's own end, which takes an exception badly.
    import signal

    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    sys.exit(code)


def run() -> int:
    """The exit code of the command line."""
    try:
        from kvjax.cli import app

        app()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except OSError as error:
        if error.filename != "standard output":
            raise
        return 0  # a failed output is said by `standard_streams.close`
    return 0


def unraisable(told: "sys.UnraisableHookArgs") -> None:
    """Let a Ctrl-C that came in a callback, such as one of garbage collection, come again: Python drops what is raised there."""
    if issubclass(told.exc_type, KeyboardInterrupt):
        import signal
        import threading

        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(told)


if __name__ == "__main__":
    main()
