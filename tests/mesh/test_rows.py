"""Lists of prompts through a running batch over several devices: as on one."""

import itertools

import numpy as np
import pytest
from long_share import rotate

import kvjax
from kvjax.runtime import batch as running
from kvjax.runtime import many as lists
from kvjax.runtime.batch import Batch, Begun, Job
from kvjax.runtime.mesh import on_mesh
from kvjax.runtime.rollouts import Rollouts
from kvjax.runtime.scheduler import Scheduler


@pytest.mark.parametrize(
    ("policy", "mesh"),
    rotate(
        itertools.product(
            ("full", "rkv:40", "treekv:32", "adakv:32", "quest:32"), ("model=2", "sequence=2", "data=2,model=2")
        ),
        always=[("full", "sequence=2"), ("rkv:40", "model=2"), ("treekv:32", "data=2,model=2")],
    ),
)
def test_lists_over_a_mesh(policy, mesh, tiny, monkeypatch):
    """Prompts are read together, three at a time, in one of the three."""
    together = mesh == "model=2"
    monkeypatch.setattr(lists, "tokens_together", lambda: 200 if together else 0)
    read: list[int] = []
    monkeypatch.setattr(running, "FILLED_SHARE", 1)
    admit = Batch.admit
    monkeypatch.setattr(Batch, "admit", lambda self, jobs, *how: read.append(len(jobs)) or admit(self, jobs, *how))
    random = np.random.default_rng(5)
    prompts = [random.integers(0, 64, size).tolist() for size in (50, 9, 33, 40, 17)]
    options = {"max_new_tokens": [9, 14, 3, 8, 20], "rows": 4, "ignore_eos": True}
    one = kvjax.generate(tiny, prompts, policy, **options)
    read.clear()
    many = kvjax.generate(tiny, prompts, policy, mesh=mesh, **options)
    assert read == ([3, 1, 1] if together else [1] * 5)
    for a, b in zip(one, many, strict=True):
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
    assert many[0].stats.devices == (4 if "data" in mesh else 2)


def test_rows_stay_on_their_devices(tiny, monkeypatch):
    """Each index of `data` has a batch of its own. Weights are not copied, and rows do not depend on the devices."""
    held = []
    init = Batch.__init__

    def noted(self, *args, **how):
        init(self, *args, **how)
        held.append(self)

    monkeypatch.setattr(Batch, "__init__", noted)
    params, _ = on_mesh(tiny, "data=2")
    random = np.random.default_rng(5)
    prompts = [random.integers(0, 64, size).tolist() for size in (50, 9, 33, 40, 17)]
    options = {"max_new_tokens": [9, 14, 3, 8, 20], "ignore_eos": True, "max_total_tokens": 70}
    many = kvjax.generate(params, prompts, "snapkv:40", rows=4, **options)
    assert [batch.rows for batch in held[-2:]] == [2, 2]
    devices = [batch.weights.norm.devices() for batch in held[-2:]]
    assert [len(each) for each in devices] == [1, 1]
    assert devices[0] != devices[1]
    where = {each.device: each.data.unsafe_buffer_pointer() for each in params.embed.addressable_shards}
    for batch in held[-2:]:
        (own,) = batch.weights.embed.addressable_shards
        assert own.data.unsafe_buffer_pointer() == where[own.device]
    one = kvjax.generate(tiny, prompts, "snapkv:40", rows=2, **options)
    assert [(a.tokens, a.logprobs) for a in one] == [(b.tokens, b.logprobs) for b in many]


@pytest.mark.parametrize("mesh", ["data=2", "data=2,model=2"])
def test_rollouts_over_a_mesh(mesh, tiny):
    sizes = {"rows": 4, "max_prompt_tokens": 64, "max_new_tokens": 16}
    prompts = [[5, 6, 7, 8], list(range(50)), [3]]
    one, many = Rollouts(tiny, "rkv:40", **sizes), Rollouts(tiny, "rkv:40", mesh=mesh, **sizes)
    for _ in range(2):
        found = [each.generate(prompts, samples=3, max_new_tokens=9, seed=4) for each in (one, many)]
        assert [[x.tokens for x in group] for group in found[0]] == [[x.tokens for x in group] for group in found[1]]
        many.update(tiny)
    answers = [group[0].tokens for group in found[0]]
    for a, b in zip(one.token_logprobs(prompts, answers), many.token_logprobs(prompts, answers), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("mesh", ["model=2", "sequence=2"])
def test_what_rows_keep_is_known_and_goes_on_over_a_mesh(mesh, tiny):
    """A row is reported and copied as on one device, and goes on bit for bit from its copy."""
    sizes = {"rows": 2, "prompt_len": 64, "max_new_tokens": 16, "block": 16, "anchor": "start"}
    prompt = np.random.default_rng(5).integers(0, 64, 40).tolist()
    found = []
    for where in (None, mesh):
        batch = Batch(tiny, "treekv:32", **sizes, mesh=where)
        job = Job(prompt, 8)
        (*_, (reading, _)) = batch.reading(job)
        tokens = _finish(batch, reading, job)
        kept = [np.asarray(each) for each in batch.kept_positions(1)]
        caches, count, _ = batch.copy_row(1)
        job = Job([*prompt, *tokens, 7, 8, 9], 8, begun=Begun(caches, count))
        again = []
        for _ in range(2):
            (*_, (reading, _)) = batch.reading(job)
            again.append(_finish(batch, reading, job))
        assert again[0] == again[1]
        found.append((tokens, *(each.tolist() for each in kept), again[0]))
    assert found[0] == found[1]


def _finish(batch, reading, job):
    """Tokens of row 1, up to the end."""
    tokens, live = [int(batch.insert(reading, job, 1).token[0])], True
    while live:
        call = batch.serve(8)
        tokens += np.asarray(call.tokens)[1, : int(call.filled[1])].tolist()
        live = bool(call.live[1])
    return tokens


def test_states_in_host_memory_over_a_mesh(tiny):
    """They come back to the places that they had, and change no token. The most likely tokens are those of one device."""
    random = np.random.default_rng(0)
    begun = [random.integers(0, 64, 50).tolist() for _ in range(2)]
    jobs = [Job(begun[i] + random.integers(0, 64, 9).tolist(), 8, share="me", tops=3) for i in (0, 0, 1, 1, 0, 1, 0)]

    def run(**options):
        sizes = {"rows": 2, "prompt_len": 64, "max_new_tokens": 8, "block": 16, "anchor": "start", "tops": True}
        batch = Batch(tiny, "snapkv:40", **sizes, **options)
        scheduler = Scheduler(batch, steps=4)
        tickets = [scheduler.submit(job) for job in jobs]
        while scheduler.busy:
            scheduler.turn()
        assert not any(ticket.error for ticket in tickets)
        return [(ticket.tokens, ticket.logprobs, ticket.tops) for ticket in tickets], batch.prefixes.restored

    one, _ = run()
    plain, _ = run(mesh="model=2")
    moved, restored = run(mesh="model=2", prefixes=1, prefix_host_bytes=1 << 22)
    assert restored == 3
    assert moved == plain
    for (tokens, logprobs, tops), (others, values, likely) in zip(one, plain, strict=True):
        assert tokens == others
        np.testing.assert_allclose(logprobs, values, atol=2e-5)
        assert [[token for token, _ in top] for top in tops] == [[token for token, _ in top] for top in likely]
