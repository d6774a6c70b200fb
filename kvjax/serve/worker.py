"""The thread that drives a running batch. It alone uses the devices."""

import dataclasses
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from kvjax.runtime.batch import Batch, Begun, Job
from kvjax.runtime.kept_share import KeptPositions
from kvjax.runtime.many import JOBS
from kvjax.runtime.scheduler import Ended, Scheduler, Ticket, Tops

log = logging.getLogger(__name__)

READ_TOKENS = 8_192
"""Tokens of prompts to read between two decode calls. Then other prompts wait, so that streams do not pause for long."""

LOOK_SECONDS = 0.5
"""Time between two reports of the tokens that a sequence keeps."""

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
        kept: which tokens the sequence keeps, if it is watched and this is known anew.
        cache: the sequence's cache, if it is to be saved and the sequence has ended well.
    """

    owner: Any
    tokens: list[int]
    logprobs: list[float]
    ended: Ended | None
    error: Exception | None
    reused: int = 0
    tops: Sequence[Tops] = ()
    kept: KeptPositions | None = None
    cache: Begun | None = None


@dataclasses.dataclass(eq=False)
class _Sequence:
    """A submitted sequence.

    Attributes:
        owner: what was passed to `Worker.submit`.
        watched: whether updates say which tokens it keeps.
        saved: whether its cache is passed on at the end.
        sent: number of tokens that were passed on.
        kept: which tokens it keeps, on the way to the host.
        looked: when that was asked for, as `time.monotonic`.
        cache: its cache, once it has ended.
    """

    owner: Any
    watched: bool = False
    saved: bool = False
    sent: int = 0
    kept: KeptPositions | None = None
    looked: float = float("-inf")
    cache: Begun | None = None


class Worker:
    """Runs jobs in a batch, in a thread of its own.

    Args:
        batch: the batch. Only the thread uses it after `start`.
        steps: decode steps of a call. Tokens arrive, and cancelled rows become free, between calls.
        watching: whether sequences may be watched.
        saving: whether caches may be saved.
        on_updates: called in the thread with the updates of each call.

    Attributes:
        phase: "starting" while programs are compiled, then "ready". "failed" after repeated errors.
        error: the error, if the thread has failed.
        scheduler: decides which jobs run. Other threads may read its numbers.
        turn_began: when the current call began, as `time.monotonic`; None between calls.
    """

    def __init__(
        self,
        batch: Batch,
        *,
        steps: int,
        on_updates: Callable[[list[Update]], None],
        watching: bool = False,
        saving: bool = False,
    ) -> None:
        self.batch, self.scheduler = batch, Scheduler(batch, steps=steps, read_tokens=READ_TOKENS, on_end=self._on_end)
        self._watching, self._saving = watching, saving
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

    def submit(self, jobs: Sequence[Job], owners: Sequence[Any], *, watched: bool = False, saved: bool = False) -> None:
        """Add jobs with the same prompt.

        Args:
            jobs: the jobs.
            owners: what the updates of each carry, hashable and unique.
            watched: whether the updates say now and then, and at the end, which tokens are kept.
            saved: whether the last update has the cache.
        """
        if not self._put(lambda: self._submit(jobs, owners, watched, saved)):
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

    def _submit(self, jobs: Sequence[Job], owners: Sequence[Any], watched: bool, saved: bool) -> None:
        for ticket, owner in zip(self.scheduler.submit_samples(jobs), owners, strict=True):
            self._sequences[ticket] = _Sequence(owner, watched and self._watching, saved)
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
        self.batch.compile(lengths, min(os.cpu_count() or 1, JOBS), samples=True)
        # With stored states, the third prompt with the same blocks continues from a state that the second has left. Of whole
        # prompts, the first runs again, since the arrays of an empty batch may be on another device than all later ones.
        for length in [longest] * 3 if self.batch.engine.block else [*lengths, lengths[0]]:
            job = Job([0] * length, min(2, self.batch.specs[0].new_tokens), share="")
            tickets = self.scheduler.submit_samples([job, job])
            while self.scheduler.busy:
                self.scheduler.turn()
            for ticket in tickets:
                if ticket.error is not None:
                    raise ticket.error
        if self._watching:
            self.batch.kept_positions(0)
        if self._saving:
            self.batch.copy_row(0)
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
            self._look()

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
            kept, each.kept = each.kept, None
            if kept is not None:
                kept = None if self.scheduler.lost else KeptPositions(*map(np.asarray, kept))
            more = {"reused": ticket.reused, "tops": ticket.tops[new], "kept": kept, "cache": each.cache}
            updates.append(Update(each.owner, *found, ticket.ended, ticket.error, **more))
            if ticket.ended is not None:
                del self._sequences[ticket], self._tickets[each.owner]
        if updates:
            self._on_updates(updates)

    def _look(self) -> None:
        """Ask which tokens watched sequences keep. The next turn's results come after those of the call that they are of."""
        now = time.monotonic()
        for ticket, each in self._sequences.items():
            if not each.watched or now - each.looked < LOOK_SECONDS:
                continue
            if (row := self.scheduler.row_of(ticket)) is not None:
                each.kept, each.looked = self.batch.kept_positions(row), now

    def _on_end(self, batch: Any, ticket: Ticket, row: int) -> None:
        """Ask it once more of a sequence that has ended, and copy its cache if it is to be saved."""
        each = self._sequences.get(ticket)
        if each is not None and each.watched:
            each.kept = batch.kept_positions(row)
        if each is not None and each.saved and ticket.ended in ("eos", "length", "stop"):
            caches, tokens, _ = batch.copy_row(row)
            each.cache = Begun(caches, tokens)
