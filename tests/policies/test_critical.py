"""CriticalKV's two stages against the literal algorithm, alone and within a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from policies import oracle_critical as oracle
from policies import oracle_scoring as scoring
from policies.driver import TINY, make_case, run
from policies.slots import kept

import kvjax
from kvjax.analysis.recording import record
from kvjax.conversion.quantised import to_int8
from kvjax.policies import (
    AdaKV,
    ChunkKV,
    Critical,
    ExpectedAttention,
    Full,
    KVzip,
    PolicyError,
    PyramidKV,
    SnapKV,
    TreeKV,
    by_head,
    critical,
    get_policy,
)
from kvjax.policies.attention_context import AttentionContext
from kvjax.policies.budget import budget_tokens
from kvjax.policies.transforms.critical import projected_sizes

# Cases worked out by hand.


def test_a_large_value_is_kept_by_hand():
    """Of four tokens two: the first by its score, and then the last, whose value is eight times the others'."""
    scores, sizes = np.asarray([0.5, 0.3, 0.15, 0.05]), np.asarray([1, 1, 1, 8])
    np.testing.assert_allclose((scores + 1e-4) * sizes, [0.5001, 0.3001, 0.1501, 0.4008])
    assert oracle.survivors(scores, sizes, 2) == [0, 3]
    assert oracle.survivors(scores, np.ones(4), 2) == [0, 1]
    assert oracle.survivors(scores, sizes, 2, share=1.0) == [0, 1]


def test_sizes_of_projected_values():
    random, spec = np.random.default_rng(0), make_case(0, [1], 1).spec
    matrix, values = random.normal(size=(4, 8, 20)).astype(np.float32), random.normal(size=(2, 150, 2, 8))
    around = AttentionContext(lambda: jnp.zeros((1, 1, 1)), lambda: jnp.asarray(matrix))
    got = np.asarray(jax.jit(lambda values: projected_sizes(spec, around, values))(values.astype(np.float32)))
    for row, head in np.ndindex(2, 2):
        want = oracle.sizes(values[row, :, head], matrix[2 * head : 2 * head + 2])
        np.testing.assert_allclose(got[row, head], want, rtol=1e-5)


# Random cases against the oracle: a layer without a model, where values count as they are.

CONFIGURATIONS = {
    "gqa": ({"budget": 14, "window": 4}, {}, 4, 2),
    "mqa, a quarter by scores": ({"budget": 20, "window": 2}, {"share": 0.25, "epsilon": 0.01}, 4, 1),
    "mha, a fraction, all by values": ({"budget": 0.4, "window": 1, "pool": None}, {"share": 0.0}, 3, 3),
    "all by scores": ({"budget": 12, "window": 3}, {"share": 1.0}, 4, 2),
}
STEPS = 2
FAST = "gqa"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == FAST else pytest.mark.slow) for n in CONFIGURATIONS])
def test_equals_the_literal_algorithm(name):
    """A ragged batch, prompts shorter and longer than the budget: kept tokens, and those that come after them."""
    options, stages, heads, kv_heads = CONFIGURATIONS[name]
    inner = SnapKV(**options)
    policy = critical(inner, **stages)
    lengths = np.random.default_rng(len(name)).integers(3, 64, size=52)
    case = make_case(8, lengths, STEPS, heads, kv_heads)
    held = [kept(policy, case, state) for state in run(policy, case, padding=np.nan)[2]]
    for row, length in enumerate(lengths.tolist()):
        budget = budget_tokens(inner.budget, length + STEPS)
        literal = scoring.SnapKV(*(x[row, : length + STEPS] for x in (case.q, case.k, case.v)), length, budget)
        vars(literal).update(window=inner.window, pool=inner.pool, kernel=inner.kernel)
        literal.prefill()
        for head in range(kv_heads):
            weights = np.abs(case.v[row, :length, head].astype(np.float64)).sum(axis=-1)
            # Sums over the observing queries, of which SnapKV takes the mean; beside epsilon that matters.
            scores = np.asarray(literal.prompt_scores(head)[:length], np.float64) / min(inner.window, length)
            want = oracle.survivors(scores, weights, budget, last=inner.window, **stages)
            for i, heads_kept in enumerate(held):
                assert heads_kept[row][head] == {*want, *range(length, length + i)}
    if name == "all by scores":
        assert held[-1] == kept(inner, case, run(inner, case)[0])


# Within a model.


