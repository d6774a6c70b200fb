"""Ctrl-C at a time that suits."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Ctrl-C takes effect at the block's end: for a few steps that belong together. A second one does not wait.

    In other threads than the main one, which Python never interrupts, nothing is changed.
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    came = []

    def wait(*args: object) -> None:
        came.append(args)
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:
            usual(*came[0])
