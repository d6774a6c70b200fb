"""TriAttention against the literal algorithm; and the statistics that it takes."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from arrays import to_jax
from policies import oracle_triattention as oracle
from policies.driver import TINY, make_case, rotate, run
from policies.oracle_arrays import ROPE
from policies.surrogates import mean_queries
from policies.test_recompress import equals

import kvjax
from kvjax.cache import PromptKV, Token, TokenBlock
from kvjax.config import ModelConfig, Rope, RopeConfig
from kvjax.policies import Full, MeanQueries, PolicyError, TriAttention, by_head, offloaded
from kvjax.policies.families.trigonometry import frequencies, pairs
from kvjax.policies.profile import load, pack
from kvjax.runtime.compression import Compression, after_block


def policy_of(statistics: Any, **options: Any) -> TriAttention:
    """A policy with these statistics [N, 3, F] in each of two layers."""
    found = np.stack([np.asarray(statistics, np.float32)] * 2)
    profile = MeanQueries.of(found, method="triattention", model="", data="", settings=())
    return TriAttention(profile=profile, **options)


def expected(policy: TriAttention, rope: Rope, key: Any, seen: int) -> float:
    """What the average query of one head makes of one rotated key."""
    key = np.asarray(key, np.float32)[None, None, None]
    spec = dataclasses.replace(make_case(0, [1], 1, 1, 1, key.shape[-1]).spec, rope=rope)
    found = jax.jit(lambda key, seen: policy.expected(spec, key, seen))(key, np.asarray([seen], np.int32))
    return np.asarray(found).item()


def turned_by(rope: Rope, x: Any, pos: int) -> np.ndarray:
    """A vector rotated by the library."""
    return np.asarray(jax.jit(rope.rotate)(np.asarray(x, np.float32), np.int32(pos)))


# The cases worked out by hand.


@pytest.mark.parametrize(("agg", "value"), [("mean", 0.4481), ("max", 1.2087)])
def test_scores_by_hand(agg, value):
    """ω = 0.5, a key at 3 of size 1, 10 tokens seen: cosines of 4, 4.5 and 5.5, and 1.5 - 1 for the spread."""
    np.testing.assert_allclose(np.cos([4, 4.5, 5.5]), [-0.6536, -0.2108, 0.7087], atol=5e-5)
    found = oracle.score(np.ones(1, complex), np.asarray([1.5]), np.ones(1, complex), np.asarray([0.5]), 3, 10, 3, agg)
    assert found == pytest.approx(value, abs=5e-5)
    policy = policy_of([[[1.0], [0.0], [1.5]]], offsets=3, agg=agg)
    key = [np.cos(0.5 * 3), np.sin(0.5 * 3)]
    assert expected(policy, Rope((0.5,)), key, 10) == pytest.approx(value, abs=5e-5)


def test_without_a_mean_the_time_does_not_matter():
    """Keys rank by ρ |k|."""
    policy, rope = policy_of([[[0.0, 0], [0, 0], [2, 3]]]), Rope((1.0, 0.01))
    for seen in (1, 1000):
        assert expected(policy, rope, [3, 0, 4, 1], seen) == pytest.approx(2 * 5 + 3 * 1)


def test_queries_that_are_all_alike_score_their_products():
    """ρ = |μ|: the products of the query, rotated to each position to come, with the key, averaged."""
    query, key = np.random.default_rng(0).normal(size=(2, 8))
    half = query[:4] + 1j * query[4:]
    policy = policy_of([[half.real, half.imag, np.abs(half)]], offsets=5)
    products = [rotate(ROPE, query, 20 + 2**i) @ rotate(ROPE, key, 7) for i in range(5)]
    assert expected(policy, ROPE, rotate(ROPE, key, 7), 20) == pytest.approx(np.mean(products), rel=1e-3)


def test_layouts_by_hand():
    """Channels i and i + half, or 2 i and 2 i + 1; the wrong ones of a key give a number that is nearly the right one."""
    size = [2**0.5] * 2
    policy, rope = policy_of([[[1.0, 1], [1, 1], size]], offsets=1), Rope((1.0, 0.01))
    turned = turned_by(rope, [1, 2, 3, 4], 7)
    assert expected(policy, rope, turned, 7) == pytest.approx(9.8639, abs=5e-3)  # of sizes in float16
    found = oracle.score(
        np.full(2, 1 + 1j), np.asarray(size), np.asarray([1 + 3j, 2 + 4j]), np.asarray([1, 0.01]), 7, 7, 1, "mean"
    )
    assert found == pytest.approx(9.8639, abs=1e-4)
    other = dataclasses.replace(rope, interleaved=True)
    assert expected(policy, other, turned, 7) == pytest.approx(9.9517, abs=5e-3)
    real, imaginary = jax.jit(lambda x: pairs(other, x))(np.asarray([1, 2, 3, 4], np.float32))
    assert (real.tolist(), imaginary.tolist()) == ([1, 3], [2, 4])


def test_channels_that_pass_through_are_pairs_that_do_not_turn():
    rope = Rope((0.5,), amplitude=2.0)
    real, imaginary = jax.jit(lambda x: pairs(rope, x))(np.arange(6, dtype=np.float32))
    assert (real.tolist(), imaginary.tolist()) == ([0, 2, 3], [1, 4, 5])
    omega, factor = frequencies(rope, 6)
    assert (omega.tolist(), factor.tolist()) == ([0.5, 0, 0], [2, 1, 1])


def test_a_factor_of_rotation_is_in_queries_and_keys():
    """YaRN's: scores are 4 times those without, of a rotation by 2; the cached key has it once."""
    policy, key = policy_of([[[1.0, 0.3], [0.5, -1], [2, 3]]]), np.asarray([1.0, 2, 3, 4])
    plain, scaled = Rope((1.0, 0.01)), Rope((1.0, 0.01), amplitude=2.0)
    one, four = (expected(policy, rope, turned_by(rope, key, 5), 9) for rope in (plain, scaled))
    assert four == pytest.approx(4 * one, rel=1e-5)


