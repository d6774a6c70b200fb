"""The scheduler of a running batch, against a model of what it drives, with no device."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvjax.runtime import batch as running
from kvjax.runtime import scheduler as scheduler_module
from kvjax.runtime.batch import Batch, Job
from kvjax.runtime.scheduler import Scheduler, Schedulers, Ticket


@dataclasses.dataclass(frozen=True)
class Wish:
    """A job of the fake batch: it samples `name`, `name + 1`, … until `stops` tokens, or as many as are allowed.

    Its `stop` ends it after `halts` tokens.
    """

    name: int
    max_new_tokens: int
    blocks: int = 1
    stops: int | None = None
    given: tuple[int, ...] = ()
    grammar: Any = None
    tops: int = 0
    halts: int | None = None

    @property
    def stop(self) -> Any:
        return None if self.halts is None else lambda token: token - self.name + 1 == self.halts

    @property
    def ends(self) -> tuple[int, ...]:
        return () if self.stops is None else (self.name + self.stops - 1,)

    @property
    def tokens(self) -> list[int]:
        count = self.max_new_tokens if self.stops is None else min(self.stops, self.max_new_tokens)
        return list(range(self.name, self.name + count))

    @property
    def expected(self) -> list[int]:
        """The tokens up to where `stop` ends it."""
        return self.tokens[: self.halts]

    @property
    def why(self) -> str:
        if self.halts is not None and self.halts <= len(self.tokens):
            return "stop"
        return "eos" if self.ends and self.tokens[-1] == self.ends[0] else "length"


class FakeBatch:
    """What `Batch` does, in lists. It checks that a row is inserted into only when its tokens are not waited for.

    Args:
        rows: number of rows.
        most: number of prompts that are read together.
        admits: whether prompts are read whole.
        group: number of rows to fill at a time.

    Attributes:
        read: names of the jobs whose prompts were read, together.
        held: rows that each call left as they were.
    """

    def __init__(self, rows: int, most: int = 1, *, admits: bool = True, group: int | None = None) -> None:
        self.rows, self.reused, self.most, self.admits = rows, 0, most, admits
        self.group = most if group is None else group
        self.fails, self.read, self.held = "", list[list[int]](), list[set[int]]()
        self.asked: set[tuple[int, int]] = set()
        self.reset()

    def reset(self) -> None:
        self.restricted: dict[int, int] = {}
        self.grammars: dict[int, int] = {}
        self.unread = [0] * self.rows
        self.left: list[list[int]] = [[] for _ in range(self.rows)]
        self.live = [False] * self.rows

    def _check(self, what: str) -> None:
        if self.fails == what:
            self.fails = ""
            raise RuntimeError(f"{what} failed")

    def together(self, job: Wish) -> tuple[int, int]:
        self._check("together")
        return 10 + len(job.given), self.most if self.admits else 1

    def reading(self, job: Wish) -> Iterator[tuple[Any, bool]]:
        assert not self.admits
        self.read.append([job.name])
        for left in reversed(range(job.blocks)):
            self._check("reading")
            yield job, left == 0

    def admit(self, jobs: Sequence[Wish], rows: Sequence[int], allowed: Sequence[Any] = ()) -> Any:
        assert self.admits
        self.read.append([job.name for job in jobs])
        assert len({(10 + len(job.given), self.most) for job in jobs}) == 1
        assert 1 <= len(jobs) == len(rows) == len(allowed) <= self.most
        firsts = [self.insert(job, job, row, own) for job, row, own in zip(jobs, rows, allowed, strict=True)]
        self.admitted = list(zip(rows, jobs, strict=True))
        return First(*(np.concatenate([each[i] for each in firsts]) for i in (0, 1)))

    def again(self, row: int, index: int = 0) -> Wish:
        self._check("again")
        assert self.admitted[index][0] == row
        return self.admitted[index][1]

    def insert(self, reading: Wish, job: Wish, row: int, allowed: Any = None) -> Any:
        self._check("insert")
        assert reading is job
        assert not self.live[row]
        first, *rest = job.tokens
        self.grammars.pop(row, None)
        self.restricted.pop(row, None)
        if job.grammar:
            assert allowed == 0
            self.restricted[row] = 0
            self.grammars[row] = 0 if job.given else 1
        self.unread[row] = max(len(job.given) - 1, 0)
        self.left[row] = [first, *rest] if job.given else rest
        self.live[row] = bool(self.left[row])
        return First(np.asarray([first]), np.asarray([0.0]))

    def allowed(self, job: Wish, tokens: list[int]) -> int:
        """What a grammar returns: here, how many tokens it has seen. It is called once before each token."""
        self._check("allowed")
        assert len(tokens) < len(job.expected)
        assert (job.name, len(tokens)) not in self.asked
        self.asked.add((job.name, len(tokens)))
        return len(tokens)

    def restrict(self, allowed: dict[int, int]) -> None:
        self.restricted = dict(allowed)

    def release(self, row: int) -> None:
        assert not self.live[row]

    def serve(self, count: int, stop: Collection[int] = (), *, hold: Collection[int] = (), leave: int = 0) -> Any:
        self._check("serve")
        self.admitted = []
        self.held.append(set(hold))
        for row in stop:
            self.live[row] = False
        tokens, filled, steps, begun = np.zeros((self.rows, count), int), np.zeros(self.rows, int), 0, sum(self.live)

        def going() -> list[int]:
            return [row for row in range(self.rows) if self.live[row] and row not in hold]

        for row in going():
            assert self.restricted.get(row) == self.grammars.get(row)
            assert count == 1 or row not in self.grammars
        while steps < count and going() and not 0 < leave <= begun - sum(self.live):
            for row in going():
                if self.unread[row]:
                    self.unread[row] -= 1
                    continue
                if row in self.grammars:
                    self.grammars[row] += 1
                tokens[row, filled[row]] = self.left[row].pop(0)
                filled[row] += 1
                self.live[row] = bool(self.left[row])
            steps += 1
        return Call(tokens, np.zeros(tokens.shape), filled, np.asarray(self.live), np.asarray(steps))


class First(NamedTuple):
    token: Any
    logprob: Any


def Call(*arrays: Any) -> tuple[Any, ...]:
    return arrays


class Schedules(RuleBasedStateMachine):
    """Jobs come, are cancelled and fail in any order. Each ends once, with its own tokens."""

    @initialize(
        rows=st.integers(1, 4),
        steps=st.integers(1, 5),
        blocks=st.integers(1, 3),
        batches=st.integers(1, 3),
        most=st.integers(1, 4),
        group=st.integers(1, 6),
        admits=st.booleans(),
        tokens=st.sampled_from([1, 25, math.inf]),
    )
    def begin(
        self, rows: int, steps: int, blocks: int, batches: int, most: int, group: int, admits: bool, tokens: float
    ) -> None:
        self.batches = [FakeBatch(rows, most, admits=admits, group=group) for _ in range(batches)]
        how: dict[str, Any] = {"steps": steps, "block_calls": blocks, "read_tokens": tokens}
        how["on_end"] = self.row_has_read_no_further
        self.scheduler = Scheduler(self.batches[0], **how) if batches == 1 else Schedulers(self.batches, **how)
        self.tickets: list[Ticket] = []
        self.broken = self.cancelled = 0

    @staticmethod
    def row_has_read_no_further(batch: Any, ticket: Ticket, row: int) -> None:
        if ticket.ended != "cancelled":
            assert len(batch.left[row]) == len(ticket.job.tokens) - len(ticket.tokens)

    @rule(
        new=st.integers(1, 9),
        blocks=st.integers(1, 4),
        stops=st.none() | st.integers(1, 9),
        given=st.integers(0, 3),
        grammar=st.sampled_from([None, None, "g"]),
        halts=st.none() | st.integers(1, 9),
    )
    def submit(
        self, new: int, blocks: int, stops: int | None, given: int, grammar: str | None, halts: int | None
    ) -> None:
        wish = Wish(1000 * len(self.tickets), new, blocks, stops, (1,) * given, grammar, halts=halts)
        self.tickets.append(self.scheduler.submit(wish))

    @rule(new=st.integers(1, 9), samples=st.integers(1, 5))
    def submit_samples(self, new: int, samples: int) -> None:
        wish = Wish(1000 * len(self.tickets), new)
        self.tickets += self.scheduler.submit_samples([wish] * samples)

    @rule(turns=st.integers(1, 4))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.scheduler.turn()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.tickets:
            ticket = data.draw(st.sampled_from(self.tickets))
            self.cancelled += ticket.ended is None
            self.scheduler.cancel(ticket)

    @rule(what=st.sampled_from(["together", "reading", "insert", "again", "serve", "allowed"]), data=st.data())
    def break_down(self, what: str, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.batches)).fails = what
        self.broken += 1

    @invariant()
    def tokens_are_those_of_the_job(self) -> None:
        for ticket in getattr(self, "tickets", []):
            whole = ticket.job.expected
            assert ticket.tokens == whole[: len(ticket.tokens)]
            if ticket.ended in ("eos", "length", "stop"):
                assert (ticket.tokens, ticket.ended) == (whole, ticket.job.why)
            if ticket.ended == "failed":
                assert ticket.error is not None

    def teardown(self) -> None:
        if not hasattr(self, "tickets"):
            return
        for batch in self.batches:
            batch.fails = ""
        for _ in range(5000):
            if not self.scheduler.busy:
                break
            self.scheduler.turn()
        assert not self.scheduler.busy
        assert all(ticket.ended is not None for ticket in self.tickets)
        assert sum(ticket.ended == "cancelled" for ticket in self.tickets) == self.cancelled
        if not self.broken:
            assert not any(ticket.ended == "failed" for ticket in self.tickets)


def test_a_job_that_cannot_be_inserted_ends() -> None:
    batches = [FakeBatch(1), FakeBatch(1)]
    scheduler = Schedulers(batches, steps=1)
    for batch in batches:
        batch.fails = "insert"
    ticket = scheduler.submit(Wish(0, 1))
    for _ in range(3):
        scheduler.turn()
    assert ticket.ended == "failed"
    assert not scheduler.busy


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("admits", [True, False])
def test_a_prompt_of_several_samples_is_read_once(admits: bool) -> None:
    batch = FakeBatch(2, admits=admits)
    scheduler = Scheduler(batch, steps=3)
    tickets = [*scheduler.submit_samples([Wish(0, 4)] * 5), scheduler.submit(Wish(1000, 2))]
    assert scheduler.waiting == 6
    while scheduler.busy:
        scheduler.turn()
    assert [ticket.tokens for ticket in tickets] == [[0, 1, 2, 3]] * 5 + [[1000, 1001]]
    assert batch.read == [[0], [1000]]


@pytest.mark.parametrize("samples", [0, 10])
def test_batches_with_one_queue_have_equal_shares(samples) -> None:
    batches = [FakeBatch(8), FakeBatch(8)]
    scheduler = Schedulers(batches, steps=2)
    tickets = scheduler.submit_samples([Wish(0, 4)] * samples) or [scheduler.submit(Wish(9 * i, 4)) for i in range(10)]
    assert scheduler.waiting == 10
    scheduler.turn()
    assert [sum(batch.live) for batch in batches] == [5, 5]
    while scheduler.busy:
        scheduler.turn()
    assert all(ticket.tokens == ticket.job.tokens for ticket in tickets)
    assert scheduler.delivered == 3 * 10


def test_short_prompts_are_read_together_into_as_many_rows() -> None:
    """Of one padded length. Rows that have ended wait until there are as many as are filled at a time."""
    batch = FakeBatch(4, most=2)
    scheduler = Scheduler(batch, steps=3)
    given, new = ((), (), (1,), (), (), (), (1,)), (4, 9, 2, 4, 4, 4, 4)
    tickets = [
        scheduler.submit(Wish(100 * i, n, given=each)) for i, (each, n) in enumerate(zip(given, new, strict=True))
    ]
    scheduler.turn()
    assert batch.read == [[0, 100], [200, 600]]
    assert (scheduler.running, scheduler.begun, scheduler.waiting) == (4, 0, 3)
    scheduler.cancel(tickets[5])
    while scheduler.busy:
        scheduler.turn()
    assert batch.read == [[0, 100], [200, 600], [300, 400]]
    assert all(ticket.tokens == ticket.job.tokens for ticket in tickets if ticket is not tickets[5])
    assert tickets[5].tokens == []


def test_first_tokens_are_taken_in_the_turn_that_inserts_their_rows() -> None:
    batch = FakeBatch(2)
    scheduler = Scheduler(batch, steps=3)
    tickets = [scheduler.submit(Wish(100 * i, 8)) for i in range(2)]
    counts = []
    while scheduler.busy:
        scheduler.turn()
        counts.append([len(ticket.tokens) for ticket in tickets])
    assert counts == [[1, 1], [4, 4], [7, 7], [8, 8]]


@pytest.mark.parametrize(
    ("grammars", "calls", "tokens"), [(1, 9, [5, 9, 9, 9]), (2, 9, [5, 5, 9, 9]), (3, 8, [9, 9, 9, 9])]
)
def test_rows_without_a_grammar_do_not_wait_for_it(grammars: int, calls: int, tokens: list[int]) -> None:
    """A row with a grammar takes part in every second call, unless most rows have grammars."""
    batch = FakeBatch(4)
    scheduler = Scheduler(batch, steps=8)
    tickets = [scheduler.submit(Wish(100 * i, 9, grammar="g" if i < grammars else None)) for i in range(4)]
    while tickets[-1].ended is None:
        scheduler.turn()
    assert (len(batch.held), [len(ticket.tokens) for ticket in tickets]) == (calls, tokens)
    while scheduler.busy:
        scheduler.turn()
    assert all(ticket.tokens == ticket.job.tokens for ticket in tickets)


def test_a_cancelled_job_is_not_asked_for_its_grammar() -> None:
    batch = FakeBatch(2)
    scheduler = Scheduler(batch)
    tickets = [scheduler.submit(Wish(100 * i, 9, grammar="g" if i == 0 else None)) for i in range(2)]
    scheduler.turn()
    scheduler.cancel(tickets[0])
    batch.fails = "allowed"
    while scheduler.busy:
        scheduler.turn()
    assert [ticket.ended for ticket in tickets] == ["cancelled", "length"]


@pytest.mark.parametrize(("group", "waiting"), [(1, [8, 8, 7, 6, 5, 4]), (3, [8, 8, 5, 5, 1, 0]), (9, [8, 8, 0])])
def test_rows_are_filled_a_group_at_a_time(group: int, waiting: list[int]) -> None:
    """A call ends with a group of rows. The next call is dispatched before that is known, and ends with any row."""
    batch = FakeBatch(8, group=group)
    scheduler = Scheduler(batch, steps=50)
    tickets = [scheduler.submit(Wish(100 * i, 2 + i)) for i in range(16)]
    found = []
    for _ in waiting:
        scheduler.turn()
        found.append(scheduler.waiting)
    assert found == waiting
    while scheduler.busy:
        scheduler.turn()
    assert all(ticket.tokens == ticket.job.tokens for ticket in tickets)


def test_prompts_of_several_samples_are_read_together() -> None:
    """The first job of each is admitted. The others are inserted when there are rows."""
    batch = FakeBatch(5, most=2)
    scheduler = Scheduler(batch, steps=3)
    groups = [scheduler.submit_samples([Wish(100 * i, 4)] * samples) for i, samples in enumerate((2, 5, 1))]
    scheduler.turn()
    assert batch.read == [[0, 100]]
    assert (scheduler.running, scheduler.begun, scheduler.waiting) == (5, 2, 3)
    while scheduler.busy:
        scheduler.turn()
    assert batch.read == [[0, 100], [200]]
    assert all(ticket.tokens == ticket.job.tokens for group in groups for ticket in group)


def test_free_rows_wait_for_few_calls() -> None:
    """Then they are filled, although fewer are free than are filled at a time."""
    batch = FakeBatch(64, group=8)
    scheduler = Scheduler(batch, steps=16)
    for i in range(57):
        scheduler.submit(Wish(1_000_000 + 10_000 * i, 4000))
    scheduler.turn()
    tickets = [scheduler.submit(Wish(100 * i, 5)) for i in range(8)]
    for _ in range(2 + scheduler_module.PATIENCE):
        scheduler.turn()
    assert [ticket.ended for ticket in tickets] == ["length"] * 7 + [None]


def test_batches_with_one_queue_wait_for_their_share_of_a_group() -> None:
    batches = [FakeBatch(8, group=4), FakeBatch(8, group=4)]
    scheduler = Schedulers(batches, steps=2)
    for i in range(14):
        scheduler.submit(Wish(1_000_000 + 10_000 * i, 4000))
    scheduler.turn()
    for i in range(2):
        scheduler.submit(Wish(100 * i, 4))
    scheduler.turn()
    assert [sum(batch.live) for batch in batches] == [8, 8]


def test_few_waiting_prompts_are_looked_through(monkeypatch) -> None:
    """However long the list is."""
    monkeypatch.setattr(scheduler_module, "AHEAD", 2)
    batch = FakeBatch(4, most=3)
    scheduler = Scheduler(batch, steps=3)
    for i, given in enumerate(((), (1,), (1,), ())):
        scheduler.submit(Wish(100 * i, 4, given=given))
    scheduler.turn()
    assert batch.read == [[0], [100, 200], [300]]  # the first was read without the last


def test_batches_with_one_queue_do_not_read_the_others_share() -> None:
    batches = [FakeBatch(4, most=4), FakeBatch(4, most=4)]
    scheduler = Schedulers(batches, steps=2)
    for i in range(4):
        scheduler.submit(Wish(9 * i, 4))
    scheduler.turn()
    assert [sum(batch.live) for batch in batches] == [2, 2]


def test_first_come_first_served() -> None:
    batch = FakeBatch(2)
    scheduler = Scheduler(batch, steps=2)
    tickets = [scheduler.submit(Wish(1000 * i, 2 + i)) for i in range(6)]
    ended = []
    while scheduler.busy:
        ended += [ticket for ticket in scheduler.turn() if ticket.ended]
    assert ended == tickets


def test_many_prompts_do_not_hold_up_live_rows() -> None:
    """Once `read_tokens` tokens were read, the next prompt is begun after the next decode call. At least one is begun before each."""
    batch = FakeBatch(8)
    scheduler = Scheduler(batch, steps=1, read_tokens=25)
    tickets = [scheduler.submit(Wish(100 * i, 9)) for i in range(8)]  # of 10 tokens each
    running = []
    while scheduler.waiting:
        scheduler.turn()
        running.append(scheduler.running)
    assert running == [3, 6, 8]
    while scheduler.busy:
        scheduler.turn()
    assert all(ticket.tokens == ticket.job.tokens for ticket in tickets)


def test_a_prompt_whose_size_cannot_be_found_fails_alone() -> None:
    batch = FakeBatch(2)
    scheduler = Scheduler(batch, steps=3)
    tickets = [scheduler.submit(Wish(100 * i, 4)) for i in range(3)]
    together = batch.together

    def broken(job: Wish) -> tuple[int, int]:
        if job.name == 100:
            raise RuntimeError("no size")
        return together(job)

    batch.together = broken  # pyright: ignore[reportAttributeAccessIssue]
    while scheduler.busy:
        scheduler.turn()
    assert [ticket.ended for ticket in tickets] == ["length", "failed", "length"]


def test_long_prompts_do_not_hold_up_live_rows() -> None:
    """Between two calls that decode at most one block is read."""
    batch = FakeBatch(2, admits=False)
    scheduler = Scheduler(batch, steps=1)
    first = scheduler.submit(Wish(0, 8))
    scheduler.turn()
    scheduler.submit(Wish(1000, 3, blocks=5))
    for turn in range(1, 5):
        scheduler.turn()
        assert len(first.tokens) == turn + 1 if turn > 1 else len(first.tokens) >= 1


@pytest.mark.parametrize("fails", ["together", "reading"])
def test_one_prompt_that_fails_does_not_fail_others(fails: str) -> None:
    batch = FakeBatch(2, admits=False)
    scheduler = Scheduler(batch)
    good = scheduler.submit(Wish(0, 5))
    scheduler.turn()
    batch.fails = fails
    bad = scheduler.submit(Wish(1000, 5))
    while scheduler.busy:
        scheduler.turn()
    assert (good.ended, good.tokens) == ("length", [0, 1, 2, 3, 4])
    assert bad.ended == "failed"
    assert str(bad.error) == f"{fails} failed"


def test_a_stop_that_fails_ends_its_own_job() -> None:
    @dataclasses.dataclass(frozen=True)
    class Broken(Wish):
        @property
        def stop(self) -> Any:
            return lambda token: 0 // (1002 - token)

    scheduler = Scheduler(FakeBatch(2), steps=3)
    good, bad = scheduler.submit(Wish(0, 8)), scheduler.submit(Broken(1000, 8))
    while scheduler.busy:
        scheduler.turn()
    assert (good.ended, len(good.tokens)) == ("length", 8)
    assert (bad.ended, str(bad.error)) == ("failed", "integer division or modulo by zero")


@pytest.mark.parametrize("fails", ["insert", "again", "serve"])
def test_a_batch_that_fails_begins_anew(fails: str) -> None:
    """Jobs that wait are not lost, nor are other samples of a prompt that could not be inserted."""
    batch = FakeBatch(2)
    scheduler = Scheduler(batch, steps=1)
    lost, waits = scheduler.submit(Wish(0, 5)), Wish(1000, 2)
    scheduler.turn()
    first, *others = scheduler.submit_samples([waits] * 3)
    batch.fails = fails
    while scheduler.busy:
        scheduler.turn()
    assert lost.ended == "failed"
    assert first.ended == "failed"
    assert [(ticket.ended, ticket.tokens) for ticket in others] == [("length", [1000, 1001])] * 2


def test_a_grammar_that_fails_ends_its_job_alone() -> None:
    batch = FakeBatch(2)
    scheduler = Scheduler(batch, steps=4)
    good, bad = scheduler.submit(Wish(0, 5)), scheduler.submit(Wish(1000, 5, grammar="g"))
    scheduler.turn()
    batch.fails = "allowed"
    while scheduler.busy:
        scheduler.turn()
    assert (good.ended, good.tokens) == ("length", [0, 1, 2, 3, 4])
    assert (bad.ended, str(bad.error)) == ("failed", "allowed failed")
    assert 1 <= len(bad.tokens) < 5


@pytest.mark.parametrize(("policy", "together"), [("full", 0), ("rkv:40", 0), ("rkv:40", 200)])
def test_jobs_through_few_rows(policy, together, tiny, monkeypatch) -> None:
    """Each gives what it gives in a batch with a row for each."""
    monkeypatch.setattr(running, "FILLED_SHARE", 1)
    random = np.random.default_rng(5)
    jobs = [Job(random.integers(0, 64, random.integers(5, 64)).tolist(), int(random.integers(1, 30))) for _ in range(9)]

    def run(rows: int) -> list[list[int]]:
        scheduler = Scheduler(
            Batch(tiny, policy, rows=rows, prompt_len=64, max_new_tokens=30, read_together=together), steps=8
        )
        tickets = [scheduler.submit(job) for job in jobs]
        while scheduler.busy:
            scheduler.turn()
        assert all(ticket.ended == "length" for ticket in tickets)
        return [ticket.tokens for ticket in tickets]

    assert run(2) == run(9)


@pytest.mark.parametrize("policy", ["full", "rkv:40"])
def test_jobs_beside_those_with_grammars_give_what_they_give_alone(policy, tiny) -> None:
    """So do those with grammars: tokens, log-probabilities and why they end, bit for bit."""
    random = np.random.default_rng(3)
    kinds: list[dict[str, Any]] = [
        {
            "prompt": random.integers(0, 64, random.integers(5, 60)).tolist(),
            "max_new_tokens": int(random.integers(1, 20)),
            "given": [4, 5, 6][: i % 3],
            "ends": [int(random.integers(0, 64))],
            "seed": i,
        }
        for i in range(12)
    ]

    def job(i: int) -> Job:
        def allowed(tokens: Sequence[int]) -> np.ndarray:
            assert len(tokens) == next(calls)
            return np.random.default_rng([i, *tokens]).integers(1, 2**32, 2, np.uint32)

        calls = itertools.count()
        return Job(**kinds[i], grammar=allowed if i % 4 == 0 else None)

    def run(indices: Sequence[int]) -> list[Any]:
        batch.reset()
        scheduler = Scheduler(batch, steps=8)
        tickets = [scheduler.submit(job(i)) for i in indices]
        while scheduler.busy:
            scheduler.turn()
            assert scheduler.lost is None
        return [(ticket.tokens, ticket.logprobs, ticket.ended) for ticket in tickets]

    batch = Batch(tiny, policy, rows=4, prompt_len=60, max_new_tokens=24, given=3, masked=True)
    found = run(range(12))
    assert {ended for *_, ended in found} <= {"eos", "length"}
    assert found == [run([i])[0] for i in range(12)]


@pytest.mark.parametrize("policy", ["snapkv:40", "rkv:40"])
def test_a_prompt_that_is_read_together_with_others_gives_what_it_gives_alone(policy, tiny, monkeypatch) -> None:
    """Bit for bit, in any order."""
    monkeypatch.setattr(running, "FILLED_SHARE", 1)
    random = np.random.default_rng(6)
    jobs = [Job(random.integers(0, 64, length).tolist(), 12) for length in (30, 64, 9, 50, 41, 62, 3)]
    batch = Batch(tiny, policy, rows=4, prompt_len=64, max_new_tokens=12, read_sizes=[32], read_together=130)
    assert [batch.together(job) for job in jobs[:2]] == [(32, 4), (64, 2)]

    def run(jobs: Sequence[Job], samples: int = 1) -> list[tuple[list[int], list[float]]]:
        batch.reset()
        scheduler = Scheduler(batch, steps=5)
        groups = [scheduler.submit_samples(jobs[at : at + samples]) for at in range(0, len(jobs), samples)]
        tickets = [ticket for group in groups for ticket in group]
        while scheduler.busy:
            scheduler.turn()
        return [(ticket.tokens, ticket.logprobs) for ticket in tickets]

    alone = [run([job])[0] for job in jobs]
    assert run(jobs) == alone
    assert run(jobs[::-1]) == alone[::-1]
    assert run([job for job in jobs for _ in range(2)], samples=2) == [each for each in alone for _ in range(2)]
    held = sum(x.nbytes for x in jax.tree.leaves(tiny)) + (4 + 1) * batch.row_bytes
    assert batch.compile([len(job.prompt) for job in jobs]) >= held
