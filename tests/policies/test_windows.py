"""Layers with a sliding window: rings of slots, and which layers a policy compresses."""

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import logits

import kvjax
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Token, TokenBlock, layer_specs
from kvjax.config import NO_ROPE, DeltaNetConfig, ModelConfig, RopeConfig
from kvjax.models import Params, init
from kvjax.policies import Full, Policy, PolicyError, by_layer, get_policy
from kvjax.policies.base import Windowed
from kvjax.policies.families.recurrent import RecurrentLayer
from kvjax.policies.families.ring import RingLayer
from kvjax.policies.layer import CacheLayer
from kvjax.runtime.engine import Engine
from kvjax.runtime.memory import largest_cache

ROPE = RopeConfig(theta=1e4, dim=16)


def model(*windows: int | None) -> ModelConfig:
    """A tiny model with these windows, one per layer."""
    return ModelConfig.uniform("mistral", 64, 48, 96, len(windows), 4, 2, 16, 4096, ROPE, windows=windows)


def spec_of(window: int | None, prompt_len: int, new_tokens: int, block: int = 0) -> LayerSpec:
    """Spec of a layer, for two rows."""
    (spec,) = layer_specs(model(window), 2, prompt_len, new_tokens, jnp.float32, block=block)
    return spec


def tokens_of(size: int) -> tuple[np.ndarray, ...]:
    """Queries [2, T, N, H], and keys and values [2, T, K, H]."""
    random = np.random.default_rng(size)
    return tuple(random.normal(size=(2, size, heads, 16)).astype(np.float32) for heads in (4, 2, 2))


def windows_of(state: LayerCache, window: int) -> list[list[Any]]:
    """Positions, keys and values inside the window of the next token, in order of position, by row and head."""
    found = []
    for row, seen in zip(range(2), np.asarray(state.seen), strict=True):
        for head in range(2):
            pos = np.asarray(state.pos[row, head])
            inside = np.flatnonzero((pos > seen - window) & (pos >= 0))
            order = inside[np.argsort(pos[inside])]
            found.append([np.asarray(x[row, head])[order] for x in (state.pos, state.k, state.v)])
    return found


@pytest.mark.parametrize("window", [1, 31, 32, 33, 40, 64, 90, 200])
@pytest.mark.parametrize("lengths", [(70, 5), (96, 33), (32, 31)])
def test_a_ring_is_the_window_of_a_full_cache(window: int, lengths: tuple[int, int]) -> None:
    """What it keeps is bit-identical. Attention sums in another order, so outputs are equal up to rounding."""
    steps = 50
    spec = spec_of(window, max(lengths), steps)
    q, k, v = map(jnp.asarray, tokens_of(spec.prompt_len + steps))
    ring, full = RingLayer(Full(), spec), CacheLayer(Full(), spec)
    assert ring.max_kept == min(window, spec.max_tokens)
    own = jnp.asarray(lengths, jnp.int32)
    prompt = PromptKV.of(spec.rope, *(x[:, : spec.prompt_len] for x in (q, k, v)), own, own + steps)
    states = [jax.jit(layer.prefill)(prompt, {})[0] for layer in (ring, full)]
    assert jax.tree.map(jnp.shape, states[0]) == jax.tree.map(jnp.shape, ring.init())

    @jax.jit
    def step(states: Any, i: Any) -> Any:
        at = (own + i)[:, None, None, None]
        token = Token(*(jnp.take_along_axis(x, at, axis=1)[:, 0] for x in (q, k, v)), own + i, spec.rope)
        held = [layer.append(state, token) for layer, state in zip((ring, full), states, strict=True)]
        outs = [layer.attend(state, token, {})[0] for layer, state in zip((ring, full), held, strict=True)]
        return held, outs

    for i in range(steps):
        states, (one, other) = step(states, jnp.int32(i))
        np.testing.assert_allclose(one, other, atol=1e-6)
        if i % 7 == 0:
            for mine, whole in zip(*(windows_of(state, window) for state in states), strict=True):
                jax.tree.map(np.testing.assert_array_equal, mine, whole)


@pytest.mark.parametrize("window", [3, 32, 50, 300])
def test_blocks_straddle_the_window(window: int) -> None:
    spec = spec_of(window, 128, 8, block=24)
    q, k, v = map(jnp.asarray, tokens_of(120))
    ring, full = RingLayer(Full(), spec), Full().layer(spec)
    states = [ring.init(), full.init()]
    counts = [(24, 24), (24, 7), (24, 0), (1, 24), (24, 24)]
    start = np.zeros(2, np.int32)
    for count in counts:
        at = jnp.asarray(start)[:, None] + jnp.arange(24)
        parts = [jnp.take_along_axis(x, at[..., None, None], axis=1) for x in (q, k, v)]
        block = TokenBlock(*parts, jnp.asarray(start), jnp.asarray(count), jnp.asarray([120, 120]), spec.rope)
        outs = []
        for i, layer in enumerate((ring, full)):
            out, states[i], _ = jax.jit(layer.read_block)(states[i], block, {})
            outs.append(out)
        mask = np.arange(24) < np.asarray(count)[:, None]
        np.testing.assert_allclose(outs[0][mask], outs[1][mask], atol=1e-6)
        start = start + np.asarray(count, np.int32)
        for mine, whole in zip(*(windows_of(state, window) for state in states), strict=True):
            jax.tree.map(np.testing.assert_array_equal, mine, whole)


