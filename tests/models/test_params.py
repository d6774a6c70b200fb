"""Parameters and configuration: shapes come from one place, and a wrong configuration says what is wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import PRESETS, RopeConfig
from kvjax.models import ModelConfig, Params, abstract, init
from kvjax.models.params import count, initial, quantized_shape, tree_map_named

FULL = ModelConfig(
    family="llama",
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_position=128,
    rope=RopeConfig(theta=1e4, dim=8),
)
VARIANTS = {
    "plain": {},
    "tied": {"tied": True},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "norms": {"qk_norm": True, "sandwich_norms": True},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_random_parameters_have_the_abstract_shapes(name: str, dtype) -> None:
    config = dataclasses.replace(FULL, **VARIANTS[name])
    params = jax.eval_shape(lambda key: init(config, key, dtype), jax.random.key(1))
    assert params == abstract(config, dtype)
    assert params.dtype == dtype


def test_count_is_the_sum_written_out() -> None:
    D, F, V, N, K, H = 24, 40, 50, 6, 2, 8
    layer = 2 * D * N * H + 2 * D * K * H + 3 * D * F + 2 * D
    assert count(abstract(FULL)) == 3 * layer + 2 * V * D + D
    assert count(abstract(dataclasses.replace(FULL, tied=True))) == 3 * layer + V * D + D
    biased = dataclasses.replace(FULL, qkv_bias=True, output_bias=True, mlp_bias=True)
    assert count(abstract(biased)) - count(abstract(FULL)) == 3 * (N * H + 2 * K * H + D + 2 * F + D)


def test_initial_scale() -> None:
    wide = dataclasses.replace(FULL, num_layers=1, windows=(), hidden_size=512, qkv_bias=True)
    layer = init(wide, jax.random.key(2)).layers[0]
    assert float(layer.attn.q.std()) == pytest.approx(512**-0.5, rel=0.05)
    assert bool((layer.attn_norm == 1).all())
    assert layer.attn.q_bias is not None
    assert not layer.attn.q_bias.any()


@pytest.mark.parametrize(("kind", "codes", "accuracy"), [("int8", 256, 1e-6), ("int4", 16, 5e-4)])
def test_initial_scale_in_fewer_bits(kind: str, codes: int, accuracy: float) -> None:
    """Codes are uniform, so their standard deviation is that of all there are."""
    shape = quantized_shape(jax.ShapeDtypeStruct((4, 512), jnp.float32), kind)
    made = initial("layers.0.mlp.up", shape, jax.random.key(2))
    np.testing.assert_allclose(made.scale, 512**-0.5 / np.std(np.arange(codes)), rtol=accuracy)
    if kind == "int4":
        np.testing.assert_allclose(made.minimum / made.scale, -np.mean(np.arange(codes)), rtol=2 * accuracy)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-2-7b", 6_738_415_616),
        ("qwen2.5-7b", 7_615_616_512),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert count(abstract(PRESETS[name])) == parameters


def test_layers_differ(tiny: Params) -> None:
    first, second = tiny.layers[0], tiny.layers[1]
    assert not jnp.allclose(first.attn.q, second.attn.q)
    assert not jnp.allclose(first.mlp.gate, first.mlp.up)


def test_leaves_are_named_by_their_path(tiny: Params) -> None:
    names: list[str] = []
    tree_map_named(lambda name, leaf: names.append(name), tiny)
    assert len(names) == len(jax.tree.leaves(tiny))
    assert {"embed", "head", "norm", "layers.1.attn.q", "layers.0.mlp.down"} <= set(names)


def test_what_they_look_like(tiny: Params) -> None:
    assert repr(tiny).splitlines() == [
        f"Params(llama, {count(tiny):,} parameters, float32, {4 * count(tiny) / 1000:.1f} kB",
        "  2 layers of width 48, 4 query heads on 2 KV heads of 16, vocabulary of 64, window of 256 tokens",
        "  tokenizer=None)",
    ]
    assert f"bfloat16, {2 * count(tiny) / 1000:.1f} kB" in repr(abstract(tiny.config, jnp.bfloat16))
    # Whatever JAX and its users make of a pytree can be printed.
    leaves, tree = jax.tree.flatten(tiny)
    assert "bool" in repr(jax.tree.map(lambda leaf: leaf.ndim == 2, tiny))
    assert "object" in repr(jax.tree.unflatten(tree, [object() for _ in leaves]))
    traced: list[str] = []
    jax.eval_shape(lambda params: traced.append(repr(params)), tiny)
    assert traced == [repr(tiny)]


def test_params_are_a_pytree_with_static_configuration(tiny: Params) -> None:
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: x * 2, p))(tiny)
    assert doubled.config == tiny.config
    assert jnp.array_equal(doubled.norm, tiny.norm * 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_kv_heads": 4}, r"num_heads=6 .* num_kv_heads=4"),
        ({"windows": (16, None)}, r"2 entries for 3 layers"),
        ({"windows": (1, None, 0)}, r"windows=\(1, None, 0\) must be at least one token"),
        ({"rope": RopeConfig(theta=1e4, dim=7)}, r"rope\.dim=7 .* even"),
        ({"rope": RopeConfig(theta=1e4, dim=10)}, r"rope\.dim=10 .* at most head_dim=8"),
    ],
)
def test_a_wrong_configuration_says_what_is_wrong(change: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(FULL, **change)


def test_configurations_compare_and_hash_by_value() -> None:
    assert dataclasses.replace(FULL) == FULL
    assert hash(FULL) == hash(dataclasses.replace(FULL))
    assert FULL.windows == (None, None, None)
    assert dataclasses.replace(FULL, windows=(1, None, 1)).windows == (1, None, 1)


def test_cache_bytes_per_token() -> None:
    assert FULL.cache_bytes_per_token(itemsize=2) == 3 * 2 * (2 * 8) * 2
