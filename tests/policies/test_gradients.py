"""Gradients through a cache: of what is kept, and not of the choice of it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import Case, compositions, every_policy, make_case, offloads

from kvjax.cache import PromptKV, Token, layer_specs
from kvjax.models import transformer
from kvjax.pallas_kernels import CacheShard, decode_attention, gated_projection, sharded_decode_attention
from kvjax.policies import Full, Policy, PolicyError, SnapKV, offloaded, prefill_alone
from kvjax.runtime import decoding, replay

STEPS = 2
FAST = {"treekv", "snapkv", "adakv", "h2o"}
"""The others are differentiated in the same ways, and tested among the slow ones."""

WITHOUT = {"chelsea": "clustering", "attention_matching": "fit of weights"}
"""Those that say that they have no gradient where they compress, and why."""


def policies_with(budget: int) -> list:
    """Policies of this budget, but for those that tell they have no gradient."""
    made = [p for p in every_policy(budget) + compositions(budget) if p.info.name not in WITHOUT]
    return [pytest.param(p, id=p.info.name, marks=[] if p.info.name in FAST else [pytest.mark.slow]) for p in made]


def loss(policy: Policy, case: Case, x: tuple) -> jax.Array:
    """A number that depends on all outputs of a prompt's first steps. Steps are one loop, which is compiled once."""
    spec, rows = case.spec, jnp.arange(len(case.lengths))

    def prompt(x: jax.Array) -> jax.Array:
        room = spec.prompt_len
        return jnp.pad(x, ((0, 0), (0, max(room - x.shape[1], 0)), (0, 0), (0, 0)))[:, :room]

    layer = policy.layer(spec)
    state, _ = prefill_alone(
        layer,
        PromptKV.of(spec.rope, *map(prompt, x), jnp.asarray(case.lengths), jnp.asarray(case.lengths) + spec.new_tokens),
        {},
    )

    def step(state: Any, pos: jax.Array) -> Any:
        token = Token(*(part[rows, pos] for part in x), pos, spec.rope)
        out, state, _ = layer.attend(layer.append(state, token), token, {})
        weighed = jnp.sum(out * jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))
        return layer.compress(state), weighed

    positions = jnp.asarray(case.lengths) + jnp.arange(STEPS, dtype=jnp.int32)[:, None]
    return jnp.sum(jax.lax.scan(step, state, positions)[1])


def differentiated(policy: Policy, case: Case) -> Any:
    """The loss and its gradient as one program, of queries, keys and values."""
    return jax.jit(jax.value_and_grad(lambda x: loss(policy, case, x)))


def gradient(policy: Policy, case: Case) -> tuple:
    return differentiated(policy, case)((case.q, case.k, case.v))[1]


@pytest.fixture(scope="module")
def full():
    case = make_case(3, [30, 21], STEPS)
    return case, gradient(Full(), case)