# Random cases against the oracle.

CONFIGURATIONS = {
    "gqa": ({"budget": 16, "every": 5, "window": 4}, 4, 2),
    "mean of the group": ({"budget": 13, "every": 4, "window": 0, "gqa": "mean"}, 4, 1),
    "mean of the group's statistics": (
        {"budget": 12, "every": 1, "window": 3, "gqa": "mean_stats", "offsets": 6},
        4,
        2,
    ),
    "mha, nearest offsets, max": ({"budget": 0.4, "every": 6, "window": 2, "agg": "max", "offsets": 4}, 2, 2),
}
FAST = "gqa"
SHARED_CASES = ("heads", True), ("union", False), ("heads", False)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == FAST else pytest.mark.slow) for n in CONFIGURATIONS])
def test_equals_the_literal_algorithm(name):
    """Ragged rows, prompts shorter and longer than the budget and a round: what is kept and put out at every step."""
    options, heads, kv_heads = CONFIGURATIONS[name]
    statistics = mean_queries(
        TINY.with_attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=8, rope=RopeConfig(100.0, 8))
    ).layer(0, 8)
    policy = policy_of(statistics, **options)
    equals(policy, oracle.TriAttention, options | {"queries": statistics}, heads, kv_heads, rows=50, steps=12)


@pytest.mark.parametrize(
    ("sets", "keep_prompt"),
    [("union", True), *(pytest.param(*case, marks=pytest.mark.slow) for case in SHARED_CASES)],
)
def test_layers_choose_together_as_the_literal_algorithm(sets, keep_prompt):
    """Ragged rows of three layers with keys and statistics of their own: what every head keeps after every new token."""
    layers, heads, kv_heads, steps = 3, 4, 2, 14
    random = np.random.default_rng(7)
    lengths = np.asarray([1, 3, 9, 20, 31, *random.integers(1, 34, size=45)])
    size = {"budget": 9, "every": 4, "window": 3}
    queries = np.stack([mean_queries(small(heads)).layer(i % 2, 8) for i in range(layers)])
    queries[2] = queries[2][::-1]
    profile = MeanQueries.of(queries, method="triattention", model="", data="", settings=())
    policy = TriAttention(**size, sets=sets, keep_prompt=keep_prompt, profile=profile)
    cases = [make_case(seed, lengths, steps, heads, kv_heads) for seed in range(layers)]
    specs = [dataclasses.replace(case.spec, layer=i, num_layers=layers) for i, case in enumerate(cases)]
    got = decoded(policy, specs, cases, steps)
    every = np.stack([case.k for case in cases])
    for row, length in enumerate(lengths.tolist()):
        expected = oracle.shared_sets(
            every[:, row, : length + steps],
            profile_of(policy, layers),
            length,
            **size,
            sets=sets,
            keep_prompt=keep_prompt,
        )
        for step in range(steps):
            assert [[held[row] for held in layer] for layer in got[step]] == expected[step]


