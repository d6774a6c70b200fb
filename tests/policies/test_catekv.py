"""CateKV against the literal algorithm, and its memory against the paper's numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import TINY, make_case, run
from policies.oracle_catekv import CateHead
from policies.oracle_catekv import chunk_scores as plain_scores
from policies.slots import after_prompt, kept

import kvjax
from kvjax.cache import PromptKV, layer_specs
from kvjax.config import RopeConfig
from kvjax.models import ModelConfig
from kvjax.policies import CateKV, Full, HeadProfile, Policy, PolicyError, StreamingLLM
from kvjax.policies.catekv import Adaptive, Consistent, Layout, chunk_scores, top_chunks
from kvjax.policies.profile import fingerprint, load

SMALL = {"budget": 24, "sinks": 2, "recent": 4, "chunk": 4, "window": 6}
CONFIGURATIONS = {
    "gqa": ({}, 4, 2, ["consistent", "adaptive"]),
    "mha": ({"eta": 0.5}, 2, 2, ["adaptive", "consistent"]),
    "mqa": ({"chunk": 3}, 4, 1, ["consistent"]),
    "three heads": ({"eta": 0.7}, 6, 3, ["consistent", "adaptive", "consistent"]),
    "budget no multiple of the chunk": ({"budget": 19, "chunk": 5, "eta": 0.3}, 4, 2, ["consistent", "adaptive"]),
    "as printed": ({"order": "sum_then_max", "eta": 0.4}, 4, 2, ["consistent", "adaptive"]),
    "derived regions": ({"budget": 33, "sinks": None, "recent": None, "eta": 0.6}, 4, 2, ["adaptive", "consistent"]),
    "no sinks, nothing recent": ({"sinks": 0, "recent": 0, "window": 16}, 2, 2, ["consistent", "consistent"]),
}


def bound(config: ModelConfig = TINY, **options) -> Policy:
    return CateKV(**options).bind(config)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_equals_the_literal_algorithm(name):
    """A ragged batch, prompts shorter and longer than the budget: kept tokens and outputs after each step."""
    changed, heads, kv_heads, labels = CONFIGURATIONS[name]
    options = SMALL | changed
    config = TINY.with_attention(num_heads=heads, num_kv_heads=kv_heads)
    policy = bound(config, **options, profile=(tuple(labels),) * 2)
    lengths = np.random.default_rng(7).integers(1, 64, size=32)
    case = make_case(3, lengths, steps=3, heads=heads, kv_heads=kv_heads)
    _, outputs, states = run(policy, case)
    group, held = heads // kv_heads, [kept(policy, case, state) for state in states]
    plain = {name: value for name, value in options.items() if value is not None}
    plain = {"sinks": options["budget"] // 32, "recent": options["budget"] // 8} | plain
    for row, length in enumerate(lengths):
        for head, kind in enumerate(labels):
            oracle = CateHead(kind, **plain)
            queries = case.q[row, :, head * group : (head + 1) * group]
            keys, values = case.k[row, :, head], case.v[row, :, head]
            oracle.prefill(queries[:length], keys[:length], values[:length])
            assert held[0][row][head] == set(oracle.held)
            for i in range(case.steps):
                pos = length + i
                oracle.append(keys[pos], values[pos], pos)
                out = oracle.attend(queries[pos], pos)
                np.testing.assert_allclose(outputs[i, row, head * group : (head + 1) * group], out, atol=2e-5)
                assert held[i + 1][row][head] == set(oracle.held)


def test_order_of_max_and_sum():
    """The note's example: two observers, chunks of two. Keys are unit vectors and queries logarithms, so attention is as written."""
    observed = np.asarray([[0.4, 0.1, 0.3, 0.2], [0.1, 0.4, 0.3, 0.2]], np.float32)
    q, k = np.zeros((2, 1, 6, 1, 4), np.float32)
    q[0, 4:, 0], k[0, :4, 0] = np.log(observed), np.eye(4)
    middle = np.asarray([0], np.int32), np.asarray([4], np.int32)
    for order, scores in (("max_then_sum", [0.8, 0.6]), ("sum_then_max", [0.5, 0.6])):
        np.testing.assert_allclose(plain_scores(observed, 2, order), scores, rtol=1e-6)
        lengths, spec = np.asarray([6], np.int32), dataclasses.replace(make_case(0, [6], 1, 1, 1).spec, scale=1.0)

        @jax.jit
        def score(q, k, lengths, middle, order=order, spec=spec):
            prompt = PromptKV.of(RopeConfig(dim=4, theta=100.0).resolve(1), q, k, k, lengths, lengths)
            prompt = dataclasses.replace(prompt, q_rotated=prompt.q, k_rotated=prompt.k)
            return chunk_scores(prompt, spec, Layout(6, 0, 0, chunk=2, window=2, order=order), middle)

        found = np.asarray(score(q, k, lengths, middle))
        np.testing.assert_allclose(2 * found[0, 0, :2], scores, rtol=1e-6)


