"""The invariants in which a model takes part, of every policy, over models with other layers than Llama's.

One model has layers with windows among those that policies compress, one has recurrent layers too, one has mixtures of
experts, one has attention sinks, and one has what else families differ in.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable

import jax
import numpy as np
import pytest
import test_prefill_blocks as blocks
import test_prefixes as prefixes
from policies import test_invariants as plain
from policies.driver import TINY, as_if_alone
from schedules import check, lone

import kvjax
from kvjax.cache import layer_specs
from kvjax.config import DeltaNetConfig, LayerConfig, ModelConfig, MoEConfig
from kvjax.models import Params, init
from kvjax.models.params import name_of
from kvjax.policies import Policy, get_policy
from kvjax.policies.families.ring import RingLayer
from kvjax.policies.profile import Profile, fingerprint
from kvjax.runtime import session

REPRESENTATIVE = {
    "windows": {"treekv", "adakv", "quest", "turboquant(full)"},
    "recurrent": {"snapkv"},
    "experts": {"snapkv"},
    "sinks": {"h2o"},
    "families": {"treekv"},
}
"""Policies of the slow tier, by model. Other policies are in the tier `long`. Windows have policies that merge tokens, that
have a budget per head, that select and that quantise. No policy changes recurrent states, and experts change no cache. Sinks
have a policy that scores by probabilities. Other families have a policy that rotates keys
again.
"""

PREFIXED = {("recurrent", "treekv:40"), ("windows", "adakv:40")}
"""Models and policies whose stored prefixes the slow tier tests."""


def windowed(config: ModelConfig, *windows: int | None) -> ModelConfig:
    """The model with its layer repeated, with these windows."""
    layer = config.layers[0]
    mixers = (dataclasses.replace(layer.mixer, window=window) for window in windows)
    return dataclasses.replace(config, layers=tuple(dataclasses.replace(layer, mixer=mixer) for mixer in mixers))


def recurrent(config: ModelConfig) -> ModelConfig:
    """The model with recurrent layers and one with a window among its own layers, which are gated."""
    full, window = windowed(config, None, 24).layers
    full = dataclasses.replace(full, mixer=dataclasses.replace(full.attention, gated=True))
    delta = dataclasses.replace(full, mixer=DeltaNetConfig(2, 4, 8, 12))
    return dataclasses.replace(config, layers=(delta, full, window, delta, full))


def mixed(config: ModelConfig) -> ModelConfig:
    """The model with experts in its two layers, the second of which has a shared MLP too and a sigmoid router."""
    sigmoid = MoEConfig(
        6,
        2,
        16,
        normalized=False,
        shared=32,
        shared_gate=True,
        router="sigmoid",
        groups=3,
        groups_per_token=2,
        output_scale=2.0,
    )
    experts = MoEConfig(4, 2, 32), sigmoid
    return dataclasses.replace(config, layers=tuple(LayerConfig(config.layers[0].mixer, each) for each in experts))


def varied(config: ModelConfig) -> ModelConfig:
    """The model with factors, a layer without rotary embedding, and one with norms after its parts and growing queries."""
    layer = config.layers[0]
    grows = dataclasses.replace(layer.mixer, query_growth=0.5, query_period=16)
    layers = dataclasses.replace(layer, mixer=grows, norms="post"), layer.unrotated
    return dataclasses.replace(config, layers=layers, embed_scale=2.0, residual_scale=0.5, logit_divisor=0.5)


def with_sinks(config: ModelConfig) -> Params:
    """A random model with sinks of about the size of the logits, and experts with biases, as in gpt-oss."""
    layer = config.layers[0]
    experts = MoEConfig(4, 2, 32, activation="clamped_swiglu", bias=True)
    layer = LayerConfig(dataclasses.replace(layer.mixer, sinks=True), experts)
    params = init(dataclasses.replace(config, layers=(layer,) * config.num_layers), jax.random.key(9))

    def drawn(path: tuple[object, ...], leaf: jax.Array) -> jax.Array:
        if not name_of(path).endswith(("sinks", "bias")):
            return leaf
        seed = zlib.crc32(name_of(path).encode())
        return jax.random.normal(jax.random.key(seed), leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(drawn, params)


@functools.cache
def model(name: str) -> Params:
    """A random model that policies which are bound to `TINY` fit."""
    if name == "experts":
        return init(mixed(TINY), jax.random.key(6))
    if name == "recurrent":
        return init(recurrent(TINY), jax.random.key(7))
    if name == "sinks":
        return with_sinks(TINY)
    if name == "families":
        return init(varied(TINY), jax.random.key(8))
    found = init(windowed(TINY, 8, None, 24, None), jax.random.key(5))
    assert found.config.for_policy == TINY
    return found


def bound(policy: Policy, params: Params) -> Policy:
    """The policy for all layers of a model. A profile of `TINY` is taken for one of the model, which has as many heads."""
    profile = getattr(policy, "profile", None)
    if isinstance(profile, Profile):
        made = dataclasses.replace(profile, model=fingerprint(params.config))
        policy = dataclasses.replace(policy, profile=made)
    found = policy.for_model(params.config)
    specs = layer_specs(params.config, 1, 54, 12, params.dtype)
    rings = [spec.window is not None for spec in specs]
    assert [isinstance(found.layer(spec), RingLayer) for spec in specs] == rings
    return found


def over_models(policies: list[Policy]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """One test for each model and policy."""
    params = [
        pytest.param(
            name,
            policy,
            id=f"{name}-{policy.info.name}",
            marks=pytest.mark.slow if policy.info.name in representative else pytest.mark.long,
        )
        for name, representative in REPRESENTATIVE.items()
        for policy in policies
    ]
    return pytest.mark.parametrize(("name", "policy"), params)


def test_representatives_exist() -> None:
    assert set().union(*REPRESENTATIVE.values()) <= {policy.info.name for policy in plain.TIGHT}


@over_models(plain.AMPLE)
def test_ample_budget_is_the_full_cache(name: str, policy: Policy) -> None:
    plain.test_ample_budget_is_the_full_cache(bound(policy, model(name)), model(name))


@pytest.mark.rotating  # as the tests below that are marked so: the others read whole prompts and decode with each representative in every run
@over_models(plain.TIGHT)
def test_rows_are_independent(name: str, policy: Policy) -> None:
    fits = policy.info.refits_values
    atol = 1e-4 if fits else 2e-5
    as_if_alone(model(name), plain.PROMPTS, policy=bound(policy, model(name)), atol=atol, **plain.GREEDY)


@pytest.mark.rotating
@over_models(plain.TIGHT)
def test_cache_is_donated(name: str, policy: Policy) -> None:
    plain.test_cache_is_donated(bound(policy, model(name)), model(name))


@over_models(plain.TIGHT)
def test_compiler_agrees_on_bytes(name: str, policy: Policy) -> None:
    plain.test_compiler_agrees_on_bytes(bound(policy, model(name)), model(name))


@over_models(plain.TIGHT)
def test_state_round_trips(name: str, policy: Policy, tmp_path) -> None:
    plain.test_state_round_trips(bound(policy, model(name)), model(name), tmp_path)


@pytest.mark.rotating
@over_models([policy for policy in plain.TIGHT if not policy.info.transform])
def test_one_block_is_the_prompt(name: str, policy: Policy) -> None:
    """Chunked prefill with one block keeps and answers what a whole prompt does, with those policies that have it."""
    params = model(name)
    found = bound(policy, params)
    specs = layer_specs(params.config, 1, 54, 12, params.dtype, block=64)
    if any(found.layer(spec).reads != "blocks" for spec in specs):
        pytest.skip("chunked prefill of whole blocks is not supported")
    whole, block = (
        kvjax.generate(params, plain.PROMPTS[0], policy=found, prefill_block=size, **plain.GREEDY)
        for size in (None, 64)
    )
    assert whole.tokens == block.tokens
    np.testing.assert_allclose(whole.logprobs, block.logprobs, atol=2e-5)


@pytest.mark.rotating
@over_models([policy for policy in plain.TIGHT if "offloaded" not in policy.info.name])
def test_rows_of_a_running_batch_are_those_of_the_row_alone(name: str, policy: Policy) -> None:
    """Tokens and all arrays of the caches, bit for bit, whichever rows are inserted beside."""
    check(*lone(bound(policy, model(name)), model(name)), range(2))


@pytest.mark.rotating
@over_models(plain.TIGHT)
def test_a_session_is_the_same_in_pieces(name: str, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, turn = plain.PROMPTS[0], [3, 1, 4, 1, 5, 9, 2]
    answers = []
    for piece in (session.PIECE, 4):
        monkeypatch.setattr(session, "PIECE", piece)
        talk = kvjax.Session(model(name), prompt, bound(policy, model(name)), max_new_tokens=30)
        answers.append([talk.generate(turn, 6, ignore_eos=True).tokens for _ in range(2)])
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_full_in_blocks_is_full(name: str) -> None:
    blocks.test_full_in_blocks_is_full(model(name), 5)


@pytest.mark.long
@pytest.mark.parametrize("policy", [blocks.POLICIES[0], *blocks.SLOW, *blocks.LONG], ids=lambda each: each.info.name)
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_rows_in_blocks_are_what_they_are_alone(name: str, policy: Policy) -> None:
    blocks.test_rows_are_what_they_are_alone(model(name), policy)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=pytest.mark.slow if (name, policy) in PREFIXED else pytest.mark.long)
        for name in REPRESENTATIVE
        for policy in prefixes.POLICIES.split()
    ],
)
def test_stored_prefixes_change_no_token(name: str, policy: str) -> None:
    """Tokens and log-probabilities, bit for bit, also if states are moved to the host's memory and back."""
    fractions = prefixes.has_fractions(get_policy(policy))
    prefixes.compare(model(name), policy, fractions=fractions)
