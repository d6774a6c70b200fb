"""RocketKV against the literal algorithm."""

import dataclasses

import jax
import numpy as np
import pytest
from policies import oracle_scoring as scoring
from policies.driver import TINY, Case, make_case, run
from policies.oracle_rocketkv import RocketHead, Split, split
from policies.slots import kept

import kvjax
from kvjax.cache import LayerSpec, PromptKV
from kvjax.config import ModelConfig, RopeConfig
from kvjax.policies import Full, PolicyError, RocketKV, chunkkv, critical, offloaded, quantized, recompress, then
from kvjax.policies.budget import budget_tokens
from kvjax.policies.families.staged import StagedLayer
from kvjax.policies.rocketkv import HybridLayer, page_size, tokens_left

CONFIGURATIONS = {
    "gqa": ({"budget": 6, "window": 3, "kernel": 5}, 4, 2, 6),
    "mqa, a fraction": ({"budget": 0.1, "window": 4, "kernel": 9}, 4, 1, 3),
    "mha, one page a token": ({"budget": 40, "window": 2, "kernel": 1, "pool": None}, 2, 2, 4),
    "more new tokens than are left": ({"budget": 4, "window": 3, "kernel": 3}, 4, 2, 14),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "gqa" else pytest.mark.slow) for n in CONFIGURATIONS]
)
def test_equals_the_literal_algorithm(name):
    """Ragged rows, shorter and longer than the budget: what is kept, pages' bounds, tokens read, and outputs."""
    options, heads, kv_heads, steps = CONFIGURATIONS[name]
    policy, group = RocketKV(**options), heads // kv_heads
    lengths = np.random.default_rng(len(name)).integers(1, 96, size=60)
    lengths[:3] = 1, 3, 95
    case = make_case(5, lengths, steps, heads, kv_heads)
    state, outputs, states = run(policy, case, padding=np.nan)
    held, reads, ratios = kept(policy, case, state), selected(policy, case, states), set()
    for row, length in enumerate(lengths.tolist()):
        budget = max(budget_tokens(policy.budget, length + steps), 2)
        sizes = split(length + steps, steps, budget, 8, policy.window)
        ratios.add((sizes.page, sizes.channels))
        literal = scoring.SnapKV(*(x[row, : length + steps] for x in (case.q, case.k, case.v)), length, sizes.prompt)
        vars(literal).update(window=policy.window, pool=policy.pool, kernel=policy.kernel)
        left = literal.prefill()
        for head in range(kv_heads):
            assert held[row][head] == {*left[head], *range(length, length + steps)}
            store = RocketHead(sizes)
            for pos in [*sorted(left[head]), *range(length, length + steps)]:
                store.keys.append(literal.turned[pos, head])
                store.values.append(literal.v[pos, head])
                if (step := pos - length) < 0:
                    continue
                mine = slice(head * group, (head + 1) * group)
                want, read = store.attend(literal.asking[pos, mine])
                assert reads[step][row][head] == set(read)
                np.testing.assert_allclose(outputs[step, row, mine], want, atol=3e-5)
            bounds = np.asarray(state.inner.bounds)[row, head]
            for page in range(-(-len(store.keys) // sizes.page)):
                keys = store.keys[page * sizes.page : (page + 1) * sizes.page]
                wanted = np.concatenate([np.min(keys, axis=0), np.max(keys, axis=0)])
                np.testing.assert_allclose(bounds[:, page], wanted, atol=1e-5)
    assert len({page for page, _ in ratios}) > ("token" not in name)
    assert len(ratios) > 2


def selected(policy: RocketKV, case: Case, states: list) -> list[list[list[set[int]]]]:
    """Which ranks are read in each step, by row and head."""
    layer = policy.layer(case.spec)
    assert isinstance(layer, StagedLayer)
    assert isinstance(layer.second, HybridLayer)
    select = jax.jit(lambda state, q, pos: layer.second.select(state, case.spec.rope.rotate(q, pos[:, None])))
    found, rows = [], np.arange(len(case.lengths))
    for i, state in enumerate(states[1:]):
        pos = case.lengths + i
        index, valid = jax.device_get(select(state.inner, case.q[rows, pos], pos))
        found.append(
            [[set(x[m].tolist()) for x, m in zip(*row, strict=True)] for row in zip(index, valid, strict=True)]
        )
    return found


def test_the_papers_example():
    """A ratio of 64 is split into 10.3 and 6.2, and that into pages of 3 and a third less than half of the channels (section 3.6)."""
    tokens, budget = 65536, 1024
    left = int(tokens_left(budget, tokens)[tokens])
    assert left == int(tokens / 64**0.56)
    assert tokens / left == pytest.approx(10.3, abs=0.05)
    assert left / budget == pytest.approx(6.2, abs=0.05)
    assert split(tokens, 256, budget, 128, 32) == Split(left - 256, 3, 61, 512)
    assert int(tokens_left(512, 32768)[32768]) == 3191  # "3.2k of 32k" in the docstring
    assert page_size(np.asarray([left]), budget, 9, np).tolist() == [3]


@pytest.mark.parametrize("budget", [2, 7, 100, 800, 0.02, 0.3])
def test_sizes_cover_all_rows(budget):
    """Of every length, with the numbers of new tokens that a row may have: its pages, channels, tokens read and slots fit."""
    together = LayerSpec(4, 2, 16, prompt_len=768, new_tokens=64, batch=2)
    alone = dataclasses.replace(together, batch=1)
    for spec in (together, alone):
        policy = RocketKV(budget=budget)
        layer = policy.layer(spec)
        assert isinstance(layer, StagedLayer)
        second = layer.second
        for length in range(spec.shortest_prompt, 769, 7):
            for new in (0, 1, 30, 64):
                row = split(length + new, new, max(budget_tokens(budget, length + new), 2), 16, 32)
                assert row.prompt <= second.spec.prompt_len
                assert row.page <= second.sizes.page
                assert -(-(row.prompt + new) // row.page) <= second.sizes.pages
                assert row.channels <= second.channels
                assert row.read <= second.selection_shape[1]
    assert alone.shortest_prompt == 513


def test_a_step_reads_as_much_as_the_budget_has():
    """Long rows: keys and values of about t tokens, half of them as bounds. The prompt's memory falls by the first stage's ratio."""
    spec = LayerSpec(32, 8, 128, prompt_len=32768, new_tokens=256, dtype="bfloat16")
    layer = RocketKV(budget=512).layer(spec)
    assert layer.bytes_read == pytest.approx(512 * 8 * 2 * 128 * 2, rel=0.1)
    assert layer.max_kept < 33024 / 8


def test_rows_within_the_budget_read_everything():
    case = make_case(2, [50, 9, 33], 4)
    assert not isinstance(RocketKV(budget=100, window=4).layer(case.spec), StagedLayer)
    short = case.rows(slice(1, 2))
    together = run(RocketKV(budget=20, window=4, kernel=3), case)[1]
    np.testing.assert_allclose(together[:, 1:2], run(Full(), short)[1], atol=2e-6)


def test_rows_that_decode_fewer_tokens_keep_more_of_their_prompt():
    """A row's own number of new tokens counts, not what there is room for."""
    case, policy = make_case(3, [90, 90], 30), RocketKV(budget=16, window=4, kernel=3)
    spec, new = case.spec, np.asarray([8, 30], np.int32)
    texts = (np.pad(x[:, :90], ((0, 0), (0, spec.prompt_len - 90), (0, 0), (0, 0))) for x in (case.q, case.k, case.v))

    @jax.jit
    def held(q, k, v, lengths, total):
        return policy.layer(spec).prefill(PromptKV.of(spec.rope, q, k, v, lengths, total), {})[0].inner.cache.count

    counts = held(*texts, case.lengths, case.lengths + new)
    assert np.asarray(counts)[:, 0].tolist() == [split(90 + n, n, 16, 8, 4).prompt for n in new.tolist()] == [43, 30]


def test_less_memory_and_fewer_reads():
    shapes = {"batch": 2, "prompt_len": 700, "max_new_tokens": 20, "dtype": np.float32}
    policy = RocketKV(budget=16)
    assert policy.nbytes(TINY, **shapes) < 0.25 * Full().nbytes(TINY, **shapes)
    assert policy.bytes_read(TINY, **shapes) < 0.5 * policy.nbytes(TINY, **shapes)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda policy: recompress(policy, every=64),
        critical,
        chunkkv,
        quantized,
        offloaded,
        lambda policy: then(policy, kvjax.policies.Quest(budget=64, dense_layers=0)),
    ],
    ids=["recompress", "critical", "chunkkv", "quantized", "offloaded", "then"],
)
def test_transforms_of_one_stage_are_refused(wrap):
    with pytest.raises(PolicyError, match="rocketkv"):
        wrap(RocketKV(budget=64)).layer(make_case(0, [2000], 1).spec)


def test_sliding_windows_are_refused():
    config = ModelConfig.uniform("llama", 64, 48, 96, 2, 4, 2, 16, 256, RopeConfig(1e4, 16), windows=(None, 12))
    with pytest.raises(
        PolicyError, match=r"layers with a sliding window are not supported\. Use snapkv with window=32"
    ):
        RocketKV().bind(config)
    assert RocketKV(budget=9).bind(TINY) == RocketKV(budget=9)


def test_budgets_are_at_least_two():
    with pytest.raises(
        PolicyError, match=r"a budget of 1 gives 1 tokens to read, but a step reads half of them, and needs 2"
    ):
        RocketKV(budget=1)