def test_equal_chunks_are_taken_from_the_left():
    scores = np.asarray([[[1, 2, 2, 1, 9, 2]]], np.float32)
    best = np.asarray(jax.jit(top_chunks)(scores, np.asarray([4], np.int32), np.asarray([3], np.int32)))
    assert np.flatnonzero(best[0, 0]).tolist() == [0, 1, 2]


def test_the_papers_default_is_216_chunks():
    """2048 tokens less 64 sinks and 256 recent ones, in chunks of 8."""
    layout = CateKV()._layout
    assert layout.regions(2048) == (64, 256)
    chunks = jax.jit(Consistent(layout).chosen)(np.asarray([10_000]), np.asarray([2048 - 64 - 256]))
    assert chunks.item() == 216


def test_whole_chunks_are_kept():
    """What lies between sinks, tail and recent tokens is kept or dropped by the chunk, in both kinds of heads."""
    policy = bound(**SMALL, eta=0.5, profile=(("consistent", "adaptive"),) * 2)
    case = make_case(8, [63, 50, 41], steps=1)
    for length, row in zip(case.lengths, kept(policy, case, after_prompt(policy, case)), strict=True):
        chunks = (length - 6) // 4
        for held in row:
            inside = [held & set(range(2 + 4 * i, 6 + 4 * i)) for i in range(chunks)]
            assert {len(chunk) for chunk in inside} == {0, 4}
            assert held >= {0, 1} | set(range(2 + 4 * chunks, length))


# Memory: consistent heads really hold less.

LLAMA = ModelConfig.uniform("llama", 1000, 1024, 256, 20, 32, 8, 128, 2**18, RopeConfig(theta=5e5, dim=128))


def labels(share: float) -> tuple[tuple[str, ...], ...]:
    """Labels for `LLAMA` with this share of its 160 heads adaptive, spread unevenly over layers."""
    flat = ["adaptive"] * round(share * 160) + ["consistent"] * (160 - round(share * 160))
    order = np.random.default_rng(0).permutation(160)
    return tuple(tuple(flat[order[layer * 8 + head]] for head in range(8)) for layer in range(20))


@pytest.mark.parametrize(("r", "eta", "share"), [(0.4, 1.0, 0.409), (0.3, 0.7, 0.221), (1.0, 1.0, 1.0)])
def test_bytes_are_the_papers(r, eta, share):
    """r η + (1 - r) b / n of the full cache, with b = 2048 of n = 131072 tokens, and both computed without a model."""
    policy = CateKV(eta=eta, profile=labels(r))
    held, full = (p.nbytes(LLAMA, 1, 131072, 0) for p in (policy, Full()))
    assert held / full == pytest.approx(share, abs=5e-4)


def test_each_kind_of_head_has_slots_of_its_own():
    spec = layer_specs(TINY, 1, 2048, 32, jnp.float32)[0]
    policy = bound(budget=256, eta=0.5, profile=(("consistent", "adaptive"),) * 2)
    consistent, adaptive = jax.eval_shape(policy.layer(spec).init)
    assert consistent.k.shape == (1, 1, 256 + 32, 16)
    # 8 sinks, 32 recent and half of the 2008 tokens between them make 1044; with a tail of 7, and new tokens, 1080.
    assert adaptive.k.shape == (1, 1, 1088, 16)


