"""The thread that drives a running batch. It alone uses the devices."""

import dataclasses
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

from kvjax.runtime.batch import Batch, Job
from kvjax.runtime.many import JOBS
from kvjax.runtime.scheduler import Ended, Scheduler, Ticket, Tops

log = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Calls in a row that may fail before the thread gives up."""

Phase = Literal["starting", "ready", "failed", "stopped"]


class Update(NamedTuple):
    """New tokens of a sequence.

    Attributes:
        owner: what was passed to `Worker.submit`.
        tokens, logprobs: the new tokens and their log-probabilities.
        tops: the most likely tokens in place of each of them, if they were asked for.
        ended: why the sequence has ended; None if it goes on.
        error: the error, if it failed.
        reused: number of prompt tokens whose state was stored.
    """

    owner: Any
    tokens: list[int]
    logprobs: list[float]
    ended: Ended | None
    error: Exception | None
    reused: int = 0
    tops: Sequence[Tops] = ()


@dataclasses.dataclass(eq=False)
class _Sequence:
    """A submitted sequence.

    Attributes:
        owner: what was passed to `Worker.submit`.
        sent: number of tokens that were passed on.
    """

    owner: Any
    sent: int = 0


class Worker:
    """Runs jobs in a batch, in a thread of its own.

    Args:
        batch: the batch. Only the thread uses it after `start`.
        steps: decode steps of a call. Tokens arrive, and cancelled rows become free, between calls.
        on_updates: called in the thread with the updates of each call.

    Attributes:
        phase: "starting" while programs are compiled, then "ready". "failed" after repeated errors.
        error: the error, if the thread has failed.
        scheduler: decides which jobs run. Other threads may read its numbers.
        turn_began: when the current call began, as `time.monotonic`; None between calls.
    """

    def __init__(self, batch: Batch, *, steps: int, on_updates: Callable[[list[Update]], None]) -> None:
        self.batch, self.scheduler = batch, Scheduler(batch, steps=steps)
        self.phase: Phase = "starting"
        self.error: Exception | None = None
        self.turn_began: float | None = None
        self._on_updates = on_updates
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = self._over = False
        self._sequences: dict[Ticket, _Sequence] = {}
        self._tickets: dict[Any, Ticket] = {}
        self._thread = threading.Thread(target=self._run, name="kvjax-serve", daemon=True)

    def start(self) -> None:
        """Compile all programs, and begin to run jobs."""
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """End the thread, with whatever runs, and free the rows. Waits for it."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def submit(self, jobs: Sequence[Job], owners: Sequence[Any]) -> None:
        """Add jobs with the same prompt. Updates of each carry its owner, which is hashable and unique."""
        if not self._put(lambda: self._submit(jobs, owners)):
            self._on_updates([Update(owner, [], [], "cancelled", None) for owner in owners])

    def cancel(self, owners: Collection[Any]) -> None:
        """End the jobs of these owners. No update follows for them, once the thread knows."""
        self._put(lambda: self._cancel(owners))

    def _put(self, command: Callable[[], None]) -> bool:
        """Let the thread call a function. False if the thread has ended."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()
            return not self._over

    def _submit(self, jobs: Sequence[Job], owners: Sequence[Any]) -> None:
        for ticket, owner in zip(self.scheduler.submit_samples(jobs), owners, strict=True):
            self._sequences[ticket] = _Sequence(owner)
            self._tickets[owner] = ticket

    def _cancel(self, owners: Collection[Any]) -> None:
        for owner in owners:
            ticket = self._tickets.pop(owner, None)
            if ticket is not None:
                del self._sequences[ticket]
                self.scheduler.cancel(ticket)

    def _run(self) -> None:
        try:
            self._prepare()
            self.phase = "ready"
            self._loop()
            self.phase = "stopped"
            self._end_all("cancelled", None)
        except Exception as error:
            log.exception("the server cannot continue")
            self.error, self.phase = error, "failed"
            self._end_all("failed", error)
        finally:
            self.turn_began = None
            self.batch.free()

    def _prepare(self) -> None:
        """Compile all programs, and run each once, so that nothing is compiled later."""
        longest = self.batch.reader[0].prompt_len
        lengths = [min(size, longest) for size in self.batch.read_sizes]
        self.batch.compile(lengths, min(os.cpu_count() or 1, JOBS))
        # With stored states, the third prompt with the same blocks goes on from a state that the second has left.
        for length in [longest] * 3 if self.batch.engine.block else lengths:
            job = Job([0] * length, min(2, self.batch.specs[0].new_tokens), share="")
            ticket = self.scheduler.submit(job)
            while self.scheduler.busy:
                self.scheduler.turn()
            if ticket.error is not None:
                raise ticket.error
        self.batch.release(0)
        self.batch.prefixes.clear()
        if self.batch.masked:
            self.batch.restrict({})
            self.batch.serve(1)

    def _loop(self) -> None:
        failures = 0
        while True:
            with self._wake:
                while not (self._commands or self.scheduler.busy or self._stopping):
                    self._wake.wait()
                commands, stopping = list(self._commands), self._stopping
                self._commands.clear()
            if stopping:
                return
            for command in commands:
                command()
            self.turn_began = time.monotonic()
            changed = self.scheduler.turn()
            self.turn_began = None
            if (error := self.scheduler.lost) is None:
                failures = 0 if changed else failures
            else:
                failures += 1
                log.error("a call failed; all running sequences are lost", exc_info=error)
                if failures == MOST_FAILURES:
                    raise error
            self._tell(changed)

    def _end_all(self, ended: Ended, error: Exception | None) -> None:
        with self._wake:
            self._over, commands = True, list(self._commands)
        for command in commands:
            command()
        self._on_updates([Update(each.owner, [], [], ended, error) for each in self._sequences.values()])

    def _tell(self, changed: Sequence[Ticket]) -> None:
        updates: list[Update] = []
        for ticket in changed:
            if (each := self._sequences.get(ticket)) is None:
                continue
            new = slice(each.sent, len(ticket.tokens))
            each.sent = new.stop
            found = ticket.tokens[new], ticket.logprobs[new]
            updates.append(Update(each.owner, *found, ticket.ended, ticket.error, ticket.reused, ticket.tops[new]))
            if ticket.ended is not None:
                del self._sequences[ticket], self._tickets[each.owner]
        if updates:
            self._on_updates(updates)
