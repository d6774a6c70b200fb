"""Quest against the literal algorithm."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import TINY, Case, compiled, make_case, run
from policies.oracle_arrays import rotate
from policies.oracle_quest import QuestHead, bound

import kvjax
from kvjax import cache
from kvjax.cache import PromptKV, Token, TokenBlock, layer_specs
from kvjax.policies import CateKV, Full, Offloaded, PolicyError, Quest, by_head, offloaded

SMALL = {"budget": 16, "page": 4, "dense_layers": 0}
CONFIGURATIONS = {
    "gqa": (SMALL, 4, 2),
    "mha, the last page always": (SMALL | {"recent": 1}, 3, 3),
    "catekv, sum": ({"budget": 32, "page": 8, "recent": 9, "dense_layers": 0, "gqa": "sum"}, 4, 2),
    "max, pages that do not divide the cache": ({"budget": 17, "page": 5, "dense_layers": 0, "gqa": "max"}, 4, 1),
}
STEPS = 7


@functools.cache
def inputs(heads: int = 4, kv_heads: int = 2) -> Case:
    lengths = np.random.default_rng(7).integers(1, 60, size=32)
    lengths[:4] = 1, 15, 16, 60
    return make_case(3, lengths, STEPS, heads, kv_heads)


@functools.cache
def reader(policy: Quest, spec):
    """What a query at `pos` reads, compiled."""
    return jax.jit(lambda state, q, pos: policy.layer(spec).slots_to_read(state, spec.rope.rotate(q, pos[:, None])))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_equals_the_literal_algorithm(name):
    """A ragged batch, prompts shorter and longer than the budget: bounds, tokens read, outputs at every step."""
    options, heads, kv_heads = CONFIGURATIONS[name]
    policy, case = Quest(**options), inputs(heads, kv_heads)
    group, oracle = heads // kv_heads, {k: v for k, v in options.items() if k != "dense_layers"}
    _, outputs, states = run(policy, case)
    select, selected = reader(policy, case.spec), []
    for i, state in enumerate(states[1:]):
        pos = case.lengths + i
        selected.append(jax.device_get(select(state, case.q[np.arange(32), pos], pos)))
    for row, head in np.ndindex(32, kv_heads):
        literal, length = QuestHead(**oracle), case.lengths[row]
        queries = case.q[row, :, head * group : (head + 1) * group]
        for pos in range(length + STEPS):
            literal.append(case.k[row, pos, head], case.v[row, pos, head])
            i = pos - length
            if i < 0:
                continue
            out, reads = literal.attend(queries[pos])
            np.testing.assert_allclose(outputs[i, row, head * group : (head + 1) * group], out, atol=2e-5)
            index, live = (x.reshape(32, kv_heads, -1, x.shape[-1])[row, head] for x in selected[i])
            got = [sorted(x[m].tolist()) for x, m in zip(index, live, strict=True)]
            assert got == [sorted(read) for read in reads][: len(got)]
        for bounds, of in zip(np.split(np.asarray(states[-1].bounds), 2, axis=-1), (np.min, np.max), strict=True):
            for page in range(-(-len(literal.keys) // policy.page)):
                keys = literal.keys[page * policy.page : (page + 1) * policy.page]
                np.testing.assert_allclose(bounds[row, head, page], of(keys, axis=0), atol=1e-5)


def test_bounds_grow_block_by_block():
    """Blocks begin and end within pages; rows read 0 to 7 tokens of each."""
    policy, case = Quest(**SMALL), inputs()
    layer = policy.layer(dataclasses.replace(case.spec, block=7))
    state, position = jax.jit(layer.init)(), np.zeros(32, np.int32)

    @jax.jit
    def read(state, q, k, v, position, count):
        block = TokenBlock(q, k, v, position, count, position, case.spec.rope)
        return layer.read_block(state, block, {})[1]

    for count in np.random.default_rng(2).integers(0, 8, (6, 32)).astype(np.int32):
        at = np.arange(32)[:, None], position[:, None] + np.arange(7)
        state, position = read(state, *(x[at] for x in (case.q, case.k, case.v)), position, count), position + count
        bounds = np.asarray(state.bounds)
        for row in range(32):
            keys = rotate(case.spec.rope, case.k[row], np.arange(len(case.k[row]))[:, None])[: position[row]]
            for page, start in enumerate(range(0, position[row], 4)):
                low, high = np.split(bounds[row, :, page], 2, axis=-1)
                np.testing.assert_allclose(low, keys[start : start + 4].min(axis=0), atol=1e-5)
                np.testing.assert_allclose(high, keys[start : start + 4].max(axis=0), atol=1e-5)


def test_the_bound_by_hand():
    """Keys (1, -1) and (-1, 2) lie between (-1, -1) and (1, 2): (1, -1) could have 1 + 1 with them, though it has 2 and -3."""
    keys, query = np.asarray([[1.0, -1], [-1, 2]]), np.asarray([1.0, -1])
    assert bound(query, keys) == 2
    policy, case = Quest(**SMALL), make_case(0, [2], 1, heads=1, kv_heads=1)
    state = jax.device_get(jax.jit(policy.layer(case.spec).init)())
    bounds, q = state.bounds.copy(), np.zeros((1, 1, 8), np.float32)
    bounds[0, 0, 0, :2], bounds[0, 0, 0, 8:10], q[0, 0, :2] = [-1, -1], [1, 2], query
    state = state.replace(bounds=bounds, cache=state.cache.replace(seen=np.asarray([2], np.int32)))
    assert np.asarray(jax.jit(policy.layer(case.spec).scores)(state, q))[0, 0, 0] == 2


def test_no_key_is_above_its_pages_bound():
    policy, case = Quest(**SMALL), inputs()
    state = run(policy, case)[2][-1]
    pos = case.lengths + STEPS - 1
    q = np.stack([case.q[row, p] for row, p in enumerate(pos)])
    scores = np.asarray(jax.jit(policy.layer(case.spec).scores)(state, q))
    keys = np.asarray(state.cache.k)
    for row, head in np.ndindex(32, 4):
        products = keys[row, head // 2, : pos[row] + 1] @ q[row, head]
        for page in range(0, len(products), 4):
            assert products[page : page + 4].max() <= scores[row, head, page // 4] + 1e-4


def test_a_page_a_token_reads_the_best_tokens():
    """Where pages are single tokens the bound is the product itself: recall 1 at any budget."""
    policy, case = Quest(budget=9, page=1, dense_layers=0), inputs()
    state = run(policy, case)[2][-1]
    pos = case.lengths + STEPS - 1
    q = np.stack([case.q[row, p] for row, p in enumerate(pos)])
    turned = rotate(case.spec.rope, q, pos[:, None])
    index, live = jax.device_get(jax.jit(policy.layer(case.spec).select)(state, turned.astype(np.float32)))
    for row, head in np.ndindex(32, 4):
        at = np.arange(pos[row] + 1)
        keys = rotate(case.spec.rope, case.k[row, at, head // 2], at)
        true = np.argsort(-(keys @ turned[row, head]), kind="stable")[:9]
        assert set(index[row, head][live[row, head]].tolist()) == set(true.tolist())


def test_only_the_selection_is_read():
    """NaN in every token that is not selected changes nothing, and pages are gathered whole."""
    policy, case = Quest(**SMALL), inputs()
    spec, layer = case.spec, policy.layer(case.spec)
    assert layer.page == 4
    assert Quest(budget=17, page=5, dense_layers=0).layer(spec).page == 1
    _, step = compiled(policy, spec)
    state = run(policy, case)[2][-2]
    pos = case.lengths + STEPS - 1
    args = *(y[np.arange(32), pos] for y in (case.q, case.k, case.v)), pos
    after = jax.jit(lambda state, *args: layer.append(state, Token(*args, spec.rope)))(state, *args)
    index, live = jax.device_get(reader(policy, spec)(after, args[0], args[3]))
    state = jax.device_get(state)
    read = np.zeros(state.cache.pos.shape, bool)
    for row, head in np.ndindex(32, 4):
        read[row, head // 2, index[row, head][live[row, head]]] = True
    assert read.sum() < 0.8 * (state.cache.weight > 0).sum()
    k, v = (np.where(read[..., None], x, np.float32(np.nan)) for x in (state.cache.k, state.cache.v))
    poisoned = state.replace(cache=state.cache.replace(k=k, v=v))
    np.testing.assert_array_equal(step(state, *args)[0], step(poisoned, *args)[0])


def test_first_layers_are_dense():
    case = inputs()
    policy = Quest(**SMALL | {"dense_layers": 1})
    assert policy.layer(case.spec).attention != "sparse"
    assert policy.layer(dataclasses.replace(case.spec, layer=1)).attention == "sparse"
    np.testing.assert_array_equal(run(policy, case)[1], run(Full(), case)[1])
    assert Quest().dense_layers == 2


def test_from_host_memory():
    """Offloaded it gives the same; of what queries select, most is at hand."""
    policy, case = Quest(**SMALL | {"budget": 24, "recent": 5}), inputs()
    state, outputs, _ = run(offloaded(policy), case)
    np.testing.assert_allclose(outputs, run(policy, case)[1], atol=1e-6)
    assert 0 < np.sum(jax.device_get(state.found)) < np.sum(jax.device_get(state.chosen))


def test_adaptive_heads_of_catekv(tiny):
    """CateKV × Quest: consistent heads keep a budget, adaptive heads select pages; offloaded, too."""
    quest = Quest(budget=16, page=8, recent=1, dense_layers=0, gqa="sum")
    labels = (("consistent", "adaptive"), ("adaptive", "consistent"))
    policy = CateKV(budget=16, sinks=2, recent=4, chunk=4, window=4, adaptive=quest, profile=labels)
    bound_policy = policy.bind(TINY)
    assert bound_policy == by_head({"c": bound_policy.groups[0], "a": quest}, [["c", "a"], ["a", "c"]])
    result = kvjax.generate(
        tiny, [[5, 9, 2, 7, 7, 1] * 9, [3, 1, 4]], policy=policy, max_new_tokens=12, ignore_eos=True
    )
    stats = result[0].stats
    assert stats.cache_bytes == bound_policy.nbytes(tiny.config, 2, 54, 12, jnp.float32) < stats.full_cache_bytes
    assert stats.step_bytes_read == bound_policy.bytes_read(tiny.config, 2, 54, 12, jnp.float32)
    far, case = offloaded(policy).bind(TINY), make_case(2, [50, 3, 16], 5)
    assert isinstance(far.groups[1], Offloaded)
    np.testing.assert_allclose(run(far, case)[1], run(bound_policy, case)[1], atol=1e-6)


def test_pages_for_many_more_tokens_than_the_prompts():
    spec = make_case(0, [20], steps=300).spec
    policy = Quest(budget=64, page=16, dense_layers=0)
    inputs = [jax.ShapeDtypeStruct((1, 64, heads, 8), jnp.float32) for heads in (4, 2, 2)]
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    state, _ = jax.eval_shape(
        lambda *args: policy.layer(spec).prefill(PromptKV.of(spec.rope, *args), {}), *inputs, lengths, lengths
    )
    assert state.bounds.shape == (1, 2, (64 + 300 + 20) // 16, 2 * 8)


def test_bytes_read_are_fewer_than_held():
    """By hand: 2 layers of which 1 is sparse; 4 heads gather 64 slots of 2 × 16 floats, and 66 pages have bounds in 2 heads."""
    policy = Quest(budget=64, dense_layers=1)
    read = policy.bytes_read(TINY, 1, 1000, 32, jnp.float32)
    spec = layer_specs(TINY, 1, 1000, 32, jnp.float32)[0]
    pages = cache.round_slots(spec.max_tokens) // 16
    full = Full().bytes_read(TINY, 1, 1000, 32, jnp.float32) // 2
    assert read == (4 * 64 + 2 * pages) * 2 * 16 * 4 + full < policy.nbytes(TINY, 1, 1000, 32, jnp.float32)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 15}, "need 16"),
        ({"budget": 47, "recent": 2}, "2 are always read"),
        ({"gqa": "mean"}, "'query_head', 'sum', 'max'"),
        ({"page": 0}, "page=0"),
        ({"recent": -1}, "recent=-1"),
    ],
)
def test_bad_hyperparameters(options, says):
    with pytest.raises(PolicyError, match=says):
        Quest(**options)
