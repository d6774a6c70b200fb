"""Models with weights in 8 and 4 bits: products, bytes, and every policy as with floats."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import logits, numbers
from policies.driver import every_policy

import kvjax
from kvjax.bench.floor import weight_bytes
from kvjax.config import MLPConfig
from kvjax.conversion import quantize_weights
from kvjax.models import Params, abstract
from kvjax.models.params import count, nbytes, retyped
from kvjax.pallas_kernels import GroupedMatrix, Int8Matrix, Norm, is_quantized, lookup, projection
from kvjax.pallas_kernels.hopper.fused_decode_block import BlockWeights, fused_decode_block
from kvjax.runtime.engine import Engine

KINDS = ["int8", "int4"]
PROMPT = [5, 9, 2, 7, 7, 1] * 9
NEW = 12


@pytest.fixture(scope="module")
def held(tiny: Params) -> dict[str, Params]:
    return {kind: quantize_weights(tiny, kind, "int8") for kind in KINDS}


def dequantised(params: Params) -> Params:
    return jax.tree.map(lambda w: numbers(w, params.dtype.name) if is_quantized(w) else w, params, is_leaf=is_quantized)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_products_are_those_of_the_numbers(held, kind: str, shape: tuple[int, ...]) -> None:
    w = held[kind].layers[0].mlp.down
    assert isinstance(w, Int8Matrix if kind == "int8" else GroupedMatrix)
    random, floats = np.random.default_rng(0), np.asarray(numbers(w))
    x, y = (random.normal(size=(*shape, w.shape[1 - i])).astype(np.float32) for i in (0, 1))
    norm = Norm(jnp.asarray(1 + 0.1 * random.normal(size=w.shape[1]), jnp.float32), 1e-5)
    found, normed = jax.jit(lambda x, w, y: (projection(x, w, norm=norm, residual=y)[0], norm(x)))(x, w, y)
    np.testing.assert_allclose(found, y + normed @ floats.T, atol=1e-4)
    half = x.astype(jnp.bfloat16)
    (found,) = jax.jit(lambda x, w: projection(x, w, dtype=jnp.float32))(half, w)
    expected = half.astype(np.float32) @ floats.T
    np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())
    indices = random.integers(0, w.shape[0], shape).astype(np.int32)
    np.testing.assert_array_equal(jax.jit(lambda w, i: lookup(w, i, jnp.float32))(w, indices), floats[indices])


@pytest.mark.parametrize("kind", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_logits_are_those_of_the_numbers(held, kind: str) -> None:
    tokens = jnp.asarray([PROMPT], jnp.int32)
    expected = logits(dequantised(held[kind]), tokens)
    np.testing.assert_allclose(logits(held[kind], tokens), expected, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_arrays(held, tiny: Params, kind: str) -> None:
    params = held[kind]
    assert count(params) == count(tiny)
    assert params.dtype == tiny.dtype
    shapes = abstract(tiny.config, tiny.dtype, weights=kind, embedding="int8")
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(shapes)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(params)
    ]
    assert nbytes(shapes) == sum(x.nbytes for x in jax.tree.leaves(params))
    assert f"float32 and {kind}" in repr(params)
    assert weight_bytes(params) == nbytes(params) - (64 * 48 + 64 * 4)  # but for the embedding
    engine = Engine(params, "streaming_llm", 24, prompt_len=40, max_new_tokens=8)
    assert engine.cache_bytes == Engine(tiny, "streaming_llm", 24, prompt_len=40, max_new_tokens=8).cache_bytes
    half = Engine(params, prompt_len=8, dtype="bfloat16").weights
    assert half == retyped(params, jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    assert half.layers[0].mlp.up.levels.dtype == params.layers[0].mlp.up.levels.dtype


def test_programs_are_for_one_kind_of_weights(held, tiny: Params) -> None:
    shapes = abstract(tiny.config, tiny.dtype, weights="int4", embedding="int8")
    engine = Engine(shapes, "snapkv:24,window=8,kernel=3", prompt_len=40, max_new_tokens=8)
    assert engine.of(held["int4"]).weights == held["int4"]
    for other in (held["int8"], tiny):
        with pytest.raises(ValueError, match="give the weights that they were compiled for"):
            engine.of(other)
    with pytest.raises(ValueError, match="params are shapes without weights"):
        kvjax.generate(shapes, [1, 2, 3])


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize("kind", ["int4"])
def test_a_loop_holds_no_dequantised_model(kind: str, tiny: Params) -> None:
    """What decoding needs besides its arguments is less than two layers' matrices as floats, however many layers there are."""
    layer = dataclasses.replace(tiny.config.layers[0], mlp=MLPConfig(512))
    config = dataclasses.replace(tiny.config, layers=(layer,) * 4, hidden_size=256)
    params = abstract(config, jnp.float32, weights=kind)
    _, decode = Engine(params, "streaming_llm", 16, prompt_len=32, max_new_tokens=8).executables()
    layer = sum(
        4 * w.shape[0] * w.shape[1] for w in jax.tree.leaves(params.layers[0], is_leaf=is_quantized) if is_quantized(w)
    )
    assert decode.memory_analysis().temp_size_in_bytes < 2 * layer


FEW = {"treekv": (), "chelsea": pytest.mark.slow, "quest": pytest.mark.slow, "infinigen": pytest.mark.slow}
"""One of each kind: a policy does not see weights, but for the queries that InfiniGen computes ahead."""


@pytest.mark.parametrize("kind", ["int4"])
@pytest.mark.parametrize(
    "policy",
    [pytest.param(p, marks=FEW[p.info.name], id=p.info.name) for p in every_policy(budget=4096) if p.info.name in FEW],
)
def test_ample_budget_is_the_full_cache(policy, held, kind: str) -> None:
    options = {"max_new_tokens": NEW, "ignore_eos": True}
    expected = kvjax.generate(dequantised(held[kind]), PROMPT, **options)
    found = kvjax.generate(held[kind], PROMPT, policy=policy, **options)
    assert found.tokens == expected.tokens
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.slow
def test_4_bits_of_everything_within_a_budget(held) -> None:
    """Weights and cache in 4 bits, and tokens dropped: what is computed is finite, and kept within the budget."""
    policy = kvjax.policies.quantized(kvjax.get_policy("snapkv", budget=24, window=8, kernel=3), 4)
    found = kvjax.generate(held["int4"], PROMPT, policy=policy, max_new_tokens=NEW, ignore_eos=True)
    assert np.isfinite(found.logprobs).all()
    assert found.stats.cache_bytes < found.stats.full_cache_bytes


def test_the_fused_block_leaves_them_to_xla(held) -> None:
    a, b = held["int8"].layers
    norms = Norm(a.mlp_norm, 1e-5), Norm(b.attn_norm, 1e-5)
    weights = BlockWeights(a.attn.o, norms[0], a.mlp.gate, a.mlp.up, a.mlp.down, norms[1], b.attn.q, b.attn.k, b.attn.v)
    out, x = jnp.ones((1, 64)), jnp.ones((1, 48))
    run = jax.jit(fused_decode_block)
    found = run(out, x, weights)
    floats = BlockWeights(*(numbers(w) if is_quantized(w) else w for w in weights))
    for got, want in zip(found, run(out, x, floats), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)
