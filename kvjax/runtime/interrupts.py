"""Delays Ctrl-C over short critical sections."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Delay Ctrl-C to the end of the `with` block. A second Ctrl-C takes effect at once.

    Python interrupts only the main thread, so the block changes nothing in other threads.
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