@pytest.mark.parametrize("eta", [0.0, 0.13, 0.5, 0.77, 1.0])
@pytest.mark.parametrize("budget", [40, 100, 0.3])
def test_capacity_suffices(eta, budget):
    """No prompt length keeps more than the slots there are, and these are no more than needed, but for a chunk and rounding."""
    layout = CateKV(budget=budget, chunk=8)._layout
    policy = Adaptive(layout, eta)
    spec = layer_specs(TINY, 1, 768, 10, jnp.float32)[0]
    tokens = np.arange(1, 769)
    rows = np.asarray([int(t + 10) * 3 // 10 if budget == 0.3 else budget for t in tokens])
    sinks, recent = layout.regions(rows)
    middle = np.maximum(tokens - sinks - recent, 0)
    chunks = np.floor(eta * (middle // 8) + 1e-9).astype(int)
    held = np.where(tokens <= rows, tokens, sinks + recent + middle % 8 + 8 * chunks)
    assert held.max() + 10 <= policy.layer(spec).capacity <= max(held.max(), rows.max()) + 10 + 8 + 31


def test_capacity_by_hand():
    """Of 58 tokens between 2 sinks and 4 recent ones, half, and half of a tail of 8; then 25 new ones: no slot more than 64."""
    spec = dataclasses.replace(make_case(0, [64], 25).spec, prompt_len=64)
    assert Adaptive(Layout(16, 2, 4, 9, 4, "max_then_sum"), 0.5).layer(spec).capacity == 2 + 4 + 29 + 4 + 25 == 64


# The policy and its profile.


def test_all_adaptive_and_all_kept_is_the_full_cache(tiny):
    """The r = 1, η = 1 case of the note, with a tight budget."""
    policy = CateKV(budget=16, profile=(("adaptive",) * 2,) * 2)
    prompt = [5, 9, 2, 7, 7, 1] * 9
    got, want = (kvjax.generate(tiny, prompt, policy=p, max_new_tokens=12, ignore_eos=True) for p in (policy, "full"))
    assert got.tokens == want.tokens
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=2e-5)


def test_another_policy_for_adaptive_heads(tiny):
    stream = StreamingLLM(budget=12, sinks=2)
    policy = CateKV(budget=16, adaptive=stream, profile=(("consistent", "adaptive"),) * 2)
    assert policy.bind(TINY).groups[1] == stream
    assert len(kvjax.generate(tiny, [1, 2, 3] * 15, policy=policy, max_new_tokens=5, ignore_eos=True).tokens) == 5


def profile(config: ModelConfig = TINY, method: str = "catekv") -> HeadProfile:
    kinds = (("consistent", "adaptive"),) * 2
    return HeadProfile(method, fingerprint(config), "nothing", (("r", 0.5),), ((1.5, 0.5),) * 2, kinds)


def test_a_profile_or_its_file(tmp_path):
    profile().save(tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == profile()
    policies = [CateKV(profile=p).bind(TINY) for p in (profile(), str(tmp_path / "profile.json"), profile().labels)]
    assert policies[0] == policies[1] == policies[2]
    assert policies[0].heads == (((0,), (0,)), ((1,), (1,)))
    assert profile().heads("adaptive") == [(0, 1), (1, 1)]


def test_the_profile_of_another_model_is_refused():
    other = dataclasses.replace(TINY, hidden_size=50)
    with pytest.raises(PolicyError) as error:
        CateKV(profile=profile(other)).bind(TINY)
    assert fingerprint(other) in str(error.value)
    assert fingerprint(TINY) in str(error.value)
    assert "kvjax calibrate catekv" in str(error.value)


def test_the_model_is_known_by_its_shape():
    same = dataclasses.replace(TINY, eos=(3, 4), bos=1, max_position=99)
    assert fingerprint(same) == fingerprint(TINY)
    for change in ({"hidden_size": 50}, {"family": "qwen2"}):
        assert fingerprint(dataclasses.replace(TINY, **change)) != fingerprint(TINY)
    assert fingerprint(TINY.with_attention(rope=RopeConfig(theta=1e5, dim=16))) != fingerprint(TINY)


def test_the_profile_of_another_method_is_refused():
    with pytest.raises(PolicyError, match="the profile is for 'chelsea'"):
        CateKV(profile=profile(method="chelsea")).bind(TINY)


def test_a_model_without_profile():
    with pytest.raises(PolicyError, match=r"no profile .* llama-2x4x2x16-.* `kvjax calibrate catekv"):
        CateKV().bind(TINY)


def test_nothing_runs_unbound():
    with pytest.raises(PolicyError, match=r"bind\(config\)"):
        CateKV().layer(layer_specs(TINY, 1, 64, 8, jnp.float32)[0])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "it has list"),
        ('{"version": 1}', r"it has \['version'\]"),
        (("version", "1", "7"), "version 7"),
        (("scores", "1.5", '"x"'), r"\[layer\]\[head\]"),
        (("labels", '["consistent", "adaptive"]\n', '["consistent"]\n'), r"\[layer\]\[head\]"),
        (("settings", '{"r": 0.5}', "3"), "settings an object"),
    ],
)
def test_damaged_profiles(tmp_path, text, says):
    file = tmp_path / "profile.json"
    profile().save(file)
    whole = file.read_text()
    file.write_text(text if isinstance(text, str) else whole.replace(*text[1:]))
    assert file.read_text() != whole
    with pytest.raises(PolicyError, match=says):
        load(file)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 0}, "budget=0"),
        ({"eta": 1.5}, "eta=1.5"),
        ({"chunk": 0}, "chunk=0"),
        ({"window": 0}, "window=0"),
        ({"sinks": -1}, "sinks=-1"),
        ({"order": "sum"}, "'max_then_sum', 'sum_then_max'"),
        ({"budget": 64, "sinks": 64}, "need 80"),
        ({"eta": 0.5, "adaptive": Full()}, "Give one of them"),
        ({"profile": [["consistent"]]}, "tuple of tuples"),
    ],
)
def test_bad_hyperparameters(options, says):
    with pytest.raises(PolicyError, match=says):
        CateKV(**options)


def test_fraction_too_small_for_its_regions():
    """Of a text that is not short: one within a few times what the regions need gets that."""
    policy = bound(budget=0.01, sinks=4, profile=(("consistent", "adaptive"),) * 2)
    with pytest.raises(PolicyError, match="gives 4 slots"):
        policy.validate(400)
    policy.validate(40)


def test_labels_that_are_none_of_the_methods():
    with pytest.raises(PolicyError, match="labels heads"):
        bound(profile=(("consistent", "retrieval"),) * 2)
