"""Scheduling of many prompts through one running batch, in plain Python without threads or clocks.

    scheduler = Scheduler(batch)
    tickets = [scheduler.submit(job) for job in jobs]
    while scheduler.busy:
        for ticket in scheduler.turn():
            ...  # has new tokens, or has ended

A turn fills free rows with waiting prompts, dispatches a call that decodes all rows, and takes the results of the call
before. So the device always has work while the host reads tokens. If many prompts wait, rows are filled a group at a time.

While a row has a grammar, a call is one step. A row with a grammar is held while its latest token is on the way to the host,
so it takes part in every second call. If most rows have grammars, no row is held. The host then takes the results of each
call before it dispatches the next. It does the same while a job has a `stop`.
"""

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

AHEAD = 256
"""Waiting prompts among which others are looked for that are read together with the next one."""

PATIENCE = 2
"""Calls that free rows wait for a group of them to become free."""

Ended = Literal["eos", "length", "stop", "cancelled", "failed"]


class Job(Protocol):
    """What the scheduler reads of a job, see `kvjax.runtime.batch.Job`."""

    @property
    def max_new_tokens(self) -> int: ...
    @property
    def given(self) -> Any: ...
    @property
    def ends(self) -> Any: ...
    @property
    def grammar(self) -> Any: ...
    @property
    def tops(self) -> int: ...
    @property
    def stop(self) -> Any: ...


class Runner(Protocol):
    """What the scheduler drives, see `kvjax.runtime.batch.Batch`."""

    @property
    def rows(self) -> int: ...
    @property
    def admits(self) -> bool: ...
    @property
    def group(self) -> int: ...
    @property
    def reused(self) -> int: ...
    def together(self, job: Any) -> tuple[int, int]: ...
    def admit(self, jobs: Any, rows: Any, allowed: Any = ()) -> Any: ...
    def again(self, row: int, index: int = 0) -> Any: ...
    def reading(self, job: Any) -> Iterator[Any]: ...
    def insert(self, reading: Any, job: Any, row: int, allowed: Any = None) -> Any: ...
    def allowed(self, job: Any, tokens: Any) -> Any: ...
    def restrict(self, allowed: Any) -> None: ...
    def serve(self, count: int, stop: Any = (), *, hold: Any = (), leave: int = 0) -> Any: ...
    def release(self, row: int) -> None: ...
    def reset(self) -> None: ...


Tops = list[tuple[int, float]]
"""Token ids with log-probabilities, the most likely first."""


@dataclasses.dataclass(eq=False)
class Ticket:
    """A submitted job and what has come of it.

    Attributes:
        job: the job.
        tokens, logprobs: sampled tokens so far, and their log-probabilities.
        tops: for each of them, ids and log-probabilities of as many most likely tokens as the job asks for.
        ended: why the sequence ended; None while it waits or runs.
        stopped: whether the job's `stop` has ended it. Its row then ends before the next step.
        error: the error, if it failed.
        allowed: number of tokens that its grammar was last called with, and the bits that it returned. None before the first
            call, and after the end.
        reused: number of prompt tokens whose state was stored, see `kvjax.runtime.prefixes`.
    """

    job: Any
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    tops: list[Tops] = dataclasses.field(default_factory=list)
    ended: Ended | None = None
    stopped: bool = False
    error: Exception | None = None
    allowed: tuple[int, Any] | None = dataclasses.field(default=None, repr=False)
    reused: int = 0

    @property
    def complete(self) -> bool:
        """Whether no token will be added: the sequence has ended, or its last token ends it."""
        last = self.tokens[-1:]
        return (
            self.ended is not None
            or self.stopped
            or len(self.tokens) >= self.job.max_new_tokens
            or bool(last and last[0] in self.job.ends)
        )


class _Started(NamedTuple):
    """An inserted row whose first token is on its way, among those of rows that were inserted together."""

    ticket: Ticket
    first: Any
    at: int = 0


