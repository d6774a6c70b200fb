"""What Ctrl-C does while libraries start up, which take an exception out of nowhere badly: JAX crashes, or goes on as if nothing were."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Ctrl-C ends the process without an exception; for blocks that have nothing to clean up.

    Nothing changes where a program that embeds the command line handles Ctrl-C itself, or runs it in another thread.
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
    """Import JAX, and with `devices` have it find its devices, which can take seconds."""
    with ending_at_once():
        import jax

        import kvjax.policies  # noqa: F401  # pyright: ignore[reportUnusedImport]

        if devices:
            jax.devices()
