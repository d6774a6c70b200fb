"""Scorers of single tokens with a threshold, against the literal algorithm."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from policies import oracle_surrogates, surrogates
from policies import oracle_thresholded as oracle
from policies.driver import TINY, as_if_alone, make_case, run
from policies.oracle_arrays import ROPE
from policies.slots import after_prompt, kept

import kvjax
from kvjax.cache import PromptKV, Token, empty, layer_specs
from kvjax.policies import (
    TOVA,
    FastKVzip,
    Full,
    KeyDiff,
    KNorm,
    KVzap,
    PolicyError,
    Random,
    SnapKV,
    get_policy,
    policies,
    prompt_only,
    thresholded,
)
from kvjax.policies.attention_context import AttentionContext
from kvjax.policies.families.noise import uniform
from kvjax.policies.layer import prefill_alone


def drawn(kv_heads: int, seed: int) -> np.ndarray:
    """What `Random` draws for the first positions [K, S]."""
    spec = make_case(0, [64], 8, kv_heads, kv_heads).spec
    return np.asarray(jax.jit(lambda pos: uniform(spec, seed, pos))(np.arange(80, dtype=np.int32)))


CASES = {
    "knorm": (KNorm, oracle.KNorm, {"budget": 16, "threshold": -2.8, "window": 4}, {}, 4, 2),
    "knorm, the latest may be low": (KNorm, oracle.KNorm, {"budget": 12, "threshold": -2.5, "window": 0}, {}, 2, 2),
    "knorm, all of the budget is window": (
        KNorm,
        oracle.KNorm,
        {"budget": 9, "threshold": -9.0, "window": 9},
        {},
        4,
        1,
    ),
    "knorm, room for everything": (KNorm, oracle.KNorm, {"budget": 1.0, "threshold": -2.6, "window": 3}, {}, 4, 2),
    "random, fraction": (
        partial(Random, seed=3),
        oracle.Random,
        {"budget": 0.5, "threshold": 0.3, "window": 1},
        {"drawn": partial(drawn, 3, 3)},
        3,
        3,
    ),
}
FAST = "knorm"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == FAST else pytest.mark.long) for n in CASES])
def test_equals_the_literal_algorithm(name):
    """A ragged batch: what is kept after the prompt and each step, and all outputs, are those of the definition."""
    make, definition, options, told, heads, kv_heads = CASES[name]
    rows, steps = 50, 16
    budget, rest = options["budget"], {key: value for key, value in options.items() if key != "budget"}
    scorer = make(budget=budget, **({"dense_layers": 0} if make is KNorm else {}))
    policy = thresholded(scorer, **rest)
    lengths = np.random.default_rng(len(name)).integers(1, 61, size=rows)
    case = make_case(3, lengths, steps, heads, kv_heads)
    _, outputs, states = run(policy, case, padding=np.nan)
    held = [kept(policy, case, state) for state in states]
    made, dropped = {name: make() for name, make in told.items()}, 0
    for row, length in enumerate(lengths.tolist()):
        text = (x[row, : length + steps] for x in (case.q, case.k, case.v))
        literal = definition(*text, length + steps, length, **options, **made)
        literal.read(length)
        assert held[0][row] == literal.kept(), row
        for i in range(steps):
            np.testing.assert_allclose(outputs[i, row], literal.read(1)[0], atol=3e-5, err_msg=f"row {row}, step {i}")
            assert held[i + 1][row] == literal.kept(), (row, i)
        dropped += sum(len(held[-1][row][head]) < length + steps for head in range(kv_heads))
    assert dropped > rows / 2


def test_tokens_that_leave_the_window_by_hand():
    """Scores -1, 2, -3, 1, 2 by turns, a window of 2, a threshold of 0: of three tokens the first goes, of five the third as well."""
    scores = [-1.0, 2.0, -3.0, 1.0, 2.0, 1.0]
    table = np.asarray([scores], np.float32)

    class Told(Random):
        """Scores that are given."""

        def scores(self, spec, prompt):
            return jnp.resize(table, (1, 1, prompt.size))

        def initial_score(self, spec, token):
            return jnp.asarray(table)[:, token.position[0]][:, None]

    case = make_case(0, [1], 5, 1, 1)
    policy = thresholded(Told(budget=6), threshold=0.0, window=2)
    held = [kept(policy, case, state)[0][0] for state in run(policy, case)[2][1:]]
    assert held == [{0, 1}, {1, 2}, {1, 2, 3}, {1, 3, 4}, {1, 3, 4, 5}]


def test_a_prompt_alone():
    """kvpress's default: nothing more goes while decoding."""
    case = make_case(5, [50, 7], 9)
    policy = thresholded(KNorm(budget=24, dense_layers=0), threshold=-2.8, window=4)
    once = prompt_only(policy)
    states = run(once, case)[2]
    first, later = (kept(once, case, state) for state in (states[0], states[-1]))
    assert first == kept(policy, case, after_prompt(policy, case))
    for row, length in enumerate((50, 7)):
        assert later[row] == [head | set(range(length, length + 9)) for head in first[row]]


