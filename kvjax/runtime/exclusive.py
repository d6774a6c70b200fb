"""What one thread at a time may use, and no other thread waits long for."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast


class Exclusive:
    """Who uses something: one thread for long, or several in turns for moments. Within one thread, uses may be nested."""

    def __init__(self) -> None:
        self._entering, self._used = threading.RLock(), threading.RLock()

    @contextlib.contextmanager
    def for_long(self) -> Iterator[bool]:
        """Use it if no other thread does; gives whether it is so. Those that use it for a moment are waited for."""
        with self._entering:
            free = self._used.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._used.release()

    @contextlib.contextmanager
    def for_a_moment(self) -> Iterator[bool]:
        """Use it while others wait; gives whether no other thread uses it for long."""
        with self._entering, self.for_long() as free:
            yield free


Method = TypeVar("Method", bound=Callable[..., Any])


def alone(method: Method) -> Method:
    """Have a method use its object, by `_use`, for long, once `_check` has not refused it."""

    @functools.wraps(method)
    def used(self: Any, *args: Any, **options: Any) -> Any:
        with self._use.for_long() as free:
            self._check(free)
            return method(self, *args, **options)

    return cast(Method, used)
