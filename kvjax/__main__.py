"""Entry point of the `kvjax` command and of `python -m kvjax`."""

import atexit
import os
import sys

# All other imports are within `main`, so that Ctrl-C during them shows no traceback.


def main() -> None:
    """Run the command line. Entry point of the `kvjax` script."""
    code = 0

    def end_at_once() -> None:
        # XLA's threads may still run what Ctrl-C interrupted. They crash when Python unloads XLA, so it does not.
        if code == 130:
            import contextlib

            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed or full
                    stream.flush()
            os._exit(code)

    atexit.register(end_at_once)  # before all others, so it runs after them
    try:
        from kvjax._util import standard_streams

        standard_streams.in_utf8()
        sys.unraisablehook = unraisable
        output = standard_streams.guard()
        code = standard_streams.close(output, run())
    except KeyboardInterrupt:
        code = 130
    # Only Python's own shutdown is left, which handles exceptions badly.
    import signal

    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    sys.exit(code)


def run() -> int:
    """Run the command line and return its exit code."""
    try:
        from kvjax.cli import app

        app()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except OSError as error:
        if error.filename != "standard output":
            raise
        return 0  # `standard_streams.close` reports a failed output
    return 0


def unraisable(told: "sys.UnraisableHookArgs") -> None:
    """Raise a Ctrl-C again that arrived in a callback, such as one of garbage collection. Python drops exceptions there."""
    if issubclass(told.exc_type, KeyboardInterrupt):
        import signal
        import threading

        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(told)


if __name__ == "__main__":
    main()
