"""Attention Matching against the literal algorithm: of one head, of one layer, and of a model that reads its prompt again."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from policies import oracle_attention_matching as oracle
from policies.driver import TINY, make_case, run
from policies.oracle_arrays import ROPE, rotate, softmax
from policies.oracle_kvzip import parts
from policies.slots import after_prompt, kept

import kvjax
from kvjax.analysis.recording import record
from kvjax.cache import PromptKV, TokenBlock, empty
from kvjax.policies import (
    AttentionMatching,
    Full,
    PolicyError,
    SnapKV,
    by_head,
    by_layer,
    get_policy,
    prefill_alone,
    quantized,
)
from kvjax.policies.attention_matching import matched
from kvjax.policies.budget import budget_tokens
from kvjax.policies.replay import Part


def match(queries, keys, values, count, size=None, padding=0, dtype=np.float32):
    """`matched` of NumPy arrays, with NaN where there are no tokens."""
    queries, keys, values = (np.asarray(x, dtype) for x in (queries, keys, values))
    inside = np.arange(len(keys) + padding) < len(keys)
    keys, values = (np.pad(x, ((0, padding), (0, 0)), constant_values=np.nan) for x in (keys, values))
    given = *map(to_jax, (queries, np.ones(len(queries), bool), keys, values, inside)), jnp.int32(count)
    best, weight, fitted = jax.jit(matched, static_argnums=(6, 7))(*given, size or count, queries.shape[1] ** -0.5)
    return np.flatnonzero(best).tolist(), np.asarray(weight)[:count], np.asarray(fitted)[:count]


def test_one_key_of_two_equal_ones_counts_as_two_by_hand():
    """Keys .9, .9 and -1.1: the first stands for both, with the mean of their values."""
    queries = np.random.default_rng(0).normal(size=(40, 1))
    given = queries, np.asarray([[0.9], [0.9], [-1.1]]), np.asarray([[1.0, 0], [3, 2], [5, 5]]), 2
    for best, weight, values in (match(*given), oracle.matched(*given)):
        assert best == [0, 2]
        np.testing.assert_allclose(weight, [2, 1], rtol=1e-5)
        np.testing.assert_allclose(values, [[2, 1], [5, 5]], rtol=1e-5)


def test_all_keys_stand_for_themselves():
    random = np.random.default_rng(1)
    queries, keys, values = random.normal(size=(40, 8)), random.normal(size=(12, 8)), random.normal(size=(12, 8))
    for best, weight, fitted in (match(queries, keys, values, 12, size=14), oracle.matched(queries, keys, values, 12)):
        assert best == list(range(12))
        np.testing.assert_allclose(weight, 1, rtol=1e-3)
        np.testing.assert_allclose(fitted, values, atol=1e-3)


def test_what_is_fitted_is_nearer_than_what_is_kept():
    """Outputs for queries that were not seen: with weights and values as they were, the error is several times as large."""
    random = np.random.default_rng(2)
    queries, unseen = random.normal(size=(300, 8)), random.normal(size=(50, 8))
    keys, values = random.normal(size=(60, 8)), random.normal(size=(60, 8))
    best, weight, fitted = match(queries, keys, values, 20)

    def outputs(keys, weight, values):
        return np.stack([softmax(keys @ q / np.sqrt(8) + np.log(weight)) @ values for q in unseen])

    whole = outputs(keys, np.ones(60), values)
    errors = [
        np.linalg.norm(outputs(keys[best], w, v) - whole) for w, v in ((np.ones(20), values[best]), (weight, fitted))
    ]
    assert errors[1] < errors[0] / 3


def test_many_queries_are_fitted_as_exactly_as_float32_allows():
    """Singular values are cut by the number of queries, whatever the size of a head."""
    random = np.random.default_rng(4)
    queries, keys, values = random.normal(size=(2000, 64)), random.normal(size=(80, 64)), random.normal(size=(80, 64))

    def error(matched):
        best, weight, fitted = matched
        shares, whole = np.exp(queries @ keys[best].T / 8) * weight, np.exp(queries @ keys.T / 8)
        shares, whole = (x / x.sum(axis=1, keepdims=True) for x in (shares, whole))
        return np.linalg.norm(shares @ fitted - whole @ values) / np.linalg.norm(whole @ values)

    assert error(match(queries, keys, values, 40)) < 1.01 * error(oracle.matched(queries, keys, values, 40))


def test_a_short_prompt_is_fitted_as_alone():
    """Singular values are cut by the number of valid queries, whatever the room for queries of longer prompts."""
    random = np.random.default_rng(4)
    queries, keys, values = random.normal(size=(200, 8)), random.normal(size=(24, 8)), random.normal(size=(24, 8))
    keys[12:] = keys[:12] + 0.1 * keys[12:]

    def fit(room):
        given = np.pad(queries, ((0, room), (0, 0))), np.arange(200 + room) < 200, keys, values, np.ones(24, bool)
        return jax.jit(matched, static_argnums=(6, 7))(*map(to_jax, given), jnp.int32(20), 20, 8**-0.5)

    for alone, beside in zip(fit(0), fit(7800), strict=True):
        np.testing.assert_allclose(beside, alone, rtol=1e-3, atol=1e-3)


def test_queries_that_nobody_asked_and_useless_keys_do_no_harm():
    """Queries that are not there, equal keys, keys that nobody looks at, and fewer queries than keys: numbers all the same."""
    random = np.random.default_rng(3)
    queries, keys, values = random.normal(size=(6, 8)), random.normal(size=(30, 8)), random.normal(size=(30, 8))
    keys[5:9] = keys[4]
    keys[20:] -= 100 * queries.mean(axis=0)
    _, weight, fitted = match(queries, keys, values, 24, size=30, padding=2)
    assert np.isfinite(weight).all()
    assert np.isfinite(fitted).all()
    assert (weight <= np.exp(3) * (1 + 1e-6)).all()
    none = jax.jit(matched, static_argnums=(6, 7))(
        jnp.full((6, 8), jnp.nan), jnp.zeros(6, bool), *map(jnp.float32, (keys, values)), jnp.ones(30, bool), 4, 4, 1.0
    )
    assert all(np.isfinite(np.asarray(x)).all() for x in none[1:])


def test_factorisations_come_one_at_a_time():
    """Of batches of them on a CPU, some that run beside each other have waited for one another for ever."""
    case = make_case(0, [40, 30], 1)
    layer = AttentionMatching(budget=8, chunk=64).layer(case.spec)
    text = *(np.zeros((2, 64, n, 8), np.float32) for n in (4, 2, 2)), to_jax([40, 30]), to_jax([41, 31])
    program = str(jax.make_jaxpr(lambda *x: prefill_alone(layer, PromptKV.of(ROPE, *x), {})[0])(*text))
    made = re.findall(r":f32\[([\d,]+)\] = (?:qr|svd)\[", program)
    assert len(made) > 2
    assert all(shape.count(",") < 2 for shape in made)


def test_reference_queries_are_few_and_zeros_where_none_are():
    """Of 4 parts of 16 tokens a KV head has 128 queries of a group of 2: every fourth of at most 40."""
    case = make_case(0, [16, 5], 0)
    reading, spec = AttentionMatching(budget=14, chunk=16, queries=40).replay, case.spec
    counts, nothing = to_jax(case.lengths), jnp.zeros((), jnp.int32)

    @jax.jit
    def observed(q, k, v):
        block = TokenBlock(q, k, v, jnp.zeros_like(counts), counts, counts, ROPE)
        return reading.observe(spec, Part(empty(spec, 64), block, counts, counts, nothing))

    found, asked = observed(case.q, case.k, case.v)
    assert reading.parts(spec.prompt_len) == 4
    assert np.asarray(asked).tolist() == [[True] * 4, [True] * 2 + [False] * 2]
    every = np.arange(0, 16, 4)
    queries = [rotate(ROPE, row[every], every[:, None]) for row in case.q]
    np.testing.assert_allclose(found, np.where(asked[..., None, None], queries, 0), atol=1e-5)


CONFIGURATIONS = {
    "gqa": ({"budget": 14, "chunk": 9}, 4, 2),
    "mha, a prefix": ({"budget": 12, "chunk": 64, "prefix": 3}, 3, 3),
    "mqa, a fraction": ({"budget": 0.4, "chunk": 16}, 4, 1),
    "gqa, no steps, narrow bounds": ({"budget": 10, "chunk": 20, "steps": 0, "bound": 0.5}, 4, 2),
}
STEPS = 3
FAST = "gqa"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == FAST else pytest.mark.long) for n in CONFIGURATIONS])
def test_equals_the_literal_algorithm(name):
    """A ragged batch that reads again what it had, without words: kept tokens, weights, values, and outputs after them."""
    options, heads, kv_heads = CONFIGURATIONS[name]
    policy = AttentionMatching(**options)
    lengths = np.random.default_rng(len(name)).integers(4, 64, size=55)
    case = make_case(5, lengths, STEPS, heads, kv_heads)
    _, outputs, states = run(policy, case, padding=np.nan)
    held, slots = kept(policy, case, states[0]), jax.device_get(states[0])
    live, weights, fitted = slots.weight > 0, slots.weight, slots.v
    group, prefix = heads // kv_heads, policy.prefix
    for row, length in enumerate(lengths.tolist()):
        budget = budget_tokens(policy.budget, length + STEPS)
        read = [(i, length + j) for part in parts(length, policy.chunk, prefix) for j, i in enumerate(part)]
        for head in range(kv_heads):
            keys = rotate(ROPE, case.k[row, :length, head], np.arange(length))
            best, weight, values = list(range(length)), np.ones(length), case.v[row, :length, head].astype(np.float64)
            if length > budget:
                own, at = case.q[row, :, head * group : (head + 1) * group], np.asarray(read)
                asks = rotate(ROPE, own[at[:, 0]], at[:, 1:]).reshape(-1, own.shape[-1])
                found, w, v = oracle.matched(
                    asks, keys[prefix:], values[prefix:], budget - prefix, policy.steps, policy.bound
                )
                best = [*range(prefix), *(prefix + i for i in found)]
                weight, values = np.concatenate([np.ones(prefix), w]), np.concatenate([values[:prefix], v])
            assert held[row][head] == set(best), (row, head)
            there = live[row, head]
            np.testing.assert_allclose(weights[row, head][there], weight, rtol=1e-3, err_msg=f"{row}, {head}")
            np.testing.assert_allclose(fitted[row, head][there], values, rtol=1e-3, atol=1e-3)
            keys = keys[best]
            for step in range(STEPS):
                at = length + step
                keys = np.concatenate([keys, [rotate(ROPE, case.k[row, at, head], at)]])
                values, weight = np.concatenate([values, case.v[row, at : at + 1, head]]), np.append(weight, 1)
                for n in range(head * group, (head + 1) * group):
                    logits = keys @ rotate(ROPE, case.q[row, at, n], at) / np.sqrt(keys.shape[1])
                    want = softmax(logits + np.log(weight)) @ values
                    np.testing.assert_allclose(outputs[step, row, n], want, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_model_reads_again(tiny):
    """Its own queries of that reading, of ragged rows in two parts; what is kept and with what weights and values."""
    policy, random = AttentionMatching(budget=12, chunk=30, overlap=0), np.random.default_rng(3)
    prompts = [random.integers(0, 62, size=n).tolist() for n in (50, 23, 9)]
    engine = kvjax.Engine(tiny, policy, batch=3, prompt_len=50, max_new_tokens=4)
    state, _ = engine.prefill(prompts, [4] * 3)
    group = tiny.config.num_heads // tiny.config.num_kv_heads
    for row, prompt in enumerate(prompts):
        found = parts(len(prompt), policy.chunk, 0)
        readings = [record(tiny, [*prompt, *(prompt[i] for i in part)]) for part in found]
        for layer, cached in enumerate(state.caches):
            slots = engine.layers[layer].view(cached)
            live, pos, weights, held = (np.asarray(x[row]) for x in (slots.live, slots.pos, slots.weight, slots.v))
            keys, values = (np.asarray(getattr(readings[0][layer], name))[: len(prompt)] for name in ("k", "v"))
            queries = np.concatenate([np.asarray(each[layer].q)[len(prompt) :] for each in readings])
            for head in range(tiny.config.num_kv_heads):
                there = live[head]
                if len(prompt) <= policy.budget:
                    assert there.sum() == len(prompt)
                    continue
                own = queries[:, head * group : (head + 1) * group].reshape(-1, queries.shape[-1])
                best, weight, fitted = oracle.matched(own, keys[:, head], values[:, head], policy.budget)
                assert pos[head][there].tolist() == best
                np.testing.assert_allclose(weights[head][there], weight, rtol=0.02)
                shares = np.exp(own @ keys[best, head].T / np.sqrt(own.shape[1])) * weight
                shares /= shares.sum(axis=1, keepdims=True)
                np.testing.assert_allclose(shares @ held[head][there], shares @ fitted, atol=2e-3)


@pytest.mark.long
def test_fewer_queries_are_every_second_token():
    """As many of a part as are asked for at the most, evenly."""
    lengths = [50, 20]
    case = make_case(7, lengths, 1)
    policies = [AttentionMatching(budget=8, chunk=64, queries=n) for n in (50_000, 64)]
    states = [jax.device_get(after_prompt(policy, case)) for policy in policies]
    assert not np.array_equal(states[0].weight, states[1].weight)
    keys = rotate(ROPE, case.k[0, :50, 0], np.arange(50))
    asks = [rotate(ROPE, case.q[0, i, g], 50 + i) for i in range(0, 50, 2) for g in range(2)]
    best, weight, _ = oracle.matched(np.stack(asks), keys, case.v[0, :50, 0], 8)
    there = states[1].weight[0, 0] > 0
    assert states[1].pos[0, 0][there].tolist() == best
    np.testing.assert_allclose(states[1].weight[0, 0][there], weight, rtol=1e-3)


def test_what_is_dropped_holds_no_memory():
    shape = TINY, 2, 4096, 16
    assert get_policy("attention_matching:0.25").nbytes(*shape) == get_policy("snapkv:0.25").nbytes(*shape)


@pytest.mark.long
def test_layers_that_do_not_read_again_are_as_without_it(tiny):
    snap, options = SnapKV(budget=16, window=4), {"batch": 1, "prompt_len": 40, "max_new_tokens": 4}
    mixed, alone = (
        kvjax.Engine(tiny, policy, **options).prefill([list(range(40))])[0]
        for policy in (by_layer([snap, AttentionMatching(budget=16, chunk=9)]), snap)
    )
    for one, other in zip(jax.tree.leaves(mixed.caches[0]), jax.tree.leaves(alone.caches[0]), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: AttentionMatching(chunk=0), "chunk=0 is too small. Give 1"),
        (lambda: AttentionMatching(queries=0), "queries=0 is too small. Give 1"),
        (lambda: AttentionMatching(bound=-1.0), "bound=-1.0 is too small. Give 0"),
        (lambda: AttentionMatching(budget=4, prefix=9), "4 slots, but the policy always keeps the first 9 tokens"),
        (
            lambda: quantized(AttentionMatching(budget=8)).bind(TINY),
            "fitted weights, which quantised caches do not store",
        ),
        (
            lambda: by_head({"a": AttentionMatching(budget=8), "b": Full()}, [["a", "b"]] * 2).layer(
                make_case(0, [9], 1).spec
            ),
            "reads a prompt again for all heads",
        ),
    ],
)
def test_what_does_not_go(make, says):
    with pytest.raises(PolicyError, match=says):
        make()


def test_a_layer_alone_says_that_nothing_was_read_again():
    case = make_case(0, [20], 1)
    layer = AttentionMatching(budget=8).layer(case.spec)
    with pytest.raises(PolicyError, match="read a second time"):
        layer.prefill(
            PromptKV.of(ROPE, *(to_jax(x[:, :20]) for x in (case.q, case.k, case.v)), *[to_jax([20])] * 2), {}
        )