# Trained networks, which score a token by the attention inputs with which it comes.


@pytest.mark.parametrize(
    ("make", "network", "threshold", "budget", "rows"),
    [
        (lambda config: KVzap(weights=surrogates.kvzap(config), sinks=0), oracle_surrogates.kvzap, 0.5, 1.0, 50),
        pytest.param(
            lambda config: KVzap(weights=surrogates.kvzap(config, None)),
            oracle_surrogates.kvzap,
            -1.0,
            14,
            50,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda config: FastKVzip(weights=surrogates.gates(config), sinks=0),
            oracle_surrogates.gate,
            0.2,
            1.0,
            50,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda config: KVzap(weights=surrogates.kvzap(config, None)),
            oracle_surrogates.kvzap,
            -1.0,
            14,
            200,
            marks=pytest.mark.long,
        ),
        pytest.param(
            lambda config: FastKVzip(weights=surrogates.gates(config), sinks=0),
            oracle_surrogates.gate,
            0.2,
            1.0,
            200,
            marks=pytest.mark.long,
        ),
    ],
)
def test_predicted_scores_as_kvpress_and_as_the_literal_algorithm(make, network, threshold, budget, rows):
    """Ragged rows: with room for everything, what kvpress masks is gone; within a budget, the lowest scores as well."""
    steps, window = 12, 4
    lengths = np.random.default_rng(5).integers(1, 61, size=rows)
    config = TINY.with_attention(num_kv_heads=2)
    policy = thresholded(make(config).with_budget(budget), threshold, window=window).bind(config)
    case = make_case(6, lengths, steps, 4, 2)
    weights = policy.policy.weights.layers[0]
    size = (len(lengths), case.spec.prompt_len + steps, config.hidden_size)
    x = np.random.default_rng(6).normal(size=size).astype(np.float32)
    held, dropped = kept_by_inputs(policy, case, x, steps), 0
    for row, length in enumerate(lengths.tolist()):
        table = np.stack([network(weights, token) for token in x[row, : length + steps].astype(np.float64)], axis=1)
        text = (a[row, : length + steps] for a in (case.q, case.k, case.v))
        options = {"budget": budget, "threshold": threshold, "window": window, "table": table}
        literal = oracle.Told(*text, length + steps, length, **options)
        gone = [oracle.masked(table[head], length, window, threshold) for head in range(2)]
        literal.read(length)
        for i in range(steps + 1):
            if i:
                literal.read(1)
            assert held[i][row] == literal.kept(), (row, i)
            if budget == 1.0:
                assert held[i][row] == [set(range(length + i)) - gone[head][i] for head in range(2)], (row, i)
        dropped += sum(len(head) < length + steps for head in held[-1][row])
    assert dropped > len(lengths) / 2


