"""InfiniGen against the literal algorithm, and what it sees ahead against the model's own weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from policies.driver import TINY, make_case, run
from policies.oracle_arrays import ROPE, rotate
from policies.oracle_infinigen import InfiniLayer

import kvjax
from kvjax.cache import Token, layer_specs
from kvjax.config import PRESETS
from kvjax.models import transformer
from kvjax.pallas_kernels import Norm
from kvjax.policies import (
    CacheLayer,
    Full,
    InfiniGen,
    Policy,
    PolicyError,
    PolicyInfo,
    SkewProfile,
    by_head,
    by_layer,
    offloaded,
)
from kvjax.policies.profile import fingerprint


def skew_profile(layers: int, heads: int, dim: int, model: str = "") -> SkewProfile:
    """Random orthogonal matrices."""
    random = np.random.default_rng(4).normal(size=(layers, heads, dim, dim))
    return SkewProfile.of(np.linalg.qr(random)[0], method="infinigen", model=model, data="nothing", settings=())


CONFIGURATIONS = {
    "gqa": ({"budget": 12, "alpha": 2.0, "share": 0.3}, 4, 2),
    "a sample's directions": ({"budget": 12, "alpha": 2.0, "share": 0.375, "profile": skew_profile(1, 2, 8)}, 4, 2),
    "mha, all channels": ({"budget": 20, "alpha": 1.0, "share": 1.0}, 2, 2),
    "the budget decides": ({"budget": 5, "alpha": 50.0, "share": 0.25}, 4, 1),
}
STEPS, ROWS = 5, 20


def inputs(heads: int = 4, kv_heads: int = 2):
    lengths = np.random.default_rng(7).integers(2, 64, size=ROWS)
    lengths[:3] = 2, 12, 63
    return make_case(3, lengths, STEPS, heads, kv_heads)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_equals_the_literal_algorithm(name):
    """A ragged batch whose layer selects by its own queries: what is read and outputs at every step."""
    options, heads, kv_heads = CONFIGURATIONS[name]
    policy, case = InfiniGen(**options, dense_layers=0), inputs(heads, kv_heads)
    spec, counts = case.spec, set()
    _, outputs, states = run(policy, case)
    select = jax.jit(lambda state, q, pos: policy.layer(spec).select(state, spec.rope.rotate(q, pos[:, None])))
    picks = []
    for i in range(STEPS):
        pos = case.lengths + i
        picks.append(jax.device_get(select(states[i + 1], case.q[np.arange(ROWS), pos], pos)))
    matrices = options["profile"].layer(0, 8) if "profile" in options else None
    for row, length in enumerate(case.lengths.tolist()):
        channels = int(options["share"] * 8)  # rounded down, as the published code has it
        literal = InfiniLayer(options["budget"], options["alpha"], channels, kv_heads, matrices)
        literal.prefill(case.q[row, :length], case.k[row, :length], case.v[row, :length])
        for i in range(STEPS):
            pos = length + i
            literal.append(case.k[row, pos], case.v[row, pos])
            turned = rotate(ROPE, case.q[row, pos], pos)
            chosen = literal.selected(turned)
            index, live = (x[row] for x in picks[i])
            assert [set(x[m].tolist()) for x, m in zip(index, live, strict=True)] == chosen
            np.testing.assert_allclose(outputs[i, row], literal.attend(turned, chosen), atol=2e-5)
            counts.add(len(chosen[0]))
    assert counts == {2, 3, 4} if name == "the budget decides" else len(counts) > 4


def test_all_channels_tell_the_true_scores():
    """With all directions nothing is lost: what is selected is what attends most, whatever the skew."""
    policy, case = InfiniGen(budget=9, alpha=1e6, share=1.0, dense_layers=0), inputs(2, 2)
    state = run(policy, case)[0]
    pos = case.lengths + STEPS - 1
    turned, keys = rotate(ROPE, case.q[np.arange(ROWS), pos], pos[:, None]), np.asarray(state.cache.k)
    index, live = jax.device_get(jax.jit(policy.layer(case.spec).select)(state, turned.astype(np.float32)))
    for row, head in np.ndindex(ROWS, 2):
        products = keys[row, head, : pos[row]] @ turned[row, head]
        assert set(index[row, head][live[row, head]].tolist()) == set(np.argsort(-products)[:8].tolist())


# A profile's directions.

PROFILE = skew_profile(2, 2, 16, fingerprint(TINY))


def test_where_directions_come_from(tmp_path):
    """A profile, its file, or the prompt; for a model that none comes for the prompt."""
    PROFILE.save(tmp_path / "skew.json")
    bound = InfiniGen(profile=str(tmp_path / "skew.json")).bind(TINY)
    assert bound == InfiniGen(profile=PROFILE).bind(TINY) == bound.bind(TINY)
    assert hash(bound) == hash(InfiniGen(profile=PROFILE))
    assert InfiniGen().bind(TINY) == InfiniGen(profile="prompt").bind(TINY) == InfiniGen(profile="prompt")
    assert len(repr(bound)) < 1000


def test_the_default_model_has_directions():
    """Orthogonal matrices of its 30 layers and 3 KV heads."""
    profile = InfiniGen().bind(PRESETS["smollm2-135m"]).profile
    for layer in range(30):
        turned = profile.layer(layer, 64)
        np.testing.assert_allclose(turned.swapaxes(1, 2) @ turned, np.stack([np.eye(64)] * 3), atol=5e-3)


def test_without_a_prompt_the_first_directions_are_taken():
    spec = layer_specs(TINY, 3, 0, 8, jnp.float32)[1]
    state = jax.jit(InfiniGen(budget=4, dense_layers=0, share=0.25, profile=PROFILE).layer(spec).init)()
    np.testing.assert_array_equal(state.skew, np.stack([PROFILE.layer(1, 16)[..., :8]] * 3))


def test_parts_have_the_directions_of_their_heads():
    policy = InfiniGen(budget=4, dense_layers=0, share=0.5, profile=skew_profile(2, 2, 8))
    split = by_head({"a": policy, "b": Full()}, [["b", "a"]] * 2)
    case = inputs()
    whole, part = jax.device_get((run(policy, case)[0], run(split, case)[0][0]))
    np.testing.assert_allclose(part.skew[:, 0], whole.skew[:, 1], atol=1e-6)
    np.testing.assert_allclose(part.partial[:, 0], whole.partial[:, 1], atol=1e-5)


def test_profiles_that_do_not_fit(tmp_path):
    other = dataclasses.replace(TINY, hidden_size=50)
    with pytest.raises(
        PolicyError, match=rf"{fingerprint(TINY)}, but .* {fingerprint(other)}\. .*kvjax calibrate infinigen"
    ):
        InfiniGen(profile=PROFILE).bind(other)
    with pytest.raises(PolicyError, match=r"2 layers of \[176\] bytes. This model needs 2 of matrices \[2, 16, 16\]"):
        InfiniGen(profile=skew_profile(2, 4, 8, fingerprint(TINY))).bind(TINY)
    file = tmp_path / "skew.json"
    for damage, says in (
        ((PROFILE.matrices[0], "not base85"), "one text of packed numbers per layer"),
        ((PROFILE.matrices[0], PROFILE.matrices[0][:-10]), "one text of packed numbers per layer"),
        (('"version": 3', '"version": 2'), "skew profile of version 2, but this kvjax reads 3. Make one with"),
        (('"matrices"', '"scores"'), "is not a skew profile: it has"),
    ):
        PROFILE.save(file)
        file.write_text(file.read_text().replace(*damage))
        with pytest.raises(PolicyError, match=says):
            InfiniGen(profile=str(file)).bind(TINY)


# Looking ahead.


@dataclasses.dataclass(frozen=True)
class Watching(Policy):
    """Gives what it looks ahead to to the next layer, which hands it out as its attention."""

    about = PolicyInfo("watching")

    def layer(self, spec):
        return WatchingLayer(self, spec)


@dataclasses.dataclass(frozen=True)
class WatchingLayer(CacheLayer[Watching]):
    def look_ahead(self, queries, position, carry):
        return carry | {self.key: queries()}

    def attend(self, state, token, carry):
        return carry.get(self.key, token.q), state, carry


def test_queries_ahead_are_those_of_the_weights(tiny):
    """Layer 1's queries, for the attention input of layer 0: its normed embedding."""
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Noting(WatchingLayer):
        def attend(self, state, token, carry):
            seen.append((token.q, carry.get(self.key)))
            return super().attend(state, token, {})

    layers = [Noting(Watching(), spec) for spec in layer_specs(tiny.config, 2, 0, 4, jnp.float32)]

    @jax.jit
    def step(params, token, pos):
        states = tuple(layer.init() for layer in layers)
        transformer.decode_step(params, states, token, pos, layers)
        return seen, Norm(params.layers[0].attn_norm, params.config.norm_eps)(params.embed[token])

    seen, x = jax.device_get(step(tiny, np.asarray([3, 5], np.int32), np.zeros(2, np.int32)))
    for layer, got in ((0, seen[0][0]), (1, seen[1][1])):
        np.testing.assert_allclose(got.reshape(2, -1), x @ np.asarray(tiny.layers[layer].attn.q).T, atol=1e-5)
    assert seen[0][1] is None
    assert np.abs(seen[1][0] - seen[1][1]).max() > 1e-3


