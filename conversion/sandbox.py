"""Renders chat templates within limits on time and memory, and without access to Python objects.

Jinja's sandbox keeps templates from Python's internals but lets them run forever. Templates are therefore rendered in a
worker process (`template_worker`) with a memory limit, which is killed on timeout. It starts with the first template,
takes about 25 MB, and is reused. The memory limit needs Linux; on other systems only time is limited.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SECONDS = 3.0
"""Seconds that a template may take, plus one per `_PER_SECOND` bytes of input. The longest known templates take milliseconds."""

MEMORY = 256 << 20
"""Bytes of memory for the worker process, plus 32 per byte of input."""

SIZE = 1 << 20
"""Characters of output, plus 20 per byte of input."""

SOURCE = 1 << 17
"""Characters of a template's source. The longest known templates have a fifth of it."""

_PER_SECOND = 1 << 26
_START_SECONDS = 60.0
"""Seconds that the worker may take to start, even on a busy machine."""


class ExceededError(Exception):
    """A template fails, or exceeds its limits."""


class _EndedError(Exception):
    """The worker process has ended."""


class _Worker:
    """A worker process that renders templates, one at a time.

    Attributes:
        used: whether it has answered a request.
    """

    def __init__(self) -> None:
        self.used = False
        executable = multiprocessing.spawn.get_executable()
        if not executable or getattr(sys, "frozen", False):  # in a frozen program, the executable is the program itself
            raise ExceededError(
                "templates are rendered in a separate Python process, but sys.executable is not a Python interpreter; set one with "
                "multiprocessing.set_executable"
            )
        # In its own session, the worker does not receive Ctrl-C. On Windows, its own process group does the same.
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
        """Send a request and return the kind of the reply and the reply. Any exception, including an interrupt, kills the worker.

        Args:
            request: as `template_worker` expects it.
            most: maximum size of the reply, in bytes.
            seconds: time limit.

        Raises:
            TimeoutError: the worker takes longer.
            _EndedError: the worker has ended.
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
        """Whether the worker is running."""
        return self._process.poll() is None

    def close(self) -> None:
        """Kill the worker."""
        self._process.kill()
        self._close_pipes()
        self._process.wait()

    def forget(self) -> None:
        """Release the handles of a worker that belongs to the parent of this forked process."""
        self._close_pipes()
        self._process.returncode = 0  # keeps this process from waiting for it

    def _close_pipes(self) -> None:
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            with contextlib.suppress(OSError):  # unwritten data is discarded
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
        """Kill the worker if the `with` block takes longer."""
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
    """Directories from which Jinja and its dependencies are imported."""
    found = (importlib.util.find_spec(name) for name in ("jinja2", "markupsafe"))
    return list(dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in found if spec and spec.origin))


class _Renderer:
    """The worker of this process, started on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def ask(self, request: bytes, most: int, seconds: float) -> tuple[bytes, bytes]:
        """Like `_Worker.ask`. A worker that ended between two templates is restarted."""
        with self._lock:
            while True:
                if self._worker is None or not self._worker.alive():
                    self.close()
                    self._worker = _Worker()
                # If a worker that answered before ends at once, this template did not cause it.
                begun, used = time.monotonic(), self._worker.used
                try:
                    return self._worker.ask(request, most, seconds)
                except _EndedError:
                    if not used or time.monotonic() - begun > 1:
                        raise

    def close(self) -> None:
        """Kill the worker, if there is one."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def after_fork(self) -> None:
        """Give a forked process its own lock and worker."""
        if self._worker is not None:
            self._worker.forget()
        self._lock, self._worker = threading.Lock(), None


_renderer = _Renderer()
atexit.register(_renderer.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renderer.after_fork)


def render(
    template: str, values: Mapping[str, Any], now: datetime.datetime | None = None, reads: Sequence[str] = ()
) -> str:
    """Render a template.

    Args:
        template: Jinja source.
        values: variables of the template: text, numbers, lists and dictionaries.
        now: time that the template sees; None uses the clock.
        reads: variables that the template has to read.

    Returns:
        The rendered text.

    Raises:
        ExceededError: the template does not read one of `reads`, fails, or exceeds its limits on time, memory or text.
    """
    if len(template) > SOURCE:
        raise ExceededError(f"it has {len(template)} characters; at most {SOURCE} are allowed")
    size = len(marshal.dumps(dict(values)))
    most, seconds, memory = SIZE + 20 * size, SECONDS + size // _PER_SECOND, MEMORY + 32 * size
    request = {
        "template": template,
        "values": dict(values),
        "reads": list(reads),
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