class _Served(NamedTuple):
    """A call whose tokens are on their way.

    Attributes:
        owners: whose each row was when the call was dispatched.
        call: its results.
        leave: number of rows whose end ends the call; 0 if none does.
        hold: rows that take no part in the call.
    """

    owners: dict[int, Ticket]
    call: Any
    leave: int
    hold: Collection[int]


OnEnd = Callable[[Any, Ticket, int], None]
"""What a scheduler calls when a row has ended."""


class Scheduler:
    """Runs jobs in the rows of a batch, first come, first served.

    Args:
        batch: runs prompts and rows, and never waits for the device.
        steps: decode steps of a call.
        block_calls: blocks of a prompt that are read between two calls that decode, while rows are live.
        read_tokens: number of tokens, with padding, that are read between two calls while rows are live. Once it is reached,
            no other prompt is begun before the next call. By default there is no limit.
        queue: jobs that wait, if several schedulers share them, see `Schedulers`.
        on_end: called with the batch, a job's ticket and its row when the row has ended, before it is given away.

    Attributes:
        most_rows: number of rows to fill.
        sharing: number of schedulers that take jobs from the queue.
        row_steps: number of rows times steps so far.
        delivered: how many of them sampled a token.
        lost: the error of the last turn, if it ended all running jobs; None if it did not.
    """

    def __init__(
        self,
        batch: Runner,
        *,
        steps: int = 16,
        block_calls: int = 1,
        read_tokens: float = math.inf,
        queue: deque[list[Ticket]] | None = None,
        on_end: OnEnd | None = None,
    ) -> None:
        self.batch, self.steps, self.block_calls, self.on_end = batch, steps, block_calls, on_end
        self.read_tokens = read_tokens
        self.most_rows, self.sharing = batch.rows, 1
        self._waited = 0  # calls that free rows have waited for others
        self._waiting: deque[list[Ticket]] = deque() if queue is None else queue
        self._free = list(range(batch.rows))[::-1]
        self._owners: dict[int, Ticket] = {}
        self._reading: tuple[list[Ticket], Iterator[Any], int] | None = None  # with the tokens of a block
        self._read_now = 0  # tokens that were read in this turn
        self._ready: deque[tuple[list[Ticket], Any]] = deque()
        self._under_way: deque[_Started | _Served] = deque()
        self._stopped: set[int] = set()
        self._ended: set[int] = set()
        self.row_steps = self.delivered = 0
        self.lost: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether a submitted job has not ended."""
        return bool(self._waiting or self._owners or self._reading or self._ready or self._under_way)

    @property
    def waiting(self) -> int:
        """Number of jobs that have not been inserted into a row."""
        return sum(map(len, self._waiting)) + self.begun

    @property
    def begun(self) -> int:
        """Number of jobs whose prompt is being read, or that wait for a row with it."""
        reading = [] if self._reading is None else self._reading[0]
        return len(reading) + sum(len(tickets) for tickets, _ in self._ready)

    @property
    def running(self) -> int:
        """Number of rows that are taken."""
        return len(self._owners)

    def row_of(self, ticket: Ticket) -> int | None:
        """The row that a job runs in. Until the next turn nobody else gets it."""
        return next((row for row, owner in self._owners.items() if owner is ticket), None)

    def submit(self, job: Any) -> Ticket:
        """Add a job to the queue."""
        return self.submit_samples([job])[0]

    def submit_samples(self, jobs: Sequence[Any]) -> list[Ticket]:
        """Add jobs with the same prompt, which is read once. They differ in their seeds, for example."""
        tickets = [Ticket(job) for job in jobs]
        if tickets:
            self._waiting.append(list(tickets))
        return tickets

    def cancel(self, ticket: Ticket) -> None:
        """End a job, whether it waits or runs. What it has sampled so far remains."""
        if ticket.ended is None:
            ticket.ended = "cancelled"
            for group in [group for group in self._waiting if ticket in group]:
                group.remove(ticket)
                if not group:
                    self._waiting.remove(group)

    def turn(self) -> list[Ticket]:
        """Fill free rows, dispatch the next call, and take the results of the call before.

        Returns:
            Jobs with new tokens, or that have ended.
        """
        self.lost = None
        try:
            self._fill()
            self._release()
            jobs = [ticket.job for ticket in self._owners.values()]
            grammars = sum(job.grammar is not None for job in jobs)
            if any(job.stop is not None for job in jobs) or 2 * grammars > len(jobs):
                return self._turn_and_wait()
            if grammars:
                return self._turn_with_grammars()
            return self._take(keep_last=self._dispatch(self.steps))
        except Exception as error:
            self.lost = error
            return self._fail(error)

    def _turn_with_grammars(self) -> list[Ticket]:
        """Dispatch a single step, and take the results of the call before.

        Rows with a grammar are held while their latest token is on the way.
        """
        unknown = {each.ticket for each in self._under_way if isinstance(each, _Started)}
        for each in self._under_way:
            if isinstance(each, _Served):
                unknown.update(ticket for row, ticket in each.owners.items() if row not in each.hold)
        hold = {row for row, each in self._owners.items() if each.job.grammar is not None and each in unknown}
        self._restrict(hold)
        return self._take(keep_last=self._dispatch(1, hold))

    def _turn_and_wait(self) -> list[Ticket]:
        """Take all results, dispatch a single step, and take its results too.

        For batches in which a job has a `stop`, or most rows have grammars.
        """
        changed = self._take(keep_last=False)
        self._restrict()
        self._dispatch(1)
        return _once([*changed, *self._take(keep_last=False)])

    def _restrict(self, hold: Collection[int] = ()) -> None:
        """Tell the batch what the grammars of all rows but those in `hold` allow."""
        allowed: dict[int, Any] = {}
        for row, ticket in self._owners.items():
            if ticket.job.grammar is not None and row not in hold and not ticket.complete:
                bits = self._allowed(ticket)
                if bits is not None:
                    allowed[row] = bits
        if allowed:
            self.batch.restrict(allowed)

    def _allowed(self, ticket: Ticket) -> Any:
        """The tokens that a job's grammar allows now; None if it fails, which ends this job alone."""
        seen = len(ticket.tokens)
        if ticket.allowed is None or ticket.allowed[0] != seen:  # given tokens do not change the number
            try:
                ticket.allowed = seen, self.batch.allowed(ticket.job, ticket.tokens)
            except Exception as error:
                ticket.ended, ticket.error = "failed", error
                return None
        return ticket.allowed[1]

    def _fill(self) -> None:
        """Read waiting prompts, and insert them into free rows."""
        blocks = self._read_now = 0
        begins = not self._owners or self._room >= self._enough or self._waited >= PATIENCE
        self._waited = 0 if begins or not self._room else self._waited + 1
        while self._room and (self._reading or self._waiting or self._ready):
            if not self._ready and not self._read(blocks, begins):
                return
            blocks += 1
            if self._ready:
                self._insert(*self._ready[0])

    def _insert(self, tickets: list[Ticket], reading: Any) -> None:
        """Insert what was read into free rows, once for each job that asked for it."""
        while tickets and self._room:
            ticket = tickets.pop(0)
            if not tickets:  # before anything fails
                self._ready.popleft()
            if ticket.ended is not None:
                continue
            allowed = None if ticket.job.grammar is None else self._allowed(ticket)
            if ticket.ended is not None:
                self._under_way.append(_Started(ticket, None))
                continue
            (row,) = self._given([ticket])
            first = self.batch.insert(reading, ticket.job, row, allowed)
            self._start([ticket], first)

    @property
    def _room(self) -> int:
        """Number of rows that can be filled."""
        return max(min(len(self._free), self.most_rows - len(self._owners)), 0)

    @property
    def _enough(self) -> int:
        """Number of rows to fill at a time: a group, or as many as jobs wait for this batch."""
        most, waiting = self.batch.group * self.sharing, self.begun
        for tickets in self._waiting:
            if waiting >= most:
                break
            waiting += len(tickets)
        return min(self.batch.group, -(-waiting // self.sharing))

    def _given(self, tickets: Sequence[Ticket]) -> list[int]:
        """Give each job a row."""
        rows = [self._free.pop() for _ in tickets]
        self._ended.difference_update(rows)
        self._owners.update(zip(rows, tickets, strict=True))
        return rows

    def _start(self, tickets: Sequence[Ticket], first: Any) -> None:
        """Expect the first tokens of inserted rows, unless others are given."""
        self._under_way += [_Started(each, first, i) for i, each in enumerate(tickets) if not len(each.job.given)]

    def _read(self, blocks: int, begins: bool) -> bool:
        """Read one block, or whole prompts if `begins`. Returns False if nothing may be read before the next call."""
        begins &= self._read_now < self.read_tokens
        now = begins if self._reading is None else blocks < self.block_calls
        if self._owners and not now:
            return False
        if self._reading is None:
            self._begin()
        if self._reading is not None:
            self._go_on(*self._reading)
        return True

    def _begin(self) -> None:
        """Take the next prompt from the queue. If it is read whole, admit it, and others that are read together with it."""
        group = self._waiting.popleft()
        try:
            kind = self.batch.together(group[0].job)
            parts = None if self.batch.admits else self.batch.reading(group[0].job)
        except Exception as error:
            self._fail_prompt(group, error)
            return
        if parts is not None:
            self._reading = group, parts, math.prod(kind)
            return
        self._read_now += math.prod(kind)
        self._admit([group, *self._alike(kind)])

    def _alike(self, kind: tuple[int, int]) -> list[list[Ticket]]:
        """Take jobs from the queue whose prompts are read together with the next one."""
        found: list[list[Ticket]] = []
        for tickets in list(itertools.islice(self._waiting, AHEAD)) if kind[1] > 1 else ():
            if len(found) + 1 == min(kind[1], self._room):
                break
            if self._kind(tickets[0]) == kind:
                self._waiting.remove(tickets)
                found.append(tickets)
        return found

    def _kind(self, ticket: Ticket) -> tuple[int, int] | None:
        try:
            return self.batch.together(ticket.job)
        except Exception:  # reported when it is the job's turn
            return None

    def _admit(self, groups: Sequence[list[Ticket]]) -> None:
        """Prefill whole prompts into free rows, for the first job of each group. Its other jobs wait for rows with the prompt."""
        bits = [None if group[0].job.grammar is None else self._allowed(group[0]) for group in groups]
        failed = [group for group in groups if group[0].ended is not None]
        begun = [(group, own) for group, own in zip(groups, bits, strict=True) if group[0].ended is None]
        self._under_way += [_Started(group[0], None) for group in failed]
        # All others wait in the queue until nothing can fail any longer.
        for group in [*failed, *(group for group, _ in reversed(begun))]:
            if group[1:]:
                self._waiting.appendleft(group[1:])
        if not begun:
            return
        tickets = [group[0] for group, _ in begun]
        rows = self._given(tickets)
        first = self.batch.admit([ticket.job for ticket in tickets], rows, [own for _, own in begun])
        self._start(tickets, first)
        for i, (group, _) in enumerate(begun):
            if group[1:]:
                reading = self.batch.again(rows[i], i)
                self._ready.append((self._waiting.popleft(), reading))

    def _go_on(self, tickets: list[Ticket], parts: Iterator[Any], tokens: int) -> None:
        """Read a block of a prompt."""
        if all(ticket.ended is not None for ticket in tickets):
            self._reading = None
            return
        try:
            reading, complete = next(parts)
        except Exception as error:
            self._reading = None
            self._fail_prompt(tickets, error)
            return
        self._read_now += tokens
        if complete:
            for ticket in tickets:
                ticket.reused = self.batch.reused
            self._ready.append((tickets, reading))
            self._reading = None

    def _fail_prompt(self, tickets: Sequence[Ticket], error: Exception) -> None:
        """End the jobs of a prompt that cannot be read. The others continue."""
        for ticket in tickets:
            if ticket.ended is None:
                ticket.ended, ticket.error = "failed", error
            self._under_way.append(_Started(ticket, None))

    def _release(self) -> None:
        """Empty rows that have ended and that no prompt waits for."""
        for row in self._ended if not self.waiting else ():
            if row in self._free:
                self.batch.release(row)
        if not self.waiting:
            self._ended.clear()

    def _dispatch(self, steps: int, hold: Collection[int] = ()) -> bool:
        """Dispatch a call that decodes, if there are rows for it. Rows in `hold` take no part.

        Returns whether another call may follow it.
        """
        live = {row: ticket for row, ticket in self._owners.items() if row not in self._stopped}
        stop = [row for row, ticket in live.items() if ticket.ended is not None or ticket.stopped]
        self._stopped.update(stop)
        missing = self._enough - self._room - len(stop)
        leave = missing if missing > 0 else self._enough
        before = next((each for each in reversed(self._under_way) if isinstance(each, _Served)), None)
        # Rows of the call before that have ended, or that this one stops, wait to be filled until it ends.
        if (before is not None and before.leave > 1) or stop or self._ready or self._reading:
            leave = min(leave, 1)
        if live:
            call = self.batch.serve(steps, stop, hold=hold, leave=leave)
            self._under_way.append(_Served(dict(live), call, leave, hold))
        return any(ticket.ended is None and (leave or self._left(ticket) > steps) for ticket in live.values())

    def _take(self, *, keep_last: bool) -> list[Ticket]:
        """Take all results, or all but those of the last call, which the device may still compute."""
        changed: dict[int, Ticket] = {}
        calls = sum(isinstance(each, _Served) for each in self._under_way)
        while self._under_way:
            each = self._under_way[0]
            if isinstance(each, _Served):
                if calls == 1 and keep_last:
                    break
                calls -= 1
                self._under_way.popleft()
                self._collect(each, changed)
            else:
                self._under_way.popleft()
                ticket = each.ticket
                if each.first is not None and ticket.ended is None:
                    own = slice(each.at, each.at + 1)
                    token, logprob = np.asarray(each.first.token)[own], np.asarray(each.first.logprob)[own]
                    self._add(ticket, token, logprob, _host([ticket], each.first), each.at)
                changed[id(ticket)] = ticket
        return list(changed.values())

    @staticmethod
    def _left(ticket: Ticket) -> int:
        return ticket.job.max_new_tokens - len(ticket.tokens)

    def _collect(self, served: _Served, changed: dict[int, Ticket]) -> None:
        tokens, logprobs, filled, live, steps = (np.asarray(x) for x in served.call[:5])
        tops = _host(served.owners.values(), served.call)
        self.row_steps += self.batch.rows * int(steps)
        for row, ticket in served.owners.items():
            if self._owners.get(row) is not ticket:  # it ended in an earlier call
                continue
            count = int(filled[row])
            self.delivered += count
            if ticket.ended is None and count:
                self._add(ticket, tokens[row, :count], logprobs[row, :count], tops, row)
                changed[id(ticket)] = ticket
            if not live[row]:
                if ticket.ended is None:
                    ticket.ended = _why(ticket)
                changed[id(ticket)] = ticket
                self._stopped.discard(row)
                ticket.allowed = None
                if self.on_end is not None:
                    self.on_end(self.batch, ticket, row)
                del self._owners[row]
                self._free.append(row)
                self._ended.add(row)

    def _add(self, ticket: Ticket, tokens: Any, logprobs: Any, tops: Any, row: int) -> None:
        ticket.tokens += tokens.tolist()
        ticket.logprobs += logprobs.tolist()
        if ticket.job.tops:
            # Of the first token there is one, of a call there are many.
            ids, values = (x[row].reshape(-1, x.shape[-1])[: len(tokens), : ticket.job.tops].tolist() for x in tops)
            ticket.tops += [list(zip(*each, strict=True)) for each in zip(ids, values, strict=True)]
        if ticket.job.stop is not None:
            try:
                ticket.stopped = any(ticket.job.stop(token) for token in tokens.tolist())
            except Exception as error:  # of this job alone
                ticket.ended, ticket.error = "failed", error

    def _fail(self, error: Exception) -> list[Ticket]:
        """End all jobs that are in the batch, whose state is lost, and begin with an empty one."""
        lost = {id(ticket): ticket for ticket in self._owners.values()}
        for each in self._under_way:
            for ticket in each.owners.values() if isinstance(each, _Served) else [each.ticket]:
                lost[id(ticket)] = ticket
        for ticket in lost.values():
            ticket.allowed = None
            if ticket.ended is None:
                ticket.ended, ticket.error = "failed", error
        for tickets, _ in reversed(self._ready):  # their prompts may be lost as well
            self._waiting.appendleft(tickets)
        self._ready.clear()
        self._owners.clear()
        self._under_way.clear()
        self._stopped.clear()
        self._ended.clear()
        self._free = list(range(self.batch.rows))[::-1]
        self.batch.reset()
        return list(lost.values())


def _once(tickets: Iterable[Ticket]) -> list[Ticket]:
    """The tickets, each once."""
    return list({id(ticket): ticket for ticket in tickets}.values())


def _why(ticket: Ticket) -> Ended:
    """Why a row has ended that nobody has cancelled."""
    if ticket.stopped:
        return "stop"
    return "eos" if ticket.tokens and ticket.tokens[-1] in ticket.job.ends else "length"


def _host(tickets: Iterable[Ticket], result: Any) -> Any:
    """The most likely tokens of a result, on the host. None if no job asks for them, as they are larger than all else."""
    return tuple(map(np.asarray, result.tops)) if any(ticket.job.tops for ticket in tickets) else None


class Schedulers:
    """Schedulers of several batches with one queue, such as those of the devices along an axis `data`. Used as one.

    Args:
        batches: the batches, of equal sizes.
        steps, block_calls, read_tokens, on_end: as for `Scheduler`.
    """

    def __init__(
        self,
        batches: Sequence[Runner],
        *,
        steps: int = 16,
        block_calls: int = 1,
        read_tokens: float = math.inf,
        on_end: OnEnd | None = None,
    ) -> None:
        self._queue: deque[list[Ticket]] = deque()
        how: dict[str, Any] = {"steps": steps, "block_calls": block_calls, "read_tokens": read_tokens}
        how |= {"queue": self._queue, "on_end": on_end}
        self._each = [Scheduler(batch, **how) for batch in batches]
        for each in self._each:
            each.sharing = len(batches)

    @property
    def busy(self) -> bool:
        """Whether a submitted job has not ended."""
        return any(each.busy for each in self._each)

    @property
    def waiting(self) -> int:
        """Number of jobs that have not been inserted into a row."""
        return sum(map(len, self._queue)) + sum(each.begun for each in self._each)

    @property
    def row_steps(self) -> int:
        """Number of rows times steps so far."""
        return sum(each.row_steps for each in self._each)

    @property
    def delivered(self) -> int:
        """How many of `row_steps` sampled a token."""
        return sum(each.delivered for each in self._each)

    def submit(self, job: Any) -> Ticket:
        """Add a job to the queue."""
        return self._each[0].submit(job)

    def submit_samples(self, jobs: Sequence[Any]) -> list[Ticket]:
        """Add jobs with the same prompt, which each batch reads once."""
        size = max(-(-len(jobs) // len(self._each)), 1)
        parts = (jobs[at : at + size] for at in range(0, len(jobs), size))
        return [ticket for part in parts for ticket in self._each[0].submit_samples(part)]

    def cancel(self, ticket: Ticket) -> None:
        """End a job, whether it waits or runs. What it has sampled so far remains."""
        self._each[0].cancel(ticket)

    def turn(self) -> list[Ticket]:
        """A turn of each scheduler. Each takes an equal share of the jobs.

        Returns:
            Jobs with new tokens, or that have ended.
        """
        share = -(-(self.waiting + sum(each.running for each in self._each)) // len(self._each))
        changed: list[Ticket] = []
        for each in self._each:
            each.most_rows = min(share, each.batch.rows)
            changed += each.turn()
        return changed
