"""Lists of prompts through running batches: each prompt gives what it gives alone, whatever the list."""

import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import kvjax
from kvjax.cache import Shard
from kvjax.config import PRESETS
from kvjax.models import abstract
from kvjax.policies import Full, PolicyError
from kvjax.runtime import batch, many, rows
from kvjax.runtime.batch import Batch, default_read_sizes


def prompts(count: int, longest: int = 60, seed: int = 5) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 64, random.integers(5, longest)).tolist() for _ in range(count)]


@pytest.mark.parametrize(
    ("policy", "top_k"), [("full", [None, 5, 3, None]), ("snapkv:40", [None, 5]), ("rkv:40", [None, 5])]
)
def test_options_of_each_prompt(policy, top_k, tiny):
    """A list of options gives each prompt its own, and `rows` fewer than prompts changes nothing but rounding.

    The filters of samplers do not depend on the policy. Every kind of sampler is a program, so one policy has them all.
    Numbers of new tokens that are padded to the same number share programs: 17 to 24 do, and up to 8.
    """
    given = prompts(8)
    options = {
        "max_new_tokens": [20, 17, 24, 3, 19, 22, 18, 1],
        "temperature": [0.0, 1.5] * 4,
        "top_k": top_k * (8 // len(top_k)),
        "ignore_eos": [True, False] * 4,
    }
    got = kvjax.generate(tiny, given, policy, seed=7, rows=3, **options)
    for i, (prompt, result) in enumerate(zip(given, got, strict=True)):
        own = {name: values[i] for name, values in options.items()}
        alone = kvjax.generate(tiny, prompt, policy, seed=7 + i, **own)
        assert (result.tokens, result.stop_reason) == (alone.tokens, alone.stop_reason)
        np.testing.assert_allclose(result.logprobs, alone.logprobs, atol=2e-5)


def test_long_prompts_begin_first(tiny):
    given = prompts(5)
    found = [i for i, _ in kvjax.iterate(tiny, given, rows=1, max_new_tokens=[4, 2, 2, 2, 2], ignore_eos=True)]
    assert found == [0, *sorted(range(1, 5), key=lambda i: -len(given[i]))]
    assert found != list(range(5))


def test_results_as_they_finish(tiny):
    given = prompts(6)
    told = []
    options = {"max_new_tokens": [150, 2, 2, 2, 2, 2], "rows": 2, "ignore_eos": True}
    found = list(kvjax.iterate(tiny, given, progress=lambda *done: told.append(done), **options))
    order = [i for i, _ in found]
    assert sorted(order) == list(range(6))
    assert order[-1] == 0  # the long answer, beside which the others pass through the other row
    assert told == [(done, 6) for done in range(1, 7)]
    for i, result in found:
        assert (
            result.tokens
            == kvjax.generate(tiny, given[i], max_new_tokens=150, ignore_eos=True).tokens[: len(result.tokens)]
        )


@pytest.mark.parametrize(("rows", "prefills", "decodes"), [(1, 4, 8), (4, 1, 2)])
def test_time_of_turns_that_wait_for_prompts_is_that_of_prefill(rows, prefills, decodes, tiny, monkeypatch):
    """These are the turns that insert prompts."""
    clock = itertools.count()
    monkeypatch.setattr(many, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    given = [[7, 3, 11, 40] * 4] * 4
    stats = kvjax.generate(tiny, given, "full", rows=rows, max_new_tokens=18, ignore_eos=True)[0].stats
    assert (stats.prefill_seconds, stats.decode_seconds) == (prefills, decodes)


def test_questions_and_stop_strings(talker):
    """The question follows the compressed prompt; a text ends at its own strings."""
    given = ["The sea is calm tonight. " * 3, "Once upon a time there was", "Call me"]
    options = {"question": ["Why?", " a king", "!"], "stop": [[], ["e"], "a"], "max_new_tokens": 24}
    got = kvjax.generate(talker, given, "snapkv:40", rows=2, **options)
    for i, result in enumerate(got):
        own = options | {"question": options["question"][i], "stop": options["stop"][i], "seed": i}
        alone = kvjax.generate(talker, given[i], "snapkv:40", **own)
        assert (result.text, result.tokens, result.stop_reason) == (alone.text, alone.tokens, alone.stop_reason)


def test_sizes_fix_results_bit_for_bit(tiny):
    """With the same rows and lengths, neither order nor company changes a result."""
    given = prompts(7)
    options = {"max_new_tokens": 9, "rows": 3, "max_total_tokens": 80, "ignore_eos": True}
    first = kvjax.generate(tiny, given, "rkv:40", **options)
    order = np.random.default_rng(0).permutation(7)[:5]
    other = kvjax.generate(tiny, [given[i] for i in order], "rkv:40", **options)
    for i, result in zip(order, other, strict=True):
        assert (result.tokens, result.logprobs) == (first[i].tokens, first[i].logprobs)


def test_rows_are_as_many_as_fit(tiny, monkeypatch, caplog):
    """Less memory, fewer rows, and the same answers."""
    given = prompts(12)
    want = kvjax.generate(tiny, given, max_new_tokens=8, ignore_eos=True)
    one = Batch(tiny, rows=1, prompt_len=60, max_new_tokens=8)
    weights = sum(x.nbytes for x in jax.tree.leaves(one.weights))
    limit = int((one.compile([59]) + 4 * one.row_bytes) / many.SHARE)
    assert limit < weights + 12 * one.row_bytes + one.compile([59])
    monkeypatch.setattr(many, "memory_limit", lambda shard: limit)
    monkeypatch.setattr(many, "AT_ONCE", 100)
    with caplog.at_level("INFO", logger=many.__name__):
        got = kvjax.generate(tiny, given, max_new_tokens=8, ignore_eos=True)
    (plan,) = (record.getMessage() for record in caplog.records)
    assert int(plan.split(" rows")[0].split()[-1]) in (2, 3, 4, 5)
    assert [result.tokens for result in got] == [result.tokens for result in want]


@pytest.mark.parametrize(
    ("lengths", "spare", "continuous"), [([50] * 6, 1.2, False), ([50] * 6, 0.8, True), ([5] * 5 + [50], 9, True)]
)
def test_prompts_alike_that_fit_together_start_together(lengths, spare, continuous, tiny, monkeypatch, caplog):
    """Not if memory has too little to spare for their prefill, nor if most of it would be padding."""
    monkeypatch.setattr(many, "AT_ONCE", 100)
    row = Batch(tiny, rows=1, prompt_len=50, max_new_tokens=4).row_bytes
    weights = sum(x.nbytes for x in jax.tree.leaves(tiny))
    config = tiny.config
    prefill = sum(lengths) * (3 * config.hidden_size + 2 * config.intermediate_size) * 4 * 3
    monkeypatch.setattr(many, "memory_limit", lambda shard: (weights + 6 * row + spare * prefill) / many.SHARE)
    given = [list(range(1, 1 + length)) for length in lengths]
    with caplog.at_level("INFO", logger=many.__name__):
        results = kvjax.generate(tiny, given, max_new_tokens=4, ignore_eos=True)
    assert (" prompts through " in caplog.text) == continuous
    for prompt, result in zip(given, results, strict=True):
        assert result.tokens == kvjax.generate(tiny, prompt, max_new_tokens=4, ignore_eos=True).tokens


@pytest.mark.parametrize(("rows", "fit"), [(8, True), (9, False)])
def test_experts_need_little_memory_in_prefill(rows, fit, monkeypatch):
    """Qwen3-30B-A3B with 61 GB of weights and full caches of 16k tokens, on a GPU of 80 GB."""
    params = abstract(PRESETS["qwen3-30b-a3b"], "bfloat16")
    request = SimpleNamespace(max_new_tokens=513, ends=(2,), sampler=SimpleNamespace(filters=()))
    row = SimpleNamespace(prompt=[1] * 16_384, question=[], request=request)
    options = {"mesh": None, "prefill_block": None, "room": 0, "max_total_tokens": None}
    run = SimpleNamespace(params=params, policy=Full(), rows=[row] * rows, shard=Shard(), **options)
    monkeypatch.setattr(many, "memory_limit", lambda shard: 80_700_000_000)
    assert many._all_fit(run, 16_384) == fit


def test_one_row_that_does_not_fit_is_refused_before_it_runs(tiny, monkeypatch):
    monkeypatch.setattr(many, "memory_limit", lambda shard: 1000)
    with pytest.raises(ValueError, match=r"exceed the 1.0 kB of memory here"):
        kvjax.generate(tiny, prompts(3), max_new_tokens=[1, 2, 3])


@pytest.mark.parametrize(
    ("beside", "block", "batches"),
    [(1, None, [10, 1]), (40, None, [10, 1]), (40, 32, [11])],
    ids=["room", "padding", "fit"],
)
def test_one_long_prompt_takes_neither_room_nor_time_of_short_ones(beside, block, batches, tiny, monkeypatch):
    """Sizes that differ much are batches of their own where rows are few, or where short prompts would be padded."""
    monkeypatch.setattr(many, "MOST_ROWS", 64)
    monkeypatch.setattr(many, "APART", 1)
    monkeypatch.setattr(
        many, "_fits", lambda run, part, rows: 40 if max(len(row.prompt) for row in rows) < 40 else beside
    )
    made = []
    real = Batch.__init__

    def noted(self, *args, **options):
        real(self, *args, **options)
        made.append((options["rows"], options["prompt_len"]))

    monkeypatch.setattr(Batch, "__init__", noted)
    given = [[1] * 200, *prompts(10, longest=20)]
    got = kvjax.generate(tiny, given, max_new_tokens=[4] * 10 + [5], prefill_block=block, ignore_eos=True)
    assert [rows for rows, _ in made] == batches
    assert [longest < 40 for _, longest in made] == [True, False][-len(batches) :]
    assert [len(result.tokens) for result in got] == [4] * 10 + [5]


@pytest.mark.parametrize("together", [0, 300])
def test_few_programs_and_none_after_the_first_list(together, tiny, monkeypatch):
    """Prompts of any length need few programs, and a second list none, as JAX counts them."""
    monkeypatch.setattr(many, "tokens_together", lambda: together)
    monkeypatch.setattr(batch, "FILLED_SHARE", 1)
    programs = (rows.empty, rows.admit, rows.insert, rows.serve)
    before = sum(len(program.executables) for program in programs)
    read_before = len(rows.admit.executables)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if event.endswith("/backend_compile_duration") else None
    )
    options = {"max_new_tokens": 3, "rows": 4 + bool(together), "max_total_tokens": 210, "ignore_eos": True}
    kvjax.generate(tiny, prompts(200, longest=200), "h2o:0.4", **options)
    made = sum(len(program.executables) for program in programs) - before
    read = len(rows.admit.executables) - read_before
    assert 0 < read <= len(default_read_sizes(256))
    assert made == len(compiled) == read + 3
    assert all(len(default_read_sizes(longest)) + 3 <= 8 for longest in (1024, 10_000, 1_000_000))
    compiled.clear()
    kvjax.generate(tiny, prompts(60, longest=200, seed=9), "h2o:0.4", **options)
    assert not compiled


def test_what_does_not_run_continuously_runs_in_batches(tiny):
    """Sparse layers whose store is in the host's memory."""
    given = prompts(4)
    options = {"max_new_tokens": [3, 4, 5, 6], "ignore_eos": True}
    got = kvjax.generate(tiny, given, "offloaded(quest:32)", **options)
    want = kvjax.generate(tiny, given, "quest:32", **options)
    assert [result.tokens for result in got] == [result.tokens for result in want]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_new_tokens": [1, 2]}, "options have 2 values, but there are 3 prompts"),
        ({"max_new_tokens": [1, 2, 3], "seed": [1]}, "different numbers of values: seed has 1, max_new_tokens has 3"),
        ({"temperature": [0, -1, 0]}, "^prompt 2 of 3: temperature=-1"),
        (
            {"temperature": [0, -1, 0], "top_k": [2, 2, 0.5]},
            "^prompt 2 of 3: temperature=-1.*; prompt 3 of 3: top_k=0.5",
        ),
        ({"rows": 0}, "rows=0"),
        ({"stop": [["a"], 5, "b"]}, "stop="),
        ({"max_total_tokens": -1}, "max_total_tokens=-1"),
    ],
)
def test_invalid_lists(tiny, options, says):
    with pytest.raises(ValueError, match=says):
        kvjax.generate(tiny, prompts(3), **options)


def test_iterate_takes_a_list(tiny):
    with pytest.raises(ValueError, match="give a list of prompts"):
        kvjax.iterate(tiny, [1, 2, 3])
    with pytest.raises(PolicyError, match="unknown policy"):
        kvjax.iterate(tiny, prompts(2), "snapvk")