def kept_by_inputs(policy, case, x, steps):
    """What is kept after a prompt and each new token, of whose attention the inputs are these."""
    layer, lengths = policy.layer(case.spec), case.lengths
    size, rows = case.spec.prompt_len, np.arange(len(lengths))

    @jax.jit
    def prefill(q, k, v, x):
        prompt = PromptKV.of(ROPE, q, k, v, jnp.asarray(lengths), jnp.asarray(lengths) + steps)
        around = AttentionContext(lambda: x, lambda: jnp.zeros((case.spec.num_heads, case.spec.head_dim, 1)))
        return prefill_alone(layer, prompt, around.with_context({}))[0]

    @jax.jit
    def step(state, q, k, v, pos, x):
        token = Token(q, k, v, pos, ROPE, inputs=x)
        _, state, _ = layer.attend(layer.append(state, token), token, {})
        return layer.compress(state)

    padded = [np.zeros((len(rows), size, *a.shape[2:]), np.float32) for a in (case.q, case.k, case.v)]
    for whole, given in zip(padded, (case.q, case.k, case.v), strict=True):
        whole[:, : given.shape[1]] = given[:, :size]
    state = prefill(*padded, x[:, :size])
    held = [kept(policy, case, state)]
    for i in range(steps):
        at = rows, lengths + i
        state = step(state, case.q[at], case.k[at], case.v[at], lengths + i, x[at])
        held.append(kept(policy, case, state))
    return held


def test_new_tokens_of_a_model_have_the_scores_that_a_prompt_gives_them(tiny):
    """Nothing is evicted, so the states of a text are the same, prefilled whole, in blocks, or decoded."""
    policy = thresholded(KVzap(weights=surrogates.kvzap(TINY), budget=64), -1e9, window=2)
    options = {"batch": 1, "prompt_len": 40, "max_new_tokens": 16}
    prompt = list(range(20))
    engine = kvjax.Engine(tiny, policy, **options)
    state, _ = engine.prefill([prompt])
    first = int(state.token[0])
    state, tokens, _ = engine.decode(state, 8)
    text = [*prompt, first, *np.asarray(tokens)[0, :8].tolist()][:28]
    whole, _ = engine.prefill([text])
    blocks, _ = kvjax.Engine(tiny, policy, **options, block=8).prefill([text])
    for decoded, *others in zip(state.caches, whole.caches, blocks.caches, strict=True):
        for other in others:
            np.testing.assert_allclose(
                scores_by_position(decoded)[:, :28], scores_by_position(other)[:, :28], atol=1e-5
            )


def scores_by_position(state):
    """Scores [K, S] of the only row's tokens, in order."""
    pos, score = np.asarray(state.cache.pos)[0], np.asarray(state.score)[0]
    return np.stack([s[np.argsort(np.where(p < 0, 10**6, p), kind="stable")] for p, s in zip(pos, score, strict=True)])


def test_a_layer_alone_says_that_inputs_are_missing():
    policy = thresholded(KVzap(weights=surrogates.kvzap(TINY), budget=20), 0.0, window=4)
    with pytest.raises(PolicyError, match=r"a token has no attention inputs\. Use kvjax\.Engine"):
        run(policy, make_case(0, [9], 2, 4, 2))


ALONE = sorted(name for name, cls in policies().items() if getattr(cls, "scores_alone", False))


