"""PyramidKV's budgets, and other policies with them. What SnapKV does with a budget is tested with SnapKV."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from policies import oracle_scoring as oracle
from policies.driver import Case, make_case, run
from policies.slots import kept

import kvjax
from kvjax.cache import bucket
from kvjax.policies import H2O, ChunkKV, Full, PolicyError, PyramidKV, SnapKV, StreamingLLM, pyramid
from kvjax.policies.transforms.pyramid import layer_budgets

SPEC = make_case(0, [1], 1).spec


def layer(spec, index: int, num_layers: int, **changes):
    return dataclasses.replace(spec, layer=index, num_layers=num_layers, **changes)


@functools.partial(jax.jit, static_argnums=(0, 1))
def rows_of(policy, specs, lengths):
    return jnp.stack([policy.row_budgets(spec, lengths, lengths) for spec in specs])


def budgets_of(policy, specs, lengths) -> np.ndarray:
    """Budgets [L, B] of rows of these lengths in layers."""
    return np.asarray(rows_of(policy, specs, lengths))


def test_published_example():
    """2048 slots in the average of 32 layers: 3978 beside the window in the first, 125 fewer in each, 103 in the last."""
    policy = PyramidKV(budget=2048, window=8)
    lengths = to_jax([32_768], jnp.int32)
    budgets = [n.item() - 8 for n in budgets_of(policy, tuple(layer(SPEC, i, 32) for i in range(32)), lengths)]
    assert budgets == list(range(3978, 102, -125))
    assert sum(budgets) == 65_296


@pytest.mark.parametrize(
    ("budget", "window", "beta", "num_layers"), [(64, 8, 20, 6), (40, 32, 4, 5), (300, 1, 1, 2), (10, 2, 20, 30)]
)
def test_budgets_are_the_published_ones(budget, window, beta, num_layers):
    """Prompts of every length up to 1024, in every layer."""
    policy = PyramidKV(budget=budget, window=window, beta=beta)
    lengths = np.arange(1, 1025)
    specs = [layer(SPEC, i, num_layers, prompt_len=1024) for i in range(num_layers)]
    tokens = to_jax(lengths, jnp.int32)
    got = np.minimum(budgets_of(policy, tuple(specs), tokens), lengths)
    for length in lengths:
        expected = oracle.pyramid(budget, length, window, beta, num_layers)
        assert got[:, length - 1].tolist() == expected
    for spec, row in zip(specs, got, strict=True):
        assert policy.max_budget(dataclasses.replace(spec, batch=2)) == row.max()
        of_bucket = row[[bucket(length) == 768 for length in lengths.tolist()]]
        assert policy.max_budget(dataclasses.replace(spec, batch=1, prompt_len=768)) == of_bucket.max()


def test_a_budget_of_all_tokens_is_that_in_every_layer():
    """Rows shorter than the window have room for a window."""
    policy, lengths = PyramidKV(budget=1.0, window=8), np.arange(1, 65)
    specs = tuple(layer(SPEC, i, 3) for i in range(3))
    np.testing.assert_array_equal(budgets_of(policy, specs, to_jax(lengths, jnp.int32)), [np.maximum(lengths, 8)] * 3)


@dataclasses.dataclass(frozen=True)
class Upper(Case):
    """A layer that is not the first."""

    @property
    def spec(self):
        return layer(super().spec, 1, 3)


def test_equals_the_definition_in_an_upper_layer():
    policy = PyramidKV(budget=16, window=4, beta=3)
    lengths = np.random.default_rng(5).integers(3, 64, size=32)
    case = Upper(**vars(make_case(9, lengths, 4)))
    _, outputs, states = run(policy, case)
    held = kept(policy, case, states[0])
    for row, length in enumerate(lengths.tolist()):
        budget = oracle.pyramid(16, length, 4, 3, 3)[1]
        literal = oracle.SnapKV(*(x[row, : length + 4] for x in (case.q, case.k, case.v)), length, budget)
        assert held[row] == literal.prefill()
        for i in range(4):
            np.testing.assert_allclose(outputs[i, row], literal.step(length + i), atol=2e-5)


@pytest.mark.parametrize("budget", [512, 0.125])
def test_layers_have_shapes_of_their_own_at_4k(tiny, budget):
    """Upper layers hold less, in bytes; all together hold what SnapKV would, but for rounding slots up."""
    config = tiny.config.with_depth(8)
    policy = PyramidKV(budget=budget)
    slots = [policy.layer(layer(SPEC, i, 8, prompt_len=4096, new_tokens=8)).capacity for i in range(8)]
    assert slots == sorted(slots, reverse=True)
    assert len(set(slots)) == 8
    assert slots[0] > 10 * slots[-1]
    assert policy.nbytes(config, 1, 4096, 8) == pytest.approx(
        SnapKV(budget=budget).nbytes(config, 1, 4096, 8), rel=0.05
    )


def test_a_batch_may_hold_short_rows():
    """Then each layer has room for a prompt that is kept whole."""
    policy = PyramidKV(budget=512)
    last = layer(SPEC, 7, 8, prompt_len=4096, new_tokens=8)
    assert policy.layer(dataclasses.replace(last, batch=2)).capacity >= 512 + 8 > policy.layer(last).capacity


def test_a_prompt_may_be_much_shorter_than_its_engine_is_for(tiny):
    """Within the budget it is kept whole in every layer, as are new tokens, in the only row of a batch."""
    engine = kvjax.Engine(tiny, PyramidKV(budget=64), prompt_len=200, max_new_tokens=16)
    state, _ = engine.prefill([np.random.default_rng(0).integers(0, 64, 60).tolist()])
    state, *_ = engine.decode(state, 16)
    for slots in engine.slots(state):
        assert np.asarray(slots.live).sum(axis=-1).tolist() == [[76, 76]]


def test_budgets_for_any_policy():
    assert sum(layer_budgets(2048, 32, window=8)) == 65_296 + 32 * 8
    assert layer_budgets(2048, 32, window=8)[0] == 3986
    assert layer_budgets(100, 1) == [195]
    assert layer_budgets(0.25, 3, beta=4) == [0.4375, 0.25, 0.0625]
    assert layer_budgets(0.75, 3) == [1.0, 0.75, 0.5]
    assert layer_budgets(1.0, 2) == [1.0, 1.0]


def test_pyramid_of_chunks(tiny):
    """Each layer is a `ChunkKV` with a budget of its own, and the whole works."""
    config = tiny.config.with_depth(4)
    policy = pyramid(ChunkKV(budget=64, window=8, chunk=4), beta=4)
    bound = policy.bind(config)
    assert [part.budget for part in bound.layers] == [106, 78, 50, 22]
    result = kvjax.generate(tiny, [1, 2, 3, 4] * 50, policy=policy, max_new_tokens=4, ignore_eos=True)
    assert result.stats.cache_bytes == policy.nbytes(tiny.config, 1, 200, 4, jnp.float32)
    assert policy.info.name == "pyramid(chunkkv)"


def test_what_cannot_be_divided(tiny):
    with pytest.raises(PolicyError, match="'full' has no budget"):
        pyramid(Full())
    with pytest.raises(PolicyError, match="beta=0"):
        pyramid(H2O(), beta=0)
    with pytest.raises(PolicyError, match="bind"):
        pyramid(H2O()).layer(SPEC)
    with pytest.raises(PolicyError, match="beta=0"):
        PyramidKV(beta=0)
    with pytest.raises(PolicyError, match="sinks"):  # the last layer's 2 slots
        pyramid(StreamingLLM(budget=40)).bind(tiny.config)