@pytest.mark.rotating  # with a tight budget, each policy is compared with slopes in every run
@pytest.mark.parametrize("policy", policies_with(4096))
def test_with_an_ample_budget_it_is_the_full_caches(policy, full):
    case, expected = full
    assert all(np.abs(part).max() > 0.01 for part in expected)
    for got, want in zip(gradient(policy, case), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize(
    "policy", [p for p in policies_with(16) if not {"fp8", "quantized", "turboquant"} & {p.id.partition("(")[0]}]
)
def test_with_a_tight_budget_it_is_the_slope(policy, full):
    """In a random direction, against differences so small that the choice stays as it is."""
    case, _ = full
    inputs, random = (case.q, case.k, case.v), np.random.default_rng(5)
    way = [random.normal(size=part.shape).astype(np.float32) for part in inputs]
    program = differentiated(policy, case)
    got = sum(np.vdot(part, to) for part, to in zip(program(inputs)[1], way, strict=True))
    more, less = (
        program(tuple(part + sign * 2e-4 * to for part, to in zip(inputs, way, strict=True)))[0] for sign in (1, -1)
    )
    np.testing.assert_allclose(got, (more - less) / 4e-4, rtol=0.03, atol=0.05)


@pytest.mark.parametrize(("name", "budget"), [("chelsea", 16), ("chelsea", 4096), ("attention_matching", 16)])
def test_what_has_none_says_so(name, budget, full):
    policy = next(p for p in every_policy(budget) if p.info.name == name)
    with pytest.raises(PolicyError, match=rf"{name}: .*{WITHOUT[name]}.* no gradient\. Use a policy that has one"):
        gradient(policy, full[0])


def test_a_kernel_gives_way_to_xla_under_differentiation():
    random = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, size)
        for key, size in zip(random, ((1, 2, 16), (1, 1, 32, 16), (1, 1, 32, 16)), strict=True)
    )
    weight = jnp.ones((1, 1, 32)).at[0, 0, 20:].set(0.0)

    def out(q: jax.Array, k: jax.Array, v: jax.Array, **how: Any) -> jax.Array:
        return jnp.sum(jnp.sin(decode_attention(q, k, v, weight, scale=0.25, **how).out))

    kernel: dict[str, Any] = {"implementation": "gpu", "interpret": True}
    got = jax.jit(jax.grad(partial(out, **kernel), argnums=(0, 1, 2)))(q, k, v)
    want = jax.grad(partial(out, implementation="xla"), argnums=(0, 1, 2))(q, k, v)
    for mine, theirs in zip(got, want, strict=True):
        assert np.abs(theirs).max() > 0.01
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_so_do_kernels_over_several_caches_and_products_with_weights():
    random = jax.random.split(jax.random.key(1), 3)
    x, gate, up = (
        jax.random.normal(key, size) for key, size in zip(random, ((2, 128), (128, 128), (128, 128)), strict=True)
    )
    q, k = x.reshape(2, 4, 32), jax.random.normal(random[0], (2, 2, 32, 32))
    x, gate, up = (array.astype(jnp.bfloat16) for array in (x, gate, up))

    def product(x: jax.Array, gate: jax.Array, up: jax.Array, **how: Any) -> jax.Array:
        return jnp.sum(gated_projection(x, gate, up, **how).astype(jnp.float32))

    def sharded(q: jax.Array, k: jax.Array, _: jax.Array, **how: Any) -> jax.Array:
        caches = [CacheShard(k[:, i : i + 1], k[:, i : i + 1], jnp.ones((2, 1, 32)), (i,)) for i in range(2)]
        return jnp.sum(jnp.sin(sharded_decode_attention(q, caches, scale=0.25, **how)))

    for function, args in ((product, (x, gate, up)), (sharded, (q, k, k))):
        got = jax.grad(partial(function, implementation="gpu", interpret=True), argnums=(0, 1))(*args)
        want = jax.grad(partial(function, implementation="xla"), argnums=(0, 1))(*args)
        for mine, theirs in zip(got, want, strict=True):
            assert np.abs(theirs).max() > 0.01
            np.testing.assert_allclose(mine.astype(jnp.float32), theirs.astype(jnp.float32), rtol=0.02, atol=0.02)


def model_gradient(policy: Policy, params: Any) -> Any:
    """Of all logits after a prompt and a step, and of the caches that are left, by the weights. It is traced, which is where it would fail."""
    policy = policy.bind(params.config)
    specs = layer_specs(params.config, 2, 30, STEPS, params.dtype)
    layers, lengths = decoding.layers_of(policy, specs), jnp.asarray([30, 21], jnp.int32)
    tokens = jnp.zeros((2, specs[0].prompt_len), jnp.int32)

    def loss(params: Any) -> jax.Array:
        read = replay.prefill if replay.replays(layers) else transformer.prefill
        logits, caches = read(params, tokens, lengths, lengths + STEPS, layers)
        after, caches = decoding.step(policy, specs, params, caches, tokens[:, 0], lengths)
        held = (x for x in jax.tree.leaves(caches) if jnp.issubdtype(x.dtype, jnp.floating))
        return sum((jnp.sum(x).astype(jnp.float32) for x in held), jnp.sum(logits) + jnp.sum(after))

    return jax.eval_shape(jax.grad(loss), params)


@pytest.mark.parametrize("policy", policies_with(16))
def test_through_a_models_prompt_and_step(policy, tiny):
    assert jax.tree.structure(model_gradient(policy, tiny)) == jax.tree.structure(tiny)


@pytest.mark.parametrize("policy", [offloaded(SnapKV(budget=16, window=4)), *offloads(16)], ids=str)
def test_what_is_on_the_host_has_none(policy, tiny):
    with pytest.raises(PolicyError, match=r"in host memory have no gradient. Use the policy"):
        model_gradient(policy, tiny)
