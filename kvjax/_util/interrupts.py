"""Delays Ctrl-C over short critical sections."""

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def held_back() -> Iterator[Sequence[object]]:
    """Delay Ctrl-C to the end of the `with` block. A second Ctrl-C takes effect at once.

    Python interrupts only the main thread, so the block changes nothing in other threads.

    Yields:
        A sequence that is empty until Ctrl-C arrives. A long block can read it to end early.
    """
    usual = signal.getsignal(signal.SIGINT)
    came: list[tuple[int, Any]] = []
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield came
        return

    def wait(signum: int, frame: Any) -> None:
        came.append((signum, frame))
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, wait)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:
            usual(*came[0])
