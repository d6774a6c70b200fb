"""A lock for objects that one thread uses at a time. Other threads never wait for a long use."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast


class Exclusive:
    """Tracks use of an object: by one thread for long, or by several threads for short moments. A thread may nest its uses."""

    def __init__(self) -> None:
        self._entering, self._used = threading.RLock(), threading.RLock()

    @contextlib.contextmanager
    def for_long(self) -> Iterator[bool]:
        """Acquire without waiting for long uses, but wait for short ones. Yields whether it was acquired."""
        with self._entering:
            free = self._used.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._used.release()

    @contextlib.contextmanager
    def for_a_moment(self) -> Iterator[bool]:
        """Acquire while other threads wait. Yields whether no other thread uses the object for long."""
        with self._entering, self.for_long() as free:
            yield free


Method = TypeVar("Method", bound=Callable[..., Any])


def alone(method: Method) -> Method:
    """Make a method acquire its object (`_use`) for long. `_check` raises if the object is in use."""

    @functools.wraps(method)
    def used(self: Any, *args: Any, **options: Any) -> Any:
        with self._use.for_long() as free:
            self._check(free)
            return method(self, *args, **options)

    return cast(Method, used)
