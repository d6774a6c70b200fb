"""`python -m kvjax` is the `kvjax` command."""

import os
import signal
import sys
import threading
from typing import Any


def main() -> None:
    """Run the command line; the entry point of the `kvjax` script."""
    sys.unraisablehook = unraisable
    try:
        from kvjax.cli import app

        app()
    except KeyboardInterrupt:  # so early that no command has begun
        sys.exit(130)


def unraisable(told: Any) -> None:
    """Let a Ctrl-C that came in a callback, such as one of garbage collection, come again: Python drops what is raised there."""
    if issubclass(told.exc_type, KeyboardInterrupt):
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(told)


if __name__ == "__main__":
    main()
