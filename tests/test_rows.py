"""Rows of a running batch, whatever comes and goes beside them, do what they do alone."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from policies.driver import compositions, every_policy

import kvjax
from kvjax.policies import Policy, PolicyError
from kvjax.runtime.batch import Batch, Job
from kvjax.runtime.sampling import make_sampler

ROWS, LONGEST, NEW, GIVEN = 3, 54, 24, 4
POLICIES = every_policy(16) + compositions(16)


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
        count = int(call.filled[row])
        self.tokens += zip(call.tokens[row][:count].tolist(), call.logprobs[row][:count].tolist(), strict=True)
        return not bool(call.live[row])


def begun(batch: Batch, job: Job, row: int) -> Ran:
    first = batch.insert(batch.read(job), job, row)
    return Ran([] if job.given else [(int(first.token[0]), float(first.logprob[0]))])


def caches(batch: Batch, row: int) -> list[np.ndarray]:
    return [np.asarray(x[row]) for x in jax.tree.leaves(batch.state.caches)]


@pytest.fixture(scope="module")
def running(tiny) -> Any:
    """For a policy: a batch, and what each job gives alone in it."""
    return functools.cache(lambda policy: lone(policy, tiny))


def lone(policy: Policy, params: Any) -> tuple[Batch, list[Ran]]:
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
    """Run all jobs: which row a job gets, when, and how many steps a call has, is drawn. Rows may be emptied between."""
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
        call = batch.serve(int(random.integers(1, 6)), leave=bool(random.random() < 0.5))
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


named = pytest.mark.parametrize("policy", [pytest.param(policy, id=policy.info.name) for policy in POLICIES])


@named
def test_rows_are_those_of_the_row_alone(policy, running):
    """Tokens, log-probabilities and all arrays of the caches, bit for bit."""
    check(*running(policy), range(5))


@pytest.mark.slow
@named
def test_many_schedules(policy, running):
    check(*running(policy), range(5, 55))


@pytest.mark.slow
@named
def test_rows_are_those_of_generate(policy, running, tiny):
    """Up to rounding, of which tokens are not a matter here."""
    _, alone = running(policy)
    for job, ran in zip(jobs(), alone, strict=True):
        options = {"max_new_tokens": job.max_new_tokens, "question": list(job.given) or None, "seed": job.seed}
        want = kvjax.generate(tiny, job.prompt, policy, ignore_eos=True, **options)
        count = len(ran.tokens)
        assert want.tokens[:count] == [token for token, _ in ran.tokens]
        np.testing.assert_allclose(want.logprobs[:count], [logprob for _, logprob in ran.tokens], atol=1e-4)


@pytest.mark.parametrize("policy", ["snapkv:40", "h2o:0.5", "full"])
def test_prompts_that_are_read_in_blocks(policy, tiny):
    batch = Batch(tiny, policy, rows=2, prompt_len=LONGEST, max_new_tokens=8, block=16)
    for row, length in enumerate((50, 17)):
        job = Job([jobs()[0].prompt[0]] * length, 8)
        *_, reading = batch.read_blocks(job)
        ran = Ran([(int(batch.insert(reading, job, row).token[0]), 0.0)])
        ran.add(batch.serve(8), row)
        want = kvjax.generate(tiny, job.prompt, policy, max_new_tokens=8, prefill_block=16, ignore_eos=True)
        assert [token for token, _ in ran.tokens] == want.tokens


def test_each_row_has_its_own_sampler(tiny):
    """A greedy row beside rows that sample with filters of their own."""
    prompt = jobs()[0].prompt
    options = [
        {},
        {"temperature": 2.0},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 3.0, "top_p": 0.7, "min_p": 0.01},
    ]
    batch = Batch(tiny, rows=4, prompt_len=64, max_new_tokens=12, sampling={"temperature", "top_k", "top_p", "min_p"})
    begin = []
    for row, each in enumerate(options):
        job = Job(prompt, 12, seed=row, sampler=make_sampler(**each))
        begin.append(int(batch.insert(batch.read(job), job, row).token[0]))
    call = batch.serve(16)
    for row, each in enumerate(options):
        want = kvjax.generate(tiny, prompt, max_new_tokens=12, seed=row, ignore_eos=True, **each).tokens
        assert [begin[row], *call.tokens[row][:11].tolist()] == want


def test_one_reading_serves_several_samples(tiny):
    batch = Batch(tiny, rows=3, prompt_len=64, max_new_tokens=8, sampling={"temperature"})
    job = Job(jobs()[0].prompt, 8, sampler=make_sampler(2.0))
    reading = batch.read(job)
    firsts = [batch.insert(reading, dataclasses.replace(job, seed=seed), seed) for seed in range(3)]
    call = batch.serve(8)
    for seed, first in enumerate(firsts):
        want = kvjax.generate(tiny, job.prompt, max_new_tokens=8, seed=seed, temperature=2.0, ignore_eos=True).tokens
        assert [int(first.token[0]), *call.tokens[seed][:7].tolist()] == want


def test_rows_that_are_stopped_end(tiny):
    batch = Batch(tiny, rows=2, prompt_len=64, max_new_tokens=16)
    for row in range(2):
        batch.insert(
            batch.read(jobs()[row]), dataclasses.replace(jobs()[row], ends=(), given=(), max_new_tokens=16), row
        )
    call = batch.serve(4, stop=[1])
    assert call.filled.tolist() == [4, 0]
    assert call.live.tolist() == [True, False]


def test_a_call_decodes_in_place(tiny):
    """Neither inserting nor decoding copies the batch: its memory is reused."""
    from kvjax.runtime import rows

    batch = Batch(tiny, "rkv:32", rows=16, prompt_len=64, max_new_tokens=32)
    batch.compile([60])
    held = sum(x.nbytes for x in jax.tree.leaves(batch.state))
    for program in (rows.serve, rows.insert):
        assert program.executables[-1].memory_analysis().alias_size_in_bytes >= 0.95 * held


def test_what_does_not_go(tiny):
    with pytest.raises(PolicyError, match="host"):
        Batch(tiny, "offloaded(clusterkv)", rows=2, prompt_len=64, max_new_tokens=8)


@pytest.mark.parametrize(
    ("policy", "chips"),
    [
        *(
            pytest.param(policy, chips, marks=pytest.mark.slow)
            for policy in ("full", "rkv:1024")
            for chips in ("v5e", "v5e:2x2")
        ),
        *(
            pytest.param(policy, "v5e", marks=pytest.mark.long)
            for policy in ("snapkv:1024", "treekv:1024", "clusterkv:1024")
        ),
        pytest.param("rkv:1024", "v6e", marks=pytest.mark.long),
    ],
)
@pytest.mark.optimised
@pytest.mark.parametrize("block", [None, 512], ids=["whole", "blocks"])
def test_programs_for_tpus_reuse_the_memory_of_the_batch(policy, chips, block):
    """Two layers of Llama-3.1-8B's width, by the TPU's own compiler: reading, inserting, and decoding rows that are out of phase."""
    from kvjax.config import PRESETS
    from kvjax.policies.base import PolicyError
    from kvjax.runtime import absent_tpu, rows
    from kvjax.runtime.disk_cache import not_kept

    config = dataclasses.replace(PRESETS["llama-3.1-8b"], num_layers=2, windows=())
    sizes = {"rows": 16, "prompt_len": 2048, "max_new_tokens": 1024, "block": block}
    try:
        batch = Batch(config, policy, mesh=absent_tpu.mesh(chips), **sizes)
    except PolicyError:
        assert (policy, block) == ("clusterkv:1024", 512)  # reads whole prompts
        return
    assert batch.engine.shard.mesh is not None
    with jax.sharding.use_abstract_mesh(batch.engine.shard.mesh.abstract_mesh), not_kept():
        peak = batch.compile([2048])
    held = batch.row_bytes * batch.rows
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(batch.weights)) // batch.engine.shard.devices
    for program in (rows.serve, rows.insert):
        assert program.executables[-1].memory_analysis().alias_size_in_bytes >= 0.95 * held
    assert weights + held < peak < 1.25 * (weights + held)