def small(heads: int) -> ModelConfig:
    """A model of two layers with heads as the cases have."""
    return TINY.with_attention(num_heads=heads, num_kv_heads=2, head_dim=8, rope=RopeConfig(100.0, 8))


def profile_of(policy: TriAttention, layers: int) -> np.ndarray:
    """Statistics as they are stored."""
    assert isinstance(policy.profile, MeanQueries)
    return np.stack([policy.profile.layer(i, 8) for i in range(layers)])


def decoded(policy: TriAttention, specs: Any, cases: Any, steps: int) -> list[Any]:
    """Positions that are kept after each new token: [step][layer][head][row]."""
    compression = Compression(policy, tuple(specs))
    lengths = cases[0].lengths
    states = []
    for layer, case in zip(compression.layers, cases, strict=True):
        text = (to_jax(x[:, : layer.spec.prompt_len]) for x in (case.q, case.k, case.v))
        prompt = PromptKV.of(ROPE, *text, to_jax(lengths), to_jax(lengths + steps))
        states.append(jax.jit(lambda prompt, layer=layer: layer.prefill(prompt, {})[0])(prompt))

    @jax.jit
    def step(states: Any, tokens: Any) -> Any:
        held = [
            layer.append(state, token) for layer, state, token in zip(compression.layers, states, tokens, strict=True)
        ]
        return compression.when_full(held)

    found, rows = [], np.arange(len(lengths))
    for i in range(steps):
        at = rows, lengths + i
        tokens = [
            Token(*(to_jax(x[at]) for x in (case.q, case.k, case.v)), to_jax(lengths + i), ROPE) for case in cases
        ]
        states = step(states, tokens)
        pos = [np.asarray(state.cache.pos) for state in states]
        found.append(
            [[[sorted(p[p >= 0].tolist()) for p in each[:, head]] for head in range(each.shape[1])] for each in pos]
        )
    return found


