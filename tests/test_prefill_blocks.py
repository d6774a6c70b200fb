"""Prompts that are read in blocks: `generate(..., prefill_block=)`, and `Engine.extend` under it."""

import warnings

import jax
import numpy as np
import pytest
from policies.driver import compositions

import kvjax
from kvjax.models import Params
from kvjax.policies import Policy, get_policy
from kvjax.runtime import decoding, engine, generation, many
from kvjax.runtime.engine import Engine

PROMPTS = [[5, 9, 2, 7, 7, 1] * 9, [3, 1, 4] * 5 + [1, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8] * 4]
OPTIONS = {"max_new_tokens": 6, "ignore_eos": True}

SLOW = [
    kvjax.TreeKV(budget=16, sinks=2, block=4),
    get_policy("h2o", budget=16),
    get_policy("expected_attention", budget=16),
    get_policy("quest", budget=8, page=4, dense_layers=1),
    get_policy("cam", budget=16),
]
LONG = [compositions(16)[0], get_policy("chelsea", budget=16, sinks=2, recent=4, chunk=4, every=4)]
POLICIES = [
    get_policy("snapkv", budget=16, window=4),
    *(pytest.param(policy, marks=pytest.mark.slow) for policy in SLOW),
    *(pytest.param(policy, marks=pytest.mark.long) for policy in LONG),
]


def same(got: list, want: list) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


@pytest.mark.parametrize("block", [5, 1, 16])
def test_full_in_blocks_is_full(tiny: Params, block: int) -> None:
    got = kvjax.generate(tiny, PROMPTS, prefill_block=block, **OPTIONS)
    same(got, kvjax.generate(tiny, PROMPTS, **OPTIONS))
    assert [row.stats.prefill_block for row in got] == [block] * 3


@pytest.mark.rotating
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.info.name)
def test_rows_are_what_they_are_alone(tiny: Params, policy: Policy) -> None:
    """They begin in different blocks; and one block that holds all prompts is reading them whole, but for CaM."""
    options = OPTIONS | {"policy": policy}
    got = kvjax.generate(tiny, PROMPTS, prefill_block=8, **options)
    same(got, [kvjax.generate(tiny, prompt, prefill_block=8, **options) for prompt in PROMPTS])
    if policy.info.name != "cam":
        same(kvjax.generate(tiny, PROMPTS, prefill_block=64, **options), kvjax.generate(tiny, PROMPTS, **options))
    assert (
        got[0].stats.cache_bytes == Engine(tiny, policy, batch=3, prompt_len=54, max_new_tokens=6, block=8).cache_bytes
    )