def rings(policy: Policy | str, config: ModelConfig, tokens: int = 512, **options: Any) -> list[bool]:
    """Which layers keep their window in a ring."""
    bound = get_policy(policy, **options).for_model(config)
    assert bound.for_model(config) == bound
    return [isinstance(bound.layer(spec), RingLayer) for spec in layer_specs(config, 1, tokens, 8, jnp.float32)]


def test_a_policy_compresses_layers_with_full_attention() -> None:
    assert rings("snapkv", model(64, 64, None, 64, None), budget=100) == [True, True, False, True, False]
    assert rings("full", model(64, None)) == [True, False]
    assert rings("snapkv", model(None, None), budget=100) == [False, False]
    bound = get_policy("snapkv", budget=100).for_model(model(64, None, 64, None))
    seen = [(layer.spec.layer, layer.spec.num_layers) for layer in map(bound.layer, specs(model(64, None, 64, None)))]
    assert seen[1::2] == [(0, 2), (1, 2)]
    assert isinstance(bound, Windowed)
    assert (str(bound), bound.budget, bound.info.name) == ("snapkv:budget=100", 100, "snapkv")
    assert bound.with_budget(90).budget == 90


def specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    return layer_specs(config, 1, 512, 8, jnp.float32)


def test_a_model_of_windows_alone_is_compressed_below_them(caplog: pytest.LogCaptureFixture) -> None:
    """As without rings, unless the budget is at least the window: then the window is kept, and a message says so."""
    with caplog.at_level(logging.WARNING):
        assert rings("snapkv", model(256, 256), budget=100) == [False, False]
        assert rings("chelsea", model(256, 256), budget=100, outliers=0.0) == [False, False]
        assert not caplog.records
        assert rings("snapkv", model(256, 256), budget=300) == [True, True]
    (record,) = caplog.records
    assert "snapkv:budget=300 keeps at least the sliding window of 256 tokens" in record.getMessage()
    assert rings("full", model(256, 256)) == [True, True]
    assert rings("full", model(256, 256), tokens=100) == [False, False], "no sequence exceeds the window"
    assert rings("quest", model(256, 256), budget=64) == [True, True]


def test_layers_may_be_given_policies_of_their_own() -> None:
    config = model(64, None, 64, None)
    small = get_policy("snapkv", budget=40)
    assert rings(by_layer([small] * 4), config) == [False] * 4
    assert rings(by_layer([Full(), small, small, small]), config) == [True, False, False, False]
    assert rings(by_layer([small, small]), config) == [True, False, True, False]
    with pytest.raises(PolicyError, match="3 layers are given, but the model has 2"):
        by_layer([small] * 3).for_model(config)


def test_a_bound_policy_is_of_one_model() -> None:
    bound = Full().for_model(model(64, None))
    with pytest.raises(PolicyError, match="bound to a model of 2 layers, but this model has 3"):
        bound.for_model(model(64, None, None))
    config = model(64, None)
    delta = dataclasses.replace(config.layers[0], mixer=DeltaNetConfig(1, 1, 4, 4))
    with pytest.raises(PolicyError, match="bound to a model with 0 recurrent layers, but this model has 1"):
        bound.for_model(dataclasses.replace(config, layers=(delta, config.layers[1])))


def test_recurrent_layers_keep_their_state() -> None:
    """Policies see the layers with attention alone, and recurrent layers are counted in bytes."""
    config = model(None, None)
    delta = dataclasses.replace(config.layers[0], mixer=DeltaNetConfig(1, 2, 4, 8))
    hybrid = dataclasses.replace(config, layers=(delta, config.layers[0], delta, config.layers[1]))
    assert (hybrid.cached, hybrid.for_policy) == ((1, 3), config)
    given = get_policy("pyramidkv:budget=40,window=4")
    policy = given.for_model(hybrid)
    layers = [policy.layer(spec) for spec in layer_specs(hybrid, 1, 2048, 256, "float32")]
    assert [isinstance(layer, RecurrentLayer) for layer in layers] == [True, False, True, False]
    assert [(layer.spec.layer, layer.spec.num_layers) for layer in (layers[1], layers[3])] == [(0, 2), (1, 2)]
    assert [layer.max_kept for layer in layers if isinstance(layer, RecurrentLayer)] == [0, 0]
    more = policy.nbytes(hybrid, 3, 2048, 256, "float32") - given.nbytes(config, 3, 2048, 256, "float32")
    assert more == 3 * hybrid.state_bytes(4)
    heads = jnp.zeros((1, 2, 8))
    token = Token(heads, heads[:, :1], heads[:, :1], jnp.zeros((1,), jnp.int32), NO_ROPE)
    with pytest.raises(PolicyError, match="layer 0 is recurrent and has no keys and values"):
        layers[0].append(layers[0].init(), token)