@pytest.mark.parametrize(
    ("sets", "keep_prompt"),
    [
        pytest.param("union", True, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("each", True), *SHARED_CASES)),
    ],
)
def test_blocks_are_the_prompt_until_a_token_is_decoded(sets, keep_prompt):
    """Ragged prompts in blocks of 8, 5 decoded tokens, a block of up to 7 more, and 6 decoded ones: what every head keeps."""
    layers, heads, kv_heads, before, after = 3, 4, 2, 5, 6
    random = np.random.default_rng(9)
    lengths = np.asarray([1, 8, 9, 31, *random.integers(1, 34, size=12)])
    given = np.asarray([7, 0, 4, 3, *random.integers(0, 8, size=12)])
    size = {"budget": 9, "every": 4, "window": 3}
    queries = np.stack([mean_queries(small(heads)).layer(i % 2, 8) for i in range(layers)])
    profile = MeanQueries.of(queries, method="triattention", model="", data="", settings=())
    policy = TriAttention(**size, sets=sets, keep_prompt=keep_prompt, profile=profile)
    cases = [make_case(seed, lengths, before + 7 + after, heads, kv_heads) for seed in range(layers)]
    specs = [dataclasses.replace(case.spec, layer=i, num_layers=layers, block=8) for i, case in enumerate(cases)]
    compression, rows = Compression(policy, tuple(specs)), np.arange(len(lengths))

    @jax.jit
    def step(states: Any, tokens: Any) -> Any:
        held = [x.append(state, token) for x, state, token in zip(compression.layers, states, tokens, strict=True)]
        return compression.when_full(held)

    @jax.jit
    def read(states: Any, parts: Any) -> Any:
        held = [
            x.read_block(state, part, {})[1] for x, state, part in zip(compression.layers, states, parts, strict=True)
        ]
        return after_block(compression.layers, held)

    def blocks(pos: np.ndarray, count: np.ndarray) -> list[TokenBlock]:
        at = rows[:, None], np.minimum(pos[:, None] + np.arange(8), cases[0].q.shape[1] - 1)
        texts = [[to_jax(x[at]) for x in (case.q, case.k, case.v)] for case in cases]
        return [TokenBlock(*text, to_jax(pos), to_jax(count), to_jax(lengths + 18), ROPE) for text in texts]

    def held(states: Any) -> list[Any]:
        pos = [np.asarray(state.cache.pos) for state in states]
        return [[[sorted(p[p >= 0].tolist()) for p in layer[row]] for layer in pos] for row in rows]

    def decode(states: Any, pos: np.ndarray) -> Any:
        return step(states, [Token(*(to_jax(x[rows, pos]) for x in (c.q, c.k, c.v)), to_jax(pos), ROPE) for c in cases])

    states = [layer.init(to_jax(lengths + 18)) for layer in compression.layers]
    for start in range(0, 34, 8):
        states = read(states, blocks(np.minimum(start, lengths), np.clip(lengths - start, 0, 8)))
    found = [(held(states), 0 * lengths)]
    for i in range(before):
        states = decode(states, lengths + i)
        found.append((held(states), 0 * lengths + i + 1))
    states = read(states, blocks(lengths + before, given))
    found.append((held(states), before + given))
    for i in range(after):
        states = decode(states, lengths + before + given + i)
        found.append((held(states), before + given + i + 1))

    for row, (length, more) in enumerate(zip(lengths.tolist(), given.tolist(), strict=True)):
        start, new = length + before, before + more + after
        text = np.stack([case.k[row, : length + new] for case in cases])
        together = {"sets": sets, "keep_prompt": keep_prompt, "block": (start, start + more - 1)}
        expected = oracle.shared_sets(text, profile_of(policy, layers), length, **size, **together)
        whole = [[list(range(length)) for _ in range(kv_heads)] for _ in range(layers)]
        for got, seen in found:
            assert got[row] == (expected[seen[row] - 1] if seen[row] else whole)


@pytest.mark.parametrize(
    "sets", [pytest.param("union", marks=pytest.mark.slow), pytest.param("heads", marks=pytest.mark.long)]
)
def test_a_prompt_in_blocks_generates_what_it_does_whole(tiny, sets):
    """With an engine and in a running batch: nothing is evicted before the first round."""
    policy = TriAttention(budget=8, every=4, window=2, sets=sets, profile=mean_queries(TINY))
    prompts = [np.random.default_rng(i).integers(0, 64, size=n).tolist() for i, n in enumerate((50, 9))]
    options = {"policy": policy, "max_new_tokens": 12, "ignore_eos": True}
    whole = kvjax.generate(tiny, prompts, **options)
    for more in ({}, {"rows": 2}):
        in_blocks = kvjax.generate(tiny, prompts, **options, prefill_block=16, **more)
        assert [x.tokens for x in in_blocks] == [x.tokens for x in whole]


def test_a_layer_alone_spares_its_prompt():
    """Each head for itself, with the budget for the tokens after the prompt."""
    lengths, steps, size = np.asarray([3, 17, 30]), 13, {"budget": 6, "every": 3, "window": 2}
    policy = policy_of(mean_queries(small(4)).layer(0, 8), **size, keep_prompt=True)
    case = make_case(3, lengths, steps, 4, 2)
    got = decoded(policy, [case.spec], [case], steps)
    for row, length in enumerate(lengths.tolist()):
        text = case.k[None, row, : length + steps]
        expected = oracle.shared_sets(text, profile_of(policy, 1), length, **size, sets="each", keep_prompt=True)
        assert [[[held[row] for held in layer] for layer in step] for step in got] == expected
        assert all(set(range(length)) <= set(head) for head in expected[-1][0])


