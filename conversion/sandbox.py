"""Chat templates within bounds: a template that comes with a model can take neither long, nor much memory, nor Python's objects.

Jinja's own sandbox keeps templates from Python's internals but lets them compute forever. So they are rendered in a process of
their own (`template_worker`), which has a limit on its memory and is ended when it takes too long. It starts with the first
template, takes about 25 MB, and is kept for the next ones. The operating system enforces the limit on memory on Linux; elsewhere
only time is bounded.
"""

import atexit
import contextlib
import datetime
import importlib.util
import marshal
import multiprocessing.spawn
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SECONDS = 3.0
"""That a template may take, beside one for each `_PER_SECOND` bytes that it is given; the longest ones known take milliseconds."""

MEMORY = 256 << 20
"""Bytes that the process may have, beside some for each that a template is given."""

SIZE = 1 << 20
"""Characters that a template may make, beside some for each byte that it is given."""

SOURCE = 1 << 17
"""Characters of a template; the longest ones known have a fifth of it."""

_PER_SECOND = 1 << 26
_START_SECONDS = 60.0
"""That the process may take to start, on however busy a machine."""


class ExceededError(Exception):
    """A template fails, or goes beyond what it is allowed."""


class _EndedError(Exception):
    """The process is gone."""


class _Worker:
    """A process that renders templates, one at a time.

    Attributes:
        used: whether it has answered before.
    """

    def __init__(self) -> None:
        self.used = False
        executable = multiprocessing.spawn.get_executable()
        if not executable or getattr(sys, "frozen", False):  # the executable is the program itself
            raise ExceededError(
                "templates are rendered in a process of Python's own, and sys.executable names no Python; name one by "
                "multiprocessing.set_executable"
            )
        # In a session of its own, the process gets no Ctrl-C; on Windows the group does that.
        apart: dict[str, Any] = {"start_new_session": True}
        if os.name == "nt":
            apart = {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
        script = Path(__file__).with_name("template_worker.py")
        command = [os.fsdecode(executable), "-I", "-S", "-X", "utf8", str(script), *_directories()]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            self._process = subprocess.Popen(command, **pipes, **apart)
        except OSError as error:
            raise ExceededError(f"the process that renders templates cannot be started ({error})") from None
        try:
            with self._ended_after(_START_SECONDS):
                self._read(0)
        except (_EndedError, TimeoutError):
            self.close()
            raise ExceededError(f"the process that renders templates cannot be started ({' '.join(command)})") from None
        except BaseException:
            self.close()
            raise

    def ask(self, request: bytes, most: int, seconds: float) -> tuple[bytes, bytes]:
        """Send a request; the kind of the reply, and the reply. The process is ended by whatever goes wrong, an interrupt included.

        Args:
            request: as `template_worker` takes it.
            most: bytes of a reply.
            seconds: that it may take.

        Raises:
            TimeoutError: it takes longer.
            _EndedError: the process has ended.
        """
        try:
            with self._ended_after(seconds):
                assert self._process.stdin is not None
                with _ended_where(OSError):
                    self._process.stdin.write(len(request).to_bytes(8, "little") + request)
                    self._process.stdin.flush()
                reply = self._read(most)
            self.used = True
            return reply
        except BaseException:
            self.close()
            raise

    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._close_pipes()
        self._process.wait()

    def forget(self) -> None:
        """Let go of a process that belongs to the process that this one was forked from."""
        self._close_pipes()
        self._process.returncode = 0  # nothing is to wait for it here

    def _close_pipes(self) -> None:
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            with contextlib.suppress(OSError):  # what could not be written any more
                pipe.close()

    def _read(self, most: int) -> tuple[bytes, bytes]:
        stream = self._process.stdout
        assert stream is not None
        with _ended_where(OSError, ValueError):
            head = stream.read(9)
            size = int.from_bytes(head[1:], "little")
            body = stream.read(size) if len(head) == 9 and size <= most else b""
        if len(head) < 9 or len(body) < size:
            raise _EndedError
        return head[:1], body

    @contextlib.contextmanager
    def _ended_after(self, seconds: float) -> Iterator[None]:
        """End the process if what is within takes longer."""
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except _EndedError:
            if late.is_set():
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()


@contextlib.contextmanager
def _ended_where(*errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors:
        raise _EndedError from None


def _directories() -> list[str]:
    """Where Jinja, and what it needs besides the standard library, is imported from."""
    found = (importlib.util.find_spec(name) for name in ("jinja2", "markupsafe"))
    return list(dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in found if spec and spec.origin))


class _Renderer:
    """The one worker of this process, started when it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def ask(self, request: bytes, most: int, seconds: float) -> tuple[bytes, bytes]:
        """As `_Worker.ask`. What has ended between two templates, whoever ended it, is started again."""
        with self._lock:
            while True:
                if self._worker is None or not self._worker.alive():
                    self.close()
                    self._worker = _Worker()
                # A process that has answered before, and is gone at once, has not died of this template.
                begun, used = time.monotonic(), self._worker.used
                try:
                    return self._worker.ask(request, most, seconds)
                except _EndedError:
                    if not used or time.monotonic() - begun > 1:
                        raise

    def close(self) -> None:
        """End the worker, if there is one."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def after_fork(self) -> None:
        """In a process that was forked, which gets a worker of its own."""
        if self._worker is not None:
            self._worker.forget()
        self._lock, self._worker = threading.Lock(), None


_renderer = _Renderer()
atexit.register(_renderer.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renderer.after_fork)


def render(template: str, values: Mapping[str, Any], now: datetime.datetime | None = None) -> str:
    """What a template makes of some values.

    Args:
        template: Jinja source.
        values: what it may refer to: text, numbers, lists and dictionaries.
        now: the time that it sees; by default that of the clock.

    Raises:
        ExceededError: it fails, takes too much time or memory, or makes too much text.
    """
    if len(template) > SOURCE:
        raise ExceededError(f"it has {len(template)} characters; at most {SOURCE} are allowed")
    size = len(marshal.dumps(dict(values)))
    most, seconds, memory = SIZE + 20 * size, SECONDS + size // _PER_SECOND, MEMORY + 32 * size
    request = {
        "template": template,
        "values": dict(values),
        "now": None if now is None else now.isoformat(),
        "most": most,
        "seconds": seconds,
        "memory": memory,
    }
    try:
        kind, reply = _renderer.ask(marshal.dumps(request), 4 * most, seconds)
    except TimeoutError:
        raise ExceededError(f"it takes more than {seconds:g} seconds") from None
    except _EndedError:
        raise ExceededError("it ends the process that renders it, for lack of memory or by a fault") from None
    if kind == b"t":
        return reply.decode()
    raise ExceededError(f"it takes more than {memory >> 20} MiB of memory" if kind == b"m" else reply.decode())