@pytest.mark.parametrize("name", ALONE)
def test_who_says_that_scores_stand_alone_has_such_scores(name):
    """Those of a prompt, of its parts, and of its tokens one by one are the same, and attention changes none."""
    policy = policies()[name]()
    case = make_case(1, [40, 40], 4)
    spec, whole = case.spec, np.full(2, 40, np.int32)
    q, k, v = (x[:, :40] for x in (case.q, case.k, case.v))
    of_prompt = jax.jit(lambda *args: policy.scores(spec, PromptKV.of(ROPE, *args)))
    of_token = jax.jit(lambda *args: policy.initial_score(spec, Token(*args, ROPE)))
    scores = np.asarray(of_prompt(q, k, v, whole, whole))
    half = of_prompt(q[:, :20], k[:, :20], v[:, :20], whole // 2, whole)
    np.testing.assert_array_equal(half, scores[..., :20])
    for i in (0, 7, 39):
        one = of_token(q[:, i], k[:, i], v[:, i], np.full(2, i, np.int32))
        np.testing.assert_array_equal(one, scores[..., i])
    scores = to_jax(scores)
    assert policy.update_score(spec, scores, scores, empty(spec, 8)) is scores


def test_memory_is_the_budgets():
    """Whatever scores enough: what is held is known before."""
    sizes = {
        text: get_policy(text).nbytes(TINY, 1, 192, 4096)
        for text in ("thresholded(random:256; threshold=0.5)", "random:256", "full")
    }
    assert sizes["thresholded(random:256; threshold=0.5)"] == sizes["random:256"] < sizes["full"] / 10


def test_text_and_budget():
    made = thresholded(KNorm(budget=64), -12.0, window=8)
    assert made == get_policy("thresholded(knorm:64; threshold=-12; window=8)") == get_policy(str(made))
    assert made == thresholded(KNorm(), -12.0, window=8, budget=64) == get_policy(made, budget=64)
    assert str(made) == "thresholded(knorm:budget=64; threshold=-12.0; window=8)"


def test_statistics_have_the_share_that_each_sequence_keeps(tiny):
    """By the draws of `random`, whose room is for everything, until each sequence ends."""
    prompts = [[5, 9, 2, 7, 7, 1] * 9, [3, 1, 4] * 5, [2, 7, 1, 8]]
    window, threshold = 4, 0.4
    text = f"thresholded(random:1.0; threshold={threshold}; window={window})"
    lengths = [12, 30, 1]
    specs = layer_specs(tiny.config, 1, 64, 32, tiny.dtype)
    draws = [np.asarray(jax.jit(partial(uniform, spec, 0))(np.arange(96, dtype=np.int32))) for spec in specs]

    def wanted(size: int) -> float:
        old = max(size - window, 0)
        counts = [(np.sum(draw[:, :old] >= threshold, axis=-1) + size - old) / size for draw in draws]
        return float(np.mean(counts))

    sizes = [len(prompt) + new - 1 for prompt, new in zip(prompts, lengths, strict=True)]
    together = kvjax.generate(tiny, prompts, text, max_new_tokens=lengths, ignore_eos=True)
    np.testing.assert_allclose(together[0].stats.kept_shares, list(map(wanted, sizes)), rtol=1e-6)
    alone = kvjax.generate(tiny, prompts[1], text, max_new_tokens=lengths[1], ignore_eos=True)
    np.testing.assert_allclose(alone.stats.kept_shares, [wanted(sizes[1])], rtol=1e-6)
    assert together[0].stats.kept_shares[1] == alone.stats.kept_shares[0]

    assert kvjax.generate(tiny, prompts[1], "random:1.0", max_new_tokens=1).stats.kept_shares is None


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        "thresholded(knorm:24,dense_layers=1; threshold=-3; window=4)",
        "by_head(a=thresholded(random:24; threshold=0.4; window=4); b=rkv:16,window=2,every=3; profile=(('a','b'),('b','a')))",
        "offloaded(thresholded(random:24; threshold=0.4; window=4))",
        "pyramid(thresholded(random:24; threshold=0.4; window=4); beta=2)",
    ],
)
def test_it_decodes_within_what_was_predicted(text, tiny):
    """Rows as if alone, in a model."""
    prompts = [[5, 9, 2, 7, 7, 1] * 9, [3, 1, 4], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8] * 2]
    options = {"policy": text, "max_new_tokens": 40, "ignore_eos": True}
    together = as_if_alone(tiny, prompts, **options)
    policy = get_policy(text).bind(tiny.config)
    shapes = tiny.config, 3, 54, 40, tiny.dtype
    assert together[0].stats.cache_bytes == policy.nbytes(*shapes)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        *(
            (partial(thresholded, policy, 0.0), "depend on other tokens")
            for policy in (Full(), TOVA(), KeyDiff(), SnapKV())
        ),
        (lambda: thresholded(KNorm(budget=64), 0.0), "gives 64 slots, but the latest 128 tokens are always kept"),
        (lambda: thresholded(KNorm(), 0.0, window=-1), "window=-1 is too small. Give 0"),
        (lambda: thresholded(KNorm(), float("nan")), "threshold=nan is not valid. Give a number"),
        (lambda: get_policy("thresholded(knorm)"), "threshold= is missing, and thresholded has no default"),
        (lambda: get_policy("thresholded(knorm; threshold=low)"), "threshold='low'"),
    ],
)
def test_what_it_does_not_take(make, says):
    with pytest.raises(PolicyError, match=says):
        make()
