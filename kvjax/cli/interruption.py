"""Handles Ctrl-C while libraries start up. JAX may crash on an exception there, or ignore it."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Make Ctrl-C end the process without an exception, in blocks that have nothing to clean up.

    Does nothing if a program that embeds the command line handles Ctrl-C itself, or runs it in another thread.
    """
    try:
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            raise ValueError
        before: Any = signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def start_jax(devices: bool = False) -> None:
    """Import JAX, which takes seconds. With `devices`, also initialise its devices."""
    with ending_at_once():
        import jax

        import kvjax.policies  # noqa: F401  # pyright: ignore[reportUnusedImport]

        if devices:
            jax.devices()
