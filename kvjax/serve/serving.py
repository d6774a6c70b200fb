"""Requests that run: admitted within limits, passed to the worker, and followed until they end."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from kvjax.conversion.tokenizer import Tokenizer
from kvjax.models import Params
from kvjax.runtime.batch import Batch, Begun
from kvjax.runtime.kept_share import KeptPositions
from kvjax.runtime.row import Row
from kvjax.runtime.sampling import make_sampler
from kvjax.runtime.scheduler import Tops

from .errors import APIError, overloaded
from .metrics import Metrics
from .preparing import Preparer, Prompt
from .sessions import Sessions
from .settings import Settings
from .worker import Update, Worker

PREPARING = 2
"""Threads that tokenise prompts."""


class Server:
    """A model that answers requests. It belongs to the event loop that `start` is called in.

    Args:
        params: the model.
        batch: the running batch. The server frees it.
        settings: limits.
        steps: decode steps of a call.
        sessions: where conversations are saved; None if they are not.
    """

    def __init__(
        self, params: Params, batch: Batch, settings: Settings, *, steps: int = 8, sessions: Sessions | None = None
    ) -> None:
        self.settings, self.batch, self.sessions = settings, batch, sessions
        self.preparer = Preparer(params, batch, settings)
        self.worker = Worker(
            batch, steps=steps, on_updates=self._on_updates, watching=settings.reports, saving=sessions is not None
        )
        self.metrics = Metrics(settings.name, self)
        self.draining = False
        self._admitted = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._threads = ThreadPoolExecutor(PREPARING, "kvjax-prepare")
        self.began = int(time.time())

    @property
    def most(self) -> int:
        """Maximum number of sequences that run or wait."""
        return self.batch.rows + self.settings.max_queue

    @property
    def admitted(self) -> int:
        """Number of sequences that run or wait, with those whose prompts are tokenised."""
        return self._admitted

    def start(self) -> None:
        """Start the worker, which compiles all programs first."""
        self._loop = asyncio.get_running_loop()
        self._threads.submit(make_sampler, 1.0, 1, 1.0, 1.0)  # compiles the programs that make its numbers
        if self.batch.masked:
            self._threads.submit(lambda: self.preparer.grammars)
        self.worker.start()

    async def drain(self) -> None:
        """Refuse new requests, wait for the running ones up to `drain_seconds`, and stop."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self.settings.drain_seconds)
        await asyncio.to_thread(self.worker.stop)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def unhealthy(self) -> str | None:
        """Why nothing moves; None if all is well."""
        if self.worker.phase in ("failed", "stopped"):
            return f"the worker has {self.worker.phase}"
        began = self.worker.turn_began
        if began is not None and time.monotonic() - began > self.settings.stuck_seconds:
            return f"a call has taken more than {self.settings.stuck_seconds:g} seconds"
        return None

    def admit(self, count: int) -> "Admission":
        """Reserve room for `count` sequences.

        Raises:
            APIError: the server is not ready, ends, or has no room.
        """
        if self.draining:
            raise overloaded("the server is shutting down", 10)
        if self.worker.phase != "ready":
            raise overloaded(f"the server is not ready: {self.worker.phase}", 10)
        if self._admitted + count > self.most:
            self.metrics.rejected.inc()
            raise overloaded(f"{self._admitted} sequences run or wait, of at most {self.most}; try again later")
        return Admission(self, count)

    async def prepare(self, function: Any, *args: Any) -> Any:
        """Call a function in a thread that tokenises."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def _change(self, count: int) -> None:
        self._admitted += count
        if self._admitted:
            self._idle.clear()
        else:
            self._idle.set()

    def _on_updates(self, updates: list[Update]) -> None:
        """Called by the worker's thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(_hand_out, updates)


def _hand_out(updates: list[Update]) -> None:
    for update in updates:
        update.owner.arrived(update)


class Admission:
    """Room for some sequences, from before their prompts are tokenised until they have ended. A context manager."""

    def __init__(self, server: Server, count: int) -> None:
        self._server, self.count, self.began = server, count, time.monotonic()

    def __enter__(self) -> "Admission":
        """Take the room."""
        self._server._change(self.count)
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self._server._change(-self.count)


class NewToken(NamedTuple):
    """A token of an answer: its id and log-probability, and the most likely tokens in its place, as many as were asked for."""

    id: int
    logprob: float
    tops: Tops


