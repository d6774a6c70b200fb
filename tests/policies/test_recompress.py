"""Prompt scorers applied again and again while decoding, against the literal algorithm."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from policies import oracle_recompress as oracle
from policies.driver import TINY, as_if_alone, kept, make_case, run

from kvjax.policies import (
    H2O,
    TOVA,
    AdaKV,
    ChunkKV,
    Compactor,
    ExpectedAttention,
    Full,
    KNorm,
    Policy,
    PolicyError,
    PyramidKV,
    Random,
    SnapKV,
    TreeKV,
    get_policy,
    offloaded,
    pyramid,
    quantized,
    recompress,
)
from kvjax.policies.families.noise import uniform


def equals(
    policy: Policy, definition: Any, options: dict[str, Any], heads: int, kv_heads: int, rows: int, steps: int
) -> None:
    """A ragged batch: what is kept after the prompt and each step, and all outputs, are those of the definition."""
    lengths = np.random.default_rng(rows + heads).integers(1, 61, size=rows)
    case = make_case(3, lengths, steps, heads, kv_heads)
    _, outputs, states = run(policy, case, padding=np.nan)
    held = [kept(policy, case, state) for state in states]
    for row, length in enumerate(lengths.tolist()):
        text = (x[row, : length + steps] for x in (case.q, case.k, case.v))
        literal = definition(*text, length + steps, length, **options)
        literal.read(length)
        assert held[0][row] == literal.kept(), row
        for i in range(steps):
            np.testing.assert_allclose(outputs[i, row], literal.read(1)[0], atol=3e-5, err_msg=f"row {row}, step {i}")
            assert held[i + 1][row] == literal.kept(), (row, i)


def case_of(cls: Any, definition: Any, every: int, told: dict[str, Any] | None = None, **options: Any) -> Any:
    """A policy and its oracle, with options of the same names but for those that the oracle is told of in another way."""
    same = {name: value for name, value in options.items() if name not in ("observers", "dense_layers")}
    return recompress(cls(**options), every=every), definition, same | {"every": every} | (told or {})


CASES = {
    "snapkv": (case_of(SnapKV, oracle.SnapKV, 5, budget=16, window=4), 4, 2),
    "snapkv, every token": (
        case_of(SnapKV, oracle.SnapKV, 1, budget=17, window=3, pool="avg", kernel=5),
        2,
        2,
    ),
    "snapkv, fraction": (case_of(SnapKV, oracle.SnapKV, 7, budget=0.4, window=2, pool=None), 4, 1),
    "tova": (case_of(TOVA, oracle.TOVA, 4, budget=12), 4, 2),
    "knorm": (case_of(KNorm, oracle.KNorm, 6, budget=12, dense_layers=0), 3, 3),
    "h2o": (case_of(H2O, oracle.H2O, 5, budget=14, observers="last", window=5), 4, 2),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "snapkv" else pytest.mark.slow) for n in CASES])
def test_equals_the_literal_algorithm(name):
    (policy, definition, options), heads, kv_heads = CASES[name]
    equals(policy, definition, options, heads, kv_heads, rows=40, steps=16)


@pytest.mark.slow
def test_a_prompt_that_is_kept_equals_the_literal_algorithm():
    options = {"budget": 16, "window": 4}
    policy = recompress(SnapKV(**options), every=5, prompt="keep")
    equals(policy, oracle.SnapKV, options | {"every": 5, "keeps_prompt": True}, 4, 2, rows=40, steps=16)


def test_random_numbers_stay_with_their_tokens():
    """So after any number of rounds each head holds the tokens that drew its highest numbers, whatever other heads hold."""
    case = make_case(0, [30, 12], 18)
    policy = recompress(Random(budget=8, seed=3), every=4)
    drawn = np.asarray(jax.jit(lambda pos: uniform(case.spec, 3, pos))(np.arange(48, dtype=np.int32)))
    held = kept(policy, case, run(policy, case)[0])
    for row, length in enumerate(case.lengths.tolist()):
        rounded = length + 16  # the last round, 2 tokens before the end
        best = [set(np.argsort(-numbers[:rounded])[:8].tolist()) for numbers in drawn]
        assert held[row] == [head | {rounded, rounded + 1} for head in best]


def test_lengths_by_hand():
    """A prompt of 3000 tokens that is kept, a budget of 2048, rounds of 512: 3512 tokens are held before the first, then 2560."""
    steps, scale = 1536, 16  # in sixteenths, so that it is quick
    case = make_case(0, [3000 // scale], steps // scale, 1, 1)
    policy = recompress(SnapKV(budget=2048 // scale, window=4), every=512 // scale, prompt="keep")
    held = [len(kept(policy, case, state)[0][0]) for state in run(policy, case)[2]]
    before = [held[512 * i // scale - 1] + 1 for i in (1, 2, 3)]
    assert before == [3000 // scale + 512 // scale, 2560 // scale, 2560 // scale]
    assert [held[512 * i // scale] for i in (1, 2, 3)] == [2048 // scale] * 3
    assert max(before) == policy.layer(case.spec).max_kept - (case.spec.prompt_len - 3000 // scale) + 1


def test_memory_is_that_of_a_budget_and_a_round():
    """However much is decoded; a prompt that is kept takes its own length."""
    config = TINY
    sizes = {
        name: get_policy(f"recompress(snapkv:64; {name})").nbytes(config, 1, 192, 4096)
        for name in ("every=64", "every=64; prompt=keep")
    }
    slot = get_policy("snapkv:64").nbytes(config, 1, 192, 64) // 128
    ring = 2 * config.num_layers * 32 * config.num_heads * config.head_dim
    assert sizes["every=64"] == pytest.approx(128 * slot + ring, rel=0.01)
    assert sizes["every=64; prompt=keep"] == pytest.approx(256 * slot + ring, rel=0.01)


def test_the_budget_is_the_policys():
    assert (
        recompress(SnapKV(budget=64), 8)
        == recompress(SnapKV(), 8, budget=64)
        == get_policy("recompress(snapkv:64; every=8)")
    )
    assert get_policy("recompress(snapkv:64; every=8; budget=32)").policy == SnapKV(budget=32)
    assert str(recompress(SnapKV(budget=64), 8)) == "recompress(snapkv:budget=64; every=8)"
    assert get_policy("recompress(snapkv; every=8)", budget=48) == recompress(SnapKV(budget=48), 8)
    for policy in (SnapKV(budget=64, window=8), KNorm(budget=64)):  # which has no window
        layers = pyramid(recompress(policy, 8), beta=4).bind(TINY).layers
        assert [layer.policy.budget for layer in layers] == [
            layer.budget for layer in pyramid(policy, 4).bind(TINY).layers
        ]


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize(
    "text",
    [
        "recompress(pyramidkv:24,window=4,beta=3; every=6)",
        "recompress(chunkkv:24,window=4,chunk=3; every=6)",
        "recompress(random:24; every=6)",
        "recompress(keydiff:24; every=6)",
        "by_head(a=recompress(snapkv:24,window=4; every=6); b=rkv:16,window=2,every=3; profile=(('a','b'),('b','a')))",
        "offloaded(recompress(snapkv:24,window=4; every=6))",
    ],
)
def test_all_that_score_so_decode(text, tiny):
    """Within the memory that was predicted, rows as if alone, and in the end no more than a budget and a round."""
    prompts = [[5, 9, 2, 7, 7, 1] * 9, [3, 1, 4], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8] * 2]
    options = {"policy": text, "max_new_tokens": 40, "ignore_eos": True}
    together = as_if_alone(tiny, prompts, **options)
    stats = together[0].stats
    assert stats.cache_bytes == get_policy(text).nbytes(tiny.config, 3, 54, 40, tiny.dtype)


SAYS = "need more than keys, values and the latest queries"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        *(
            (partial(recompress, policy), SAYS)
            for policy in (Full(), TreeKV(), Compactor(), AdaKV(), ExpectedAttention(), H2O())
        ),
        (lambda: recompress(ChunkKV(reuse=2)), SAYS),
        (lambda: recompress(ChunkKV(rule="kvpress")), SAYS),
        (lambda: recompress(quantized(SnapKV())), SAYS),
        (lambda: recompress(pyramid(SnapKV())), SAYS),
        (lambda: recompress(recompress(SnapKV())), "its own rounds. Give it every=512"),
        (lambda: recompress(get_policy("rkv"), every=9), "'rkv' has its own rounds. Give it every=9"),
        (lambda: recompress(SnapKV(), every=0), "every=0 is too small. Give 1"),
        (lambda: recompress(SnapKV(), budget=0), "budget=0"),
        (lambda: get_policy("recompress(snapkv; prompt=half)"), "prompt='half'; give compress or keep"),
        (lambda: recompress(H2O(observers="last", window=9, recent=0), every=8), "last 9 queries.*Raise every to 9"),
        (lambda: quantized(recompress(SnapKV())).bind(TINY), "changes its cache while decoding"),
    ],
)
def test_what_it_does_not_take(make, says):
    with pytest.raises(PolicyError, match=says):
        make()


def test_a_prompt_that_is_kept_is_not_read_in_blocks():
    spec = make_case(0, [60], 6).spec
    assert recompress(SnapKV(), prompt="keep").layer(spec).reads == "whole"
    assert recompress(PyramidKV()).layer(spec).reads == "blocks"
    assert offloaded(recompress(PyramidKV())).layer(spec).when == "when_full"
