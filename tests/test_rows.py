"""Rows of a running batch, whatever comes and goes beside them, do what they do alone."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from policies.driver import compositions, each, every_policy
from schedules import LONGEST, NEW, Ran, begun, check, jobs, lone

import kvjax
from kvjax.policies import PolicyError
from kvjax.runtime import batch as running_batch
from kvjax.runtime.batch import Batch, First, Job
from kvjax.runtime.sampling import make_sampler

POLICIES = every_policy(16) + compositions(16)


@pytest.fixture(scope="module")
def running(tiny) -> Any:
    """For a policy: a batch, and what each job gives alone in it."""
    return functools.cache(lambda policy: lone(policy, tiny))


named = pytest.mark.parametrize("policy", [pytest.param(policy, id=policy.info.name) for policy in POLICIES])


@named
def test_rows_are_those_of_the_row_alone(policy, running):
    """Tokens, log-probabilities and all arrays of the caches, bit for bit."""
    check(*running(policy), range(5))


@pytest.mark.slow
@pytest.mark.rotating  # the test above runs for every policy and commit
@named
def test_many_schedules(policy, running):
    check(*running(policy), range(5, 55))


@pytest.mark.rotating  # each policy's golden values are those of a whole batch, in every run
@each(POLICIES, later=True)
def test_rows_are_those_of_generate(policy, running, tiny):
    """Up to rounding, which changes no token here.

    `generate` continues for as long after each prompt, so that its programs serve all. RocketKV's stages depend on the
    length of the whole sequence, so that it continues as long as the row does.
    """
    _, alone = running(policy)
    for job, ran in zip(jobs(), alone, strict=True):
        new = job.max_new_tokens if policy.info.name == "rocketkv" else NEW - len(job.given)
        options = {"max_new_tokens": new, "question": list(job.given) or None, "seed": job.seed}
        want = kvjax.generate(tiny, job.prompt, policy, ignore_eos=True, **options)
        count = len(ran.tokens)
        assert want.tokens[:count] == [token for token, _ in ran.tokens]
        np.testing.assert_allclose(want.logprobs[:count], [logprob for _, logprob in ran.tokens], atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("policy", [pytest.param(policy, id=policy.info.name) for policy in POLICIES])
def test_prompts_that_are_read_together(policy, tiny, monkeypatch):
    """They go on as those that were read alone, up to rounding."""
    monkeypatch.setattr(running_batch, "FILLED_SHARE", 1)
    random = np.random.default_rng(2)
    given = [Job(random.integers(0, 64, length).tolist(), 9) for length in (50, 23, 41)]
    alone, together = (Batch(tiny, policy, rows=3, prompt_len=50, max_new_tokens=9, read_together=n) for n in (0, 200))

    def run(batch: Batch, firsts: list[First]) -> Any:
        call = batch.serve(8)
        return [np.concatenate([each[i] for each in firsts]) for i in (0, 1)], [np.asarray(x)[:, :8] for x in call[:2]]

    (first, first_logprobs), (tokens, logprobs) = run(
        alone, [alone.admit([job], [row]) for row, job in enumerate(given)]
    )
    (got, got_logprobs), (got_tokens, got_all) = run(together, [together.admit(given, [0, 1, 2])])
    np.testing.assert_array_equal(got, first)
    np.testing.assert_array_equal(got_tokens, tokens)
    np.testing.assert_allclose(got_logprobs, first_logprobs, atol=1e-4)
    np.testing.assert_allclose(got_all, logprobs, atol=1e-3)


@pytest.mark.parametrize("policy", ["snapkv:40", "h2o:0.5", "full"])
def test_prompts_that_are_read_in_blocks(policy, tiny):
    batch = Batch(tiny, policy, rows=2, prompt_len=LONGEST, max_new_tokens=8, block=16)
    for row, length in enumerate((50, 17)):
        job = Job([jobs()[0].prompt[0]] * length, 8)
        *_, (reading, _) = batch.reading(job)
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
    for row, sampler in enumerate(options):
        job = Job(prompt, 12, seed=row, sampler=make_sampler(**sampler))
        begin.append(int(batch.admit([job], [row]).token[0]))
    call = batch.serve(16)
    for row, sampler in enumerate(options):
        want = kvjax.generate(tiny, prompt, max_new_tokens=12, seed=row, ignore_eos=True, **sampler).tokens
        assert [begin[row], *call.tokens[row][:11].tolist()] == want


def test_one_reading_serves_several_samples(tiny):
    batch = Batch(tiny, rows=3, prompt_len=64, max_new_tokens=8, sampling={"temperature"})
    job = Job(jobs()[0].prompt, 8, sampler=make_sampler(2.0))
    firsts = [batch.admit([job], [0])]
    reading = batch.again(0)
    firsts += [batch.insert(reading, dataclasses.replace(job, seed=seed), seed) for seed in (1, 2)]
    call = batch.serve(8)
    for seed, first in enumerate(firsts):
        want = kvjax.generate(tiny, job.prompt, max_new_tokens=8, seed=seed, temperature=2.0, ignore_eos=True).tokens
        assert [int(first.token[0]), *call.tokens[seed][:7].tolist()] == want


def test_weights_may_be_on_the_host(tiny):
    """As for `kvjax.Engine`."""
    job = dataclasses.replace(jobs()[0], ends=(), given=())
    batches = [
        Batch(params, rows=2, prompt_len=64, max_new_tokens=16) for params in (tiny, jax.tree.map(np.asarray, tiny))
    ]
    first, second = (begun(batch, job, 0) for batch in batches)
    assert first.tokens == second.tokens


def test_rows_that_are_stopped_end(tiny):
    batch = Batch(tiny, rows=2, prompt_len=64, max_new_tokens=16)
    for row in range(2):
        batch.admit([dataclasses.replace(jobs()[row], ends=(), given=(), max_new_tokens=16)], [row])
    call = batch.serve(4, stop=[1])
    assert call.filled.tolist() == [4, 0]
    assert call.live.tolist() == [True, False]


def test_a_call_decodes_in_place(tiny):
    """Neither inserting nor decoding copies the batch: its memory is reused."""
    from kvjax.runtime import rows

    batch = Batch(tiny, "rkv:32", rows=16, prompt_len=64, max_new_tokens=32)
    batch.compile([60])
    held = sum(x.nbytes for x in jax.tree.leaves(batch.state))
    for program in (rows.serve, rows.insert, rows.admit):
        assert program.executables[-1].memory_analysis().alias_size_in_bytes >= 0.95 * held


@pytest.mark.parametrize("mixed", [True, False])
def test_bytes_of_a_row_are_those_of_the_batch(mixed, tiny):
    """Also for a policy that gives one prompt of a known size fewer slots."""
    options = {"prompt_len": 160, "max_new_tokens": 18, "mixed": mixed}
    one, two = (Batch(tiny, "pyramidkv:24,window=4", rows=rows, **options) for rows in (1, 2))
    assert 2 * two.row_bytes == two.engine.cache_bytes
    assert (one.row_bytes == two.row_bytes) == mixed


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (Job([], 4), "prompt has 0, but this batch is for 1 to 64"),
        (Job([1] * 65, 4), "prompt has 65, but"),
        (Job([1], 9), "given and new tokens are 9, but this batch is for 1 to 8"),
        (Job([1], 4, ends=(1, 2, 3)), "end tokens are 3, but this batch is for 0 to 2"),
    ],
)
def test_jobs_that_do_not_fit_are_refused(job, says, tiny):
    batch = Batch(tiny, rows=1, prompt_len=64, max_new_tokens=8, ends=2)
    with pytest.raises(ValueError, match=says):
        batch.admit([job], [0])


def test_what_does_not_go(tiny):
    with pytest.raises(PolicyError, match="host"):
        Batch(tiny, "offloaded(clusterkv)", rows=2, prompt_len=64, max_new_tokens=8)


def chips_and_blocks() -> list[Any]:
    """Policies, chips and sizes of a block. A policy that waits, on a mesh, and two that do not, on a chip, are slow where prompts are read in blocks. All others are long.

    The slow ones are in different parts of the rotating tests.
    """
    slow = [("full", "v5e"), ("rkv:1024", "v5e:2x2"), ("snapkv:1024", "v5e")]
    more = [("full", "v5e:2x2"), *((f"{policy}:1024", "v5e") for policy in ("rkv", "treekv", "clusterkv"))]
    more += [("rkv:1024", "v6e")]
    return [
        pytest.param(
            policy,
            chips,
            block,
            marks=pytest.mark.slow if block and (policy, chips) in slow else pytest.mark.long,
            id=f"{policy}-{chips}-{'blocks' if block else 'whole'}",
        )
        for policy, chips in (*slow, *more)
        for block in (None, 512)
    ]


@pytest.mark.optimised
@pytest.mark.rotating
@pytest.mark.parametrize(("policy", "chips", "block"), chips_and_blocks())
def test_programs_for_tpus_reuse_the_memory_of_the_batch(policy, chips, block):
    """Two layers of Llama-3.1-8B's width, by the TPU's own compiler: reading and inserting prompts, and decoding rows that are out of phase."""
    from kvjax.config import PRESETS
    from kvjax.policies.base import PolicyError
    from kvjax.runtime import absent_tpu, rows
    from kvjax.runtime.disk_cache import not_kept

    config = PRESETS["llama-3.1-8b"].with_depth(2)
    sizes = {"rows": 16, "prompt_len": 2048, "max_new_tokens": 1024, "block": block}
    try:
        batch = Batch(config, policy, mesh=absent_tpu.mesh(chips), **sizes)
    except PolicyError:
        assert (policy, block) == ("clusterkv:1024", 512)  # processes whole prompts only
        return
    assert batch.engine.shard.mesh is not None
    with jax.sharding.use_abstract_mesh(batch.engine.shard.mesh.abstract_mesh), not_kept():
        peak = batch.compile([2048])
    held = batch.row_bytes * batch.rows
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(batch.weights)) // batch.engine.shard.devices
    for program in (rows.serve, rows.insert, *([] if block else [rows.admit])):
        assert program.executables[-1].memory_analysis().alias_size_in_bytes >= 0.95 * held
    assert weights + held < peak < 1.25 * (weights + held)