class Choice:
    """One sequence of a request.

    Attributes:
        row: its tokens, and its text as it grows.
        finished: whether it has ended, for the worker or at a stop string.
        parsing, parser: parse its text.
        reused: number of its prompt's tokens whose state was stored.
        kept: which tokens it keeps, if it is watched.
        cache: its cache at the end, if the conversation is saved.
        first, last: times of its first and last tokens, as `time.monotonic`.
        begun_with: number of tokens that came with the first.
    """

    def __init__(self, running: "Running", prompt: Prompt, index: int, tokenizer: Tokenizer | None) -> None:
        request = prompt.requests[index]
        self.row = Row(prompt.ids, (), tokenizer, request)
        if tokenizer is not None:
            self.row.watch()
        self.finished = False
        self.parsing, self.parser = prompt.parsing, prompt.parsing.parser()
        self.first: float | None = None
        self.last, self.begun_with = 0.0, 0
        self.reused = 0
        self.kept: KeptPositions | None = None
        self.cache: Begun | None = None
        self._saved = prompt.saved
        self._running = running
        self._new: list[NewToken] = []

    def arrived(self, update: Update) -> None:
        """Take an update of the worker."""
        self._running.arrived(self, update)

    def extend(self, update: Update) -> None:
        """Add new tokens, up to the end of the text."""
        row, before, self.reused = self.row, len(self.row.tokens), update.reused
        self.kept = update.kept or self.kept
        row.extend(update.tokens, update.logprobs)
        new, logprobs = row.tokens[before:], row.logprobs[before:]
        tops = update.tops[: len(new)] if update.tops else [[]] * len(new)
        self._new += map(NewToken, new, logprobs, tops)
        if update.ended is not None and row.stop_reason is None:
            row.stop_reason = "length"
        self.cache = update.cache
        # A cache arrives with the end.
        self.finished = row.stop_reason is not None and (not self._saved or update.ended is not None)

    @property
    def ms_per_token(self) -> float | None:
        """Mean time between two tokens in milliseconds; None before there are enough."""
        more = len(self.row.tokens) - self.begun_with
        return None if self.first is None or more < 1 else 1000 * (self.last - self.first) / more

    def take(self) -> tuple[str, list[NewToken]]:
        """Text that is certain since the last call, and the tokens that it came with.

        Tokens wait for their text.
        """
        growing = self.row.growing
        text = "" if growing is None else growing.take()
        if self.finished and growing is not None:
            text += growing.rest()
        if not text and not self.finished and growing is not None:
            return "", []
        new, self._new = self._new, []
        return text, new


class Running:
    """A request that runs. Iterate over it for the choices that have changed; leave it by `close`.

    Args:
        server: the server.
        prompts: the prompts, whose sequences are numbered one after another.
        began: when the request began, as `time.monotonic`.

    Attributes:
        session: what is told of the saved conversation, if it is saved.
    """

    def __init__(self, server: Server, prompts: Sequence[Prompt], began: float) -> None:
        self._server, self._began = server, began
        tokenizer = server.preparer.tokenizer
        self.prompts = prompts
        self.session: dict[str, Any] | None = None
        self.choices: list[Choice] = []
        self._changed: asyncio.Queue[tuple[Choice, Update]] = asyncio.Queue()
        for prompt in prompts:
            new = [Choice(self, prompt, i, tokenizer) for i in range(len(prompt.requests))]
            self.choices += new
            server.worker.submit(prompt.jobs, new, watched=prompt.texts is not None, saved=prompt.saved)

    def arrived(self, choice: Choice, update: Update) -> None:
        """Queue an update. A choice has no more of them than tokens, so the queue is bounded."""
        self._changed.put_nowait((choice, update))

    async def __aiter__(self) -> AsyncIterator[list[int]]:
        """Yield the numbers of choices that have new tokens, until all have ended.

        Raises:
            APIError: the request takes too long, or the server fails.
        """
        settings, metrics = self._server.settings, self._server.metrics
        numbers = {choice: i for i, choice in enumerate(self.choices)}
        waiting = set(self.choices)
        while not all(choice.finished for choice in self.choices):
            limit = settings.first_seconds if waiting else settings.request_seconds
            left = self._began + limit - time.monotonic()
            try:
                async with asyncio.timeout(max(left, 0)):
                    changed = [await self._changed.get()]
            except TimeoutError:
                what = "begun" if waiting else "ended"
                raise overloaded(f"the request has not {what} after {limit:g} seconds", 10) from None
            while not self._changed.empty():
                changed.append(self._changed.get_nowait())
            now, found = time.monotonic(), set[int]()
            for choice, update in changed:
                if choice.finished:
                    continue
                if isinstance(update.error, APIError):  # of the request's own grammar
                    raise update.error
                if update.error is not None:
                    raise APIError(500, "the server failed; see its log", "server_error") from update.error
                if update.ended == "cancelled":  # no request of ours has asked for it
                    raise overloaded("the server has shut down", 10)
                choice.extend(update)
                choice.last = now
                waiting.discard(choice)
                if choice.first is None:
                    choice.first, choice.begun_with = now, len(choice.row.tokens)
                    metrics.reused.inc(choice.reused)
                    metrics.first_token.observe(now - self._began)
                metrics.generated.inc(len(update.tokens))
                if choice.finished:
                    metrics.finished.labels(choice.row.stop_reason).inc()
                    metrics.ended.observe(now - self._began)
                    if update.ended is None:
                        self._server.worker.cancel([choice])
                found.add(numbers[choice])
            if found:
                yield sorted(found)

    def close(self) -> None:
        """End the choices that still run."""
        left = [choice for choice in self.choices if not choice.finished]
        if left:
            self._server.worker.cancel(left)