def test_progress_by_blocks(tiny: Params) -> None:
    told: list[tuple[int, int]] = []
    got = kvjax.generate(tiny, PROMPTS, prefill_block=16, **OPTIONS, progress=lambda *done: told.append(done))
    count = -(-max(map(len, PROMPTS)) // 16)
    assert told == [(i + 1, count) for i in range(count)]
    same(got, kvjax.generate(tiny, PROMPTS, prefill_block=16, **OPTIONS))


def test_a_question_follows(tiny: Params) -> None:
    want = kvjax.generate(tiny, PROMPTS[0] + PROMPTS[1], **OPTIONS)
    got = kvjax.generate(tiny, PROMPTS[0], question=PROMPTS[1], prefill_block=16, **OPTIONS)
    same([got], [want])


def test_blocks_end_together_and_the_first_is_the_shorter() -> None:
    rows = [list(range(n)) for n in (7, 2, 6)]
    assert list(engine.blocks(rows, 3)) == [
        [[0], [], []],
        [[1, 2, 3], [], [0, 1, 2]],
        [[4, 5, 6], [0, 1], [3, 4, 5]],
    ]


def test_blocks_of_all_sizes_go_on_in_the_same_programs(tiny: Params) -> None:
    programs = decoding.decode, decoding.answer
    asked = {**OPTIONS, "policy": kvjax.TreeKV(budget=16, sinks=2), "question": [3, 1, 4]}
    kvjax.generate(tiny, PROMPTS[0], prefill_block=8, **asked)
    kvjax.generate(tiny, PROMPTS[0], prefill_block=8, **asked | {"question": None})
    before = [len(program.executables) for program in programs]
    kvjax.generate(tiny, PROMPTS[0], prefill_block=24, **asked)
    kvjax.generate(tiny, PROMPTS[0], prefill_block=24, **asked | {"question": None})
    assert [len(program.executables) for program in programs] == before


def test_memory_does_not_depend_on_the_length_of_the_prompt(tiny: Params) -> None:
    """The program that reads a block is the same size to the byte, whether 1000 tokens come or 32000."""
    sizes = []
    for tokens in (1000, 32_000):
        reader = Engine(tiny, kvjax.TreeKV(budget=16, sinks=2), prompt_len=tokens, max_new_tokens=8, block=16)
        memory = reader.executables()[0].memory_analysis()
        sizes.append((memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    "text",
    [
        "infinigen:8,dense_layers=0",
        "shadowkv:8,chunk=2,local_chunks=1,outlier_chunks=1",
        "lagkv:40",
        "chunkkv:40,rule=kvpress",
        "offloaded(snapkv:40)",
    ],
)
def test_whole_prompts_only(tiny: Params, text: str) -> None:
    with pytest.raises(kvjax.PolicyError, match=r"chooses from the whole prompt.*Leave prefill_block out"):
        kvjax.generate(tiny, PROMPTS, text, prefill_block=16)


def test_refusals(tiny: Params) -> None:
    with pytest.raises(ValueError, match="prefill_block=0"):
        kvjax.generate(tiny, PROMPTS, prefill_block=0)
    reader = Engine(tiny, prompt_len=40, block=8)
    with pytest.raises(ValueError, match="block 1 of 1: 9 tokens are not 0 to 8"):
        reader.extend(reader.begin(), [[1] * 9])
    with pytest.raises(ValueError, match="make the engine with block="):
        Engine(tiny, prompt_len=40).extend(reader.begin(), [[1]])


def test_prompts_that_do_not_fit_are_read_in_blocks(tiny: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where their keys and values, whole, would not fit beside the weights; a policy that cannot read so goes on as it does."""
    monkeypatch.setattr(generation, "BLOCK", 16)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(tiny))
    full = kvjax.Full().nbytes(tiny.config, 3, 54, 6, tiny.dtype)
    for room, policy, block in (
        (weights + full - 1, "streaming_llm", 16),
        (weights + full, "streaming_llm", None),
        (None, "streaming_llm", None),
        (weights + full - 1, "lagkv:48,sinks=4,lag=8", None),
    ):
        monkeypatch.setattr(generation, "device_bytes", lambda room=room: room)
        budget = 16 if policy == "streaming_llm" else None
        (got, *_) = kvjax.generate(tiny, PROMPTS, policy, budget, **OPTIONS)
        assert got.stats.prefill_block == block


def test_a_list_is_read_in_blocks_only_if_one_prompt_does_not_fit(
    tiny: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The length of a list does not choose blocks. In blocks, a policy keeps other tokens."""
    monkeypatch.setattr(generation, "BLOCK", 16)
    monkeypatch.setattr(many, "AT_ONCE", 64)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(tiny))
    one = kvjax.Full().nbytes(tiny.config, 1, 54, 6, tiny.dtype)
    alone = [
        answer.tokens for answer in (kvjax.generate(tiny, ids, "snapkv:24,window=8", **OPTIONS) for ids in PROMPTS)
    ]
    for room, block in ((weights + one - 1, 16), (weights + one, None)):
        monkeypatch.setattr(generation, "device_bytes", lambda room=room: room)
        answers = kvjax.generate(tiny, PROMPTS, "snapkv:24,window=8", **OPTIONS)
        assert {answer.stats.prefill_block for answer in answers} == {block}
        assert block or [answer.tokens for answer in answers] == alone


def test_positions_stay_within_the_cache_and_a_block(tiny: Params) -> None:
    """300 tokens are more than this model was trained on; a cache of 16 and blocks of 64 are not."""
    prompt = [1, 2, 3] * 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvjax.generate(tiny, prompt, "streaming_llm", 16, prefill_block=64, **OPTIONS)
    with pytest.warns(UserWarning, match="beyond the 256 this model was trained on"):
        kvjax.generate(tiny, prompt, "snapkv", 40, prefill_block=64, **OPTIONS)