def test_bytes_count_rings_as_rings() -> None:
    """At 2048 + 256 tokens: 96 bytes of positions and so on aside, keys and values of 256 slots in each ring."""
    config = model(256, None, 256)
    every = Full().nbytes(config.with_attention(window=None), 1, 2048, 256)
    some = Full().nbytes(config, 1, 2048, 256)
    of_a_slot = 2 * 2 * 16 * 2 + 2 * 8  # keys and values of two heads in bfloat16; a position and a weight
    assert every - some == 2 * (2304 - 256) * of_a_slot
    assert get_policy("snapkv", budget=64).nbytes(config, 1, 2048, 256) < some


@pytest.fixture(scope="module")
def mixed() -> Params:
    """A random model with windows of 8 and 40 tokens in two of three layers."""
    return init(model(8, None, 40), jax.random.key(3))


@pytest.mark.parametrize("block", [None, 16])
def test_generation_is_that_of_the_whole_model(mixed: Params, block: int | None) -> None:
    """Greedy tokens follow from a forward pass over all tokens, without a cache."""
    prompts = [np.random.default_rng(i).integers(0, 64, size).tolist() for i, size in enumerate((70, 3, 41))]
    found = kvjax.generate(mixed, prompts, policy="full", max_new_tokens=48, prefill_block=block, ignore_eos=True)
    assert isinstance(found, list)
    texts = [prompt + list(each.tokens) for prompt, each in zip(prompts, found, strict=True)]
    padded = [text + [0] * (118 - len(text)) for text in texts]  # what follows a token does not matter to it
    for prompt, text, row in zip(prompts, texts, np.asarray(logits(mixed, np.asarray(padded, np.int32))), strict=True):
        np.testing.assert_array_equal(row[len(prompt) - 1 : len(text) - 1].argmax(axis=-1), text[len(prompt) :])


def test_the_shape_of_gemma_3_27b_holds_3_gb() -> None:
    """At 32,768 tokens in bfloat16: 52 layers of 1,024 tokens and 10 of all, 16 heads of 128. Without rings, 16.6 GB."""
    windows = tuple(None if i % 6 == 5 else 1024 for i in range(62))
    config = ModelConfig.uniform("mistral", 64, 48, 96, 62, 32, 16, 128, 131072, RopeConfig(1e4, 128), windows=windows)
    assert config.cache_bytes(32768, 2) == 2 * 16 * 128 * 2 * (52 * 1024 + 10 * 32768) == 3_120_562_176
    own = Full().nbytes(config, 1, 32768 - 256, 256)
    of_a_slot = 16 * (2 * 128 * 2 + 8)  # a position and a weight besides; the prompt is padded to 32,768 tokens
    assert 0 <= own - of_a_slot * (52 * 1024 + 10 * (32768 + 256)) < 1e4


def test_slots_that_fit_memory_where_all_layers_have_windows() -> None:
    """The cache stops growing at the window, so that any length fits, and no budget above it counts."""
    config = model(256, 256)
    ring = Full().nbytes(config, 1, 2048, 256)
    assert largest_cache(Full(), config, 2 * ring) == 2**31 - 1
    assert largest_cache(get_policy("knorm"), config, 2 * ring) == 256
    assert 32 <= largest_cache(get_policy("knorm"), config, ring // 2) < 256
    mixed = model(256, None)
    assert 256 < largest_cache(Full(), mixed, 2 * ring) < 1024


def test_the_whole_model_is_the_measure(mixed: Params) -> None:
    """Percentages are of the model's cache with rings."""
    found = kvjax.generate(mixed, [1, 2, 3] * 100, policy="full", max_new_tokens=8)
    assert found.stats.cache_bytes == found.stats.full_cache_bytes


def test_state_is_saved_and_resumed(mixed: Params) -> None:
    engine = Engine(mixed, get_policy("snapkv", budget=20, window=4), batch=2, prompt_len=60, max_new_tokens=40)
    prompts = [[5, 9, 2, 7] * 15, [3, 1] * 11]
    state, _ = engine.prefill(prompts)
    state, first, _ = engine.decode(state, 10)
    kept = engine.save(state)
    state, rest, _ = engine.decode(state, 20)
    again, other, _ = engine.decode(engine.resume(kept), 20)
    np.testing.assert_array_equal(rest, other)
    whole, _ = engine.prefill(prompts)
    whole, every, _ = engine.decode(whole, 30)
    np.testing.assert_array_equal(np.concatenate([first[:, :10], rest[:, :20]], axis=1), every[:, :30])


def test_window_layers_do_not_change_what_a_policy_keeps(mixed: Params) -> None:
    """Positions in the full layer are those that the policy chooses there, at its own budget."""
    engine = Engine(mixed, get_policy("snapkv", budget=20, window=4), prompt_len=60, max_new_tokens=4)
    state, _ = engine.prefill([[5, 9, 2, 7] * 15])
    small, full, large = engine.slots(state)
    assert np.all(np.asarray(full.count) == 20)
    assert np.asarray(small.pos).max() == 59
    assert np.asarray(large.pos).min() >= -1
    assert dataclasses.replace(engine.specs[0], layer=1) != engine.specs[1]