@pytest.mark.parametrize("kind", ["floats", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_model_brings_its_output_projection(kind, tiny):
    """What is kept follows from the layer's own matrix, of weights in 8 bits, too: values alone would give another choice."""
    inner = SnapKV(budget=12, window=2, pool=None)
    policy = critical(inner, share=0.25)
    params = tiny if kind == "floats" else quantised(tiny)
    random = np.random.default_rng(2)
    prompts = [random.integers(0, 64, size=n).tolist() for n in (50, 9, 31)]
    engine = kvjax.Engine(params, policy, batch=3, prompt_len=50, max_new_tokens=4)
    state, _ = engine.prefill(prompts)
    own = zip(engine.layers, state.caches, strict=True)
    held = [jax.device_get(jax.jit(layer.view)(cached)) for layer, cached in own]
    differ = 0
    for row, prompt in enumerate(prompts):
        for layer, recorded in enumerate(record(params, prompt)):
            slots = held[layer]
            matrix = params.layers[layer].attn.o
            matrix = np.asarray(matrix if kind == "floats" else matrix.dequantized(jnp.float32), np.float64)
            output = matrix.T.reshape(4, 16, -1)
            for head in range(2):
                pos = slots.pos[row, head]
                logits = np.einsum("wgh,th->wgt", recorded.q[-2:, 2 * head : 2 * head + 2], recorded.k[:, head]) / 4
                logits[0, :, -1] = -np.inf  # the newest token is after the first of the two
                probs = np.exp(logits - logits.max(axis=-1, keepdims=True))
                scores = (probs / probs.sum(axis=-1, keepdims=True)).mean(axis=(0, 1))
                values = recorded.v[:, head].astype(np.float64)
                weights = oracle.sizes(values, output[2 * head : 2 * head + 2])
                want = oracle.survivors(scores, weights, 12, last=2, share=0.25)
                assert sorted(pos[slots.weight[row, head] > 0].tolist()) == want
                differ += want != oracle.survivors(scores, np.abs(values).sum(axis=-1), 12, last=2, share=0.25)
    assert differ


def quantised(params):
    """The model with its output projections in 8 bits."""
    layers = [
        layer.replace(attn=layer.attn.replace(o=jax.tree.map(to_jax, to_int8(np.asarray(layer.attn.o)))))
        for layer in params.layers
    ]
    return params.replace(layers=tuple(layers))


@pytest.mark.slow
def test_read_in_blocks_it_has_the_projection_of_each(tiny):
    """One block that holds a whole prompt is the prompt read whole."""
    prompt = np.random.default_rng(2).integers(0, 64, size=60).tolist()
    policy, options = critical(SnapKV(budget=12, window=2)), {"prompt_len": 64, "max_new_tokens": 4}
    states = [kvjax.Engine(tiny, policy, **options, block=block).prefill([prompt])[0] for block in (None, 64)]
    for one, other in zip(*(state.caches for state in states), strict=True):
        np.testing.assert_array_equal(one.pos, other.pos)


def test_parts_of_heads_have_their_own_projections(tiny):
    """`by_head` with the same policy in both parts keeps what the policy alone does."""
    prompt = np.random.default_rng(2).integers(0, 64, size=50).tolist()
    policy = critical(SnapKV(budget=12, window=2), share=0.25)
    parts = by_head({"a": policy, "b": policy}, [["b", "a"], ["a", "b"]])
    found = []
    for each in (policy, parts):
        engine = kvjax.Engine(tiny, each, prompt_len=50, max_new_tokens=4)
        state, _ = engine.prefill([prompt])
        own = zip(engine.layers, state.caches, strict=True)
        slots = [jax.jit(layer.view)(cached) for layer, cached in own]
        found.append([np.sort(np.asarray(own.pos), axis=-1)[..., -12:].tolist() for own in slots])
    assert found[0] == found[1]


def test_memory_is_the_policys():
    for inner in (SnapKV(budget=500), PyramidKV(budget=0.2), ExpectedAttention(budget=300)):
        shape = TINY, 2, 3000, 16
        assert critical(inner).nbytes(*shape) == inner.nbytes(*shape)


def test_compositions_are_weighed_part_by_part():
    bound = get_policy("critical(pyramid(snapkv:64; beta=4))").bind(TINY.with_depth(2))
    assert all(type(policy) is Critical for policy in bound.layers)
    assert bound.bind(TINY) == bound


@pytest.mark.parametrize("policy", [Full(), TreeKV(budget=64), AdaKV(), ChunkKV(), KVzip(scope="head")], ids=str)
def test_policies_that_keep_others_than_the_highest_are_refused(policy):
    with pytest.raises(PolicyError, match=r"critical\(.*does not keep each head's highest scores"):
        critical(policy).bind(TINY)


@pytest.mark.parametrize(
    ("options", "says"), [({"share": 1.5}, "share=1.5 is out of range. Give 0 to 1"), ({"epsilon": -1.0}, "Give 0")]
)
def test_bad_hyperparameters(options, says):
    with pytest.raises(PolicyError, match=says):
        critical(SnapKV(), **options)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_of_the_budget_may_be_of_one_stage(share):
    assert critical(SnapKV(), share=share).share == share