def test_a_model_has_one_set_of_tokens(tiny):
    """All layers and heads of a model that generates."""
    policy = TriAttention(budget=8, every=4, window=2, sets="union", keep_prompt=True, profile=mean_queries(TINY))
    engine = kvjax.Engine(tiny, policy, batch=2, prompt_len=20, max_new_tokens=24)
    state, _ = engine.prefill([list(range(20)), list(range(5))])
    state, *_ = engine.decode(state, 23)
    pos = [np.asarray(own.cache.pos) for own in state.caches]
    for row, prompt in ((0, 20), (1, 5)):
        sets = {tuple(sorted(p[p >= 0].tolist())) for layer in pos for p in layer[row]}
        assert len(sets) == 1
        (kept,) = sets
        assert kept[:prompt] == tuple(range(prompt))
        assert prompt + 8 <= len(kept) < prompt + 12


# Profiles.


def published(tmp_path, config=TINY, **changes: Any) -> str:
    """A file in the format of the authors' statistics, with what changes of its two parts."""
    torch = pytest.importorskip("torch")
    made = mean_queries(config)
    names = "q_mean_real", "q_mean_imag", "q_abs_mean"
    stats = {
        f"layer{i:02d}_head{j:02d}": {name: torch.tensor(x.copy()) for name, x in zip(names, head, strict=True)}
        for i in range(config.num_layers)
        for j, head in enumerate(made.layer(i, config.head_dim))
    }
    saved = {"metadata": {"head_dim": config.head_dim, "rope_style": "half", "model_name": "a model"}, "stats": stats}
    torch.save(saved | changes, tmp_path / "stats.pt")
    return str(tmp_path / "stats.pt")


def test_statistics_of_the_authors_are_read(tmp_path):
    bound = TriAttention(profile=published(tmp_path)).bind(TINY)
    assert isinstance(bound, TriAttention)
    assert isinstance(bound.profile, MeanQueries)
    assert bound.profile.queries == mean_queries(TINY).queries
    assert bound.profile.data == "a model"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stats": []}, "has no 'metadata' and 'stats'"),
        ({"stats": {}}, "has statistics of 0 heads, but the model has 2 x"),
        ({"metadata": {"rope_style": "interleaved"}}, "rope_style='interleaved', but the model's are 'half'"),
    ],
)
def test_statistics_of_another_kind_are_refused(tmp_path, changes, says):
    with pytest.raises(PolicyError, match=says):
        TriAttention(profile=published(tmp_path, **changes)).bind(TINY)


def test_a_file_that_is_none_of_torch_is_refused(tmp_path):
    (tmp_path / "stats.pt").write_bytes(b"no archive")
    with pytest.raises(PolicyError, match=r"not a readable file of torch\.save"):
        TriAttention(profile=str(tmp_path / "stats.pt")).bind(TINY)


def test_a_profile_is_read_as_it_was_written(tmp_path):
    made = mean_queries(TINY)
    made.save(tmp_path / "tri.json")
    assert load(tmp_path / "tri.json", MeanQueries) == made
    assert TriAttention(profile=str(tmp_path / "tri.json")).bind(TINY).profile == made


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TriAttention().bind(TINY), "no profile of the heads"),
        (
            lambda: run(TriAttention(budget=8, window=4, every=4), make_case(0, [20], 1)),
            "not bound to a model",
        ),
        (lambda: TriAttention(profile=mean_queries(TINY)).bind(TINY.with_attention(num_heads=2)), "was made for"),
        (
            lambda: TriAttention(profile=dataclasses.replace(mean_queries(TINY), queries=(pack(b"000"),) * 2)).bind(
                TINY
            ),
            "Check whether the file was truncated",
        ),
        (lambda: TriAttention(offsets=0), "offsets=0 is too small. Give 1"),
        (lambda: TriAttention(budget=127), "127 slots, but the policy always keeps the last 128 tokens"),
        (lambda: TriAttention(gqa="first"), "gqa='first'"),
        (
            lambda: by_head({"a": TriAttention(sets="heads"), "b": Full()}, [["a", "b"]] * 2).layer(
                make_case(0, [9], 1).spec
            ),
            "sets='heads' needs all heads of a layer",
        ),
        (lambda: offloaded(TriAttention(sets="union")).layer(make_case(0, [9], 1).spec), "choose together"),
    ],
)
def test_what_does_not_go(make, says):
    with pytest.raises(PolicyError, match=says):
        make()
