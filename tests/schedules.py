"""Random schedules of a running batch, and what each job gives alone in it."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from kvjax.policies import Policy
from kvjax.runtime.batch import Batch, Job

ROWS, LONGEST, NEW, GIVEN = 3, 54, 24, 4


@functools.cache
def jobs() -> list[Job]:
    """Prompts of many lengths. Some have given tokens, and some have an end token that the others do not have."""
    random = np.random.default_rng(5)
    made = []
    for i in range(7):
        prompt = random.integers(0, 64, random.integers(18, LONGEST)).tolist()
        given = random.integers(0, 64, i % 3).tolist()
        ends = [int(random.integers(0, 64))] if i % 2 else []
        made.append(Job(prompt, int(random.integers(1, NEW - GIVEN)), given=given, seed=i, ends=ends))
    return made


@dataclasses.dataclass
class Ran:
    """What a row gave: tokens with their log-probabilities, and the caches at the end."""

    tokens: list[tuple[int, float]]
    caches: Any = None

    def add(self, call: Any, row: int) -> bool:
        """Add a call's tokens. Returns whether the row has ended."""
        count = int(np.asarray(call.filled)[row])
        tokens, logprobs = (np.asarray(x)[row, :count].tolist() for x in (call.tokens, call.logprobs))
        self.tokens += zip(tokens, logprobs, strict=True)
        return not bool(np.asarray(call.live)[row])


def begun(batch: Batch, job: Job, row: int) -> Ran:
    first = batch.admit([job], [row])
    return Ran([] if job.given else [(np.asarray(first.token).item(), np.asarray(first.logprob).item())])


def caches(batch: Batch, row: int) -> list[np.ndarray]:
    """Copies of a row's arrays. To slice on the device would take longer than all else that a schedule does."""
    return [np.array(np.asarray(x)[row]) for x in jax.tree.leaves(batch.state.caches)]


def lone(policy: Policy, params: Any) -> tuple[Batch, list[Ran]]:
    """A batch, and what each job gives alone in it."""
    batch = Batch(params, policy, rows=ROWS, prompt_len=LONGEST, max_new_tokens=NEW, given=GIVEN)
    alone = []
    for i, job in enumerate(jobs()):
        batch.reset()
        row = i % ROWS
        ran = begun(batch, job, row)
        assert ran.add(batch.serve(64), row)
        alone.append(dataclasses.replace(ran, caches=caches(batch, row)))
    return batch, alone


def schedule(batch: Batch, random: np.random.Generator) -> dict[int, Ran]:
    """Run all jobs. Which row a job gets, when, and how many steps a call has, is drawn. Rows may be emptied
    between, and some rows may be held for a call.
    """
    batch.reset()
    waiting = random.permutation(len(jobs())).tolist()
    owners: dict[int, int] = {}
    ran: dict[int, Ran] = {}
    while waiting or owners:
        for row in random.permutation(ROWS).tolist():
            if row not in owners and waiting and random.random() < 0.6:
                owners[row] = waiting.pop()
                ran[owners[row]] = begun(batch, jobs()[owners[row]], row)
            elif row not in owners and random.random() < 0.2:
                batch.release(row)
        hold = np.flatnonzero(random.random(ROWS) < 0.2).tolist()
        call = batch.serve(int(random.integers(1, 6)), hold=hold, leave=int(random.integers(0, 3)))
        for row, job in list(owners.items()):
            if ran[job].add(call, row):
                ran[job].caches = caches(batch, row)
                del owners[row]
    return ran


def check(batch: Batch, alone: list[Ran], seeds: range) -> None:
    for job, ran in zip(jobs(), alone, strict=True):
        ended = bool(job.ends) and ran.tokens[-1][0] == job.ends[0]
        assert ended or len(ran.tokens) == job.max_new_tokens
    for seed in seeds:
        for i, got in schedule(batch, np.random.default_rng(seed)).items():
            assert got.tokens == alone[i].tokens
            for mine, lone in zip(got.caches, alone[i].caches, strict=True):
                np.testing.assert_array_equal(mine, lone)