def test_compositions_look_ahead_for_their_parts(tiny):
    """Each part has the queries of its own heads, from layer to layer."""
    watching, specs = Watching(), layer_specs(tiny.config, 2, 0, 4, jnp.float32)
    token, pos = np.asarray([3, 5], np.int32), np.zeros(2, np.int32)

    def logits(policy):
        layers = [policy.layer(spec) for spec in specs]
        states = jax.jit(lambda: tuple(layer.init() for layer in layers))()
        step = jax.jit(lambda params, *args: transformer.decode_step(params, *args, layers)[0])
        return step(tiny, states, token, pos)

    split = by_head({"a": watching, "b": offloaded(watching)}, [["a", "b"], ["b", "a"]])
    alone = logits(watching)
    for policy in (by_layer([watching, watching]), by_head({"a": watching}, [["a", "a"]] * 2)):
        np.testing.assert_allclose(logits(policy), alone, atol=1e-5)
    # Heads whose policy was another one's in the layer before: looked ahead to all the same.
    np.testing.assert_allclose(logits(split), alone, atol=1e-5)


@pytest.mark.slow
def test_it_selects_by_what_it_foresaw(tiny):
    """With another carry the second layer reads other tokens; through generation as offloaded."""
    policy, case = InfiniGen(budget=4, alpha=50.0, share=0.5, dense_layers=0), inputs()
    state = run(policy, case)[0]
    layer, pos = policy.layer(case.spec), case.lengths + STEPS - 1
    token = Token(*(to_jax(x[np.arange(ROWS), pos]) for x in (case.q, case.k, case.v)), to_jax(pos), ROPE)
    own, _, _ = layer.attend(state, token, {})
    np.testing.assert_array_equal(own, layer.attend(state, token, {layer.key: token.q_rotated})[0])
    assert np.abs(own - layer.attend(state, token, {layer.key: -token.q_rotated})[0]).max() > 0.01
    options = {"max_new_tokens": 6, "ignore_eos": True}
    policy = InfiniGen(budget=16, dense_layers=1)
    prompts = [[5, 9, 2, 7, 7, 1] * 9, [3, 1, 4]]
    near, far = (kvjax.generate(tiny, prompts, policy=p, **options) for p in (policy, offloaded(policy)))
    assert [g.tokens for g in near] == [g.tokens for g in far]
    assert far[0].stats.host_cache_bytes > 0


def test_queries_and_keys_choose_directions_apart():
    """By hand: queries are large in channel 0 alone, and keys in channel 3, though a fifth of 8 is 1; their sum is largest in 5."""
    sizes = np.zeros((2, 8))
    sizes[0, [0, 5]], sizes[1, [3, 5]] = (5, 4), (5, 4)
    profile = SkewProfile.of(np.eye(8)[None, None], method="infinigen", model="", data="nothing", settings=())
    layer = InfiniGen(profile=profile, dense_layers=0).layer(make_case(0, [9], 1, 1, 1).spec)
    q, k = (np.tile(x, (1, 9, 1, 1)).astype(np.float32) for x in sizes)
    skew_of, length = jax.jit(layer._skew), np.asarray([9], np.int32)
    skew = np.asarray(skew_of(q, k, length))[0, 0]
    np.testing.assert_array_equal(skew, np.eye(8)[:, [0, 3]])
    same = np.asarray(skew_of(q, q, length))[0, 0]
    np.testing.assert_array_equal(same, np.stack([np.eye(8)[:, 0], np.zeros(8)], axis=1))


def test_the_threshold_is_the_one_for_this_family():
    assert InfiniGen().alpha == 5


def test_partial_keys_are_two_fifths_at_most():
    policy = InfiniGen(dense_layers=0)
    spec = layer_specs(TINY, 1, 6144, 64, jnp.bfloat16)[0]
    state = policy.layer(spec).init()
    assert state.partial.shape == (1, 2, 6272, 6)  # of 16 channels, 3 by queries and 3 by keys
    # In 2 layers, 3 rows and 2 heads: partial keys and the directions they are in; keys and values of a fifth of the tokens.
    fifth = 1248  # of 6208 tokens, rounded up to a multiple of 32
    assert policy.bytes_read(TINY, 3, 6144, 64) == 2 * 3 * 2 * (6272 * 6 + 16 * 6 + fifth * 2 * 16) * 2
    assert policy.bytes_read(TINY, 1, 6144, 64) < 0.5 * Full().bytes_read(TINY, 1, 6144, 64)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 1}, "need 2"),
        ({"alpha": -1.0}, "alpha=-1.0"),
        ({"share": 0.0}, "share=0.0"),
        ({"dense_layers": -1}, "dense_layers=-1"),
        ({"profile": 3}, "profile=3 is not valid. Give a SkewProfile"),
    ],
)
def test_bad_hyperparameters(options, says):
    with pytest.raises(PolicyError, match=says):
        InfiniGen(**options)
