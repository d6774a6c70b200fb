"""Parameters and configuration: shapes come from one place, and a wrong configuration says what is wrong."""

import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import PRESETS, AttentionConfig, LayerConfig, MLPConfig, RopeConfig
from kvjax.models import ModelConfig, Params, abstract, init
from kvjax.models.attention import causal_attention
from kvjax.models.params import count, initial, quantized_shape, tree_map_named
from kvjax.models.transformer import hidden

FIELDS: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_layers": 3,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position": 128,
    "rope": RopeConfig(theta=1e4, dim=8),
}
FULL = ModelConfig.uniform(**FIELDS)
VARIANTS = {
    "plain": {},
    "tied": {"tied": True},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "norms": {"qk_norm": True, "sandwich_norms": True},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_random_parameters_have_the_abstract_shapes(name: str, dtype) -> None:
    config = ModelConfig.uniform(**FIELDS | VARIANTS[name])
    params = jax.eval_shape(lambda key: init(config, key, dtype), jax.random.key(1))
    assert params == abstract(config, dtype)
    assert params.dtype == dtype


def test_count_is_the_sum_written_out() -> None:
    D, F, V, N, K, H = 24, 40, 50, 6, 2, 8
    layer = 2 * D * N * H + 2 * D * K * H + 3 * D * F + 2 * D
    assert count(abstract(FULL)) == 3 * layer + 2 * V * D + D
    assert count(abstract(dataclasses.replace(FULL, tied=True))) == 3 * layer + V * D + D
    biased = ModelConfig.uniform(**FIELDS | VARIANTS["biases"])
    assert count(abstract(biased)) - count(abstract(FULL)) == 3 * (N * H + 2 * K * H + D + 2 * F + D)


def test_initial_scale() -> None:
    wide = ModelConfig.uniform(**FIELDS | {"num_layers": 1, "hidden_size": 512, "qkv_bias": True})
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
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gpt-oss-20b", 20_914_757_184),
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
        ({"windows": (1, None, 0)}, r"window=0 must be at least one token"),
        ({"rope": RopeConfig(theta=1e4, dim=7)}, r"rope\.dim=7 .* even"),
        ({"rope": RopeConfig(theta=1e4, dim=10)}, r"rope\.dim=10 .* at most head_dim=8"),
    ],
)
def test_a_wrong_configuration_says_what_is_wrong(change: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ModelConfig.uniform(**FIELDS | change)


def test_configurations_compare_and_hash_by_value() -> None:
    assert dataclasses.replace(FULL) == FULL
    assert hash(FULL) == hash(dataclasses.replace(FULL))
    assert FULL.windows == (None, None, None)
    assert FULL.differ_in_windows_only
    mixed = ModelConfig.uniform(**FIELDS | {"windows": (1, None, 1)})
    assert mixed.windows == (1, None, 1)
    assert mixed.layers[0] is mixed.layers[2]
    assert len(mixed.kinds) == 2
    scaled = FULL.with_attention(scale=8**-0.5)
    assert scaled == FULL
    assert pickle.loads(pickle.dumps(FULL)) == FULL


def test_cache_bytes_per_token() -> None:
    assert FULL.cache_bytes_per_token(itemsize=2) == 3 * 2 * (2 * 8) * 2


def mixed_layers() -> ModelConfig:
    """Two layers with nothing in common but the width of the residual stream."""
    first = LayerConfig(AttentionConfig(6, 2, 8, RopeConfig(1e4, 8), window=5), MLPConfig(40))
    other = LayerConfig(
        AttentionConfig(4, 4, 4, RopeConfig(1e6, 2), scale=0.3, qkv_bias=True, output_bias=True, qk_norm=True),
        MLPConfig(16, bias=True),
        norms="both",
    )
    return ModelConfig("llama", 50, 24, (first, other, first), 128)


def test_layers_have_shapes_of_their_own() -> None:
    config = mixed_layers()
    params = init(config, jax.random.key(0))
    assert jax.eval_shape(lambda: params) == abstract(config)
    assert [layer.attn.q.shape for layer in params.layers] == [(48, 24), (16, 24), (48, 24)]
    assert [layer.mlp.up.shape[0] for layer in params.layers] == [40, 16, 40]
    assert config.cache_bytes_per_token(2) == 2 * 2 * (2 * 16 + 16)
    assert "6 query heads on 2 KV heads of 8 and 4 query heads on 4 KV heads of 4" in repr(params)


@pytest.mark.parametrize("name", ["num_heads", "head_dim", "rope", "qk_norm", "intermediate_size"])
def test_what_layers_do_not_share_is_no_fact_of_the_model(name: str) -> None:
    config = mixed_layers()
    assert not config.differ_in_windows_only
    with pytest.raises(ValueError, match=r"differs between layers of this llama model: .*config\.layers\[i\]"):
        getattr(config, name)


def test_layers_that_differ_compute_with_what_is_theirs() -> None:
    """Attention of every layer, against its definition in NumPy."""
    config = mixed_layers()
    params = init(config, jax.random.key(1))
    tokens = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
    seen: list[Any] = []

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        kind = config.layers[layer].mixer
        out = causal_attention(kind, kind.rope.resolve(12), q, k, v)
        seen.append((layer, q, k, v, out))
        return out

    outputs = hidden(params, tokens, attend), hidden(params, tokens)
    assert jnp.array_equal(*outputs)
    place = np.arange(12)
    for layer, q, k, v, out in seen[:3]:
        kind = config.layers[layer].mixer
        rope = kind.rope.resolve(12)
        q, k = (np.asarray(rope.rotate(x, jnp.arange(12)[None, :, None])[0]) for x in (q, k))
        group = kind.num_heads // kind.num_kv_heads
        k, v = (np.repeat(x, group, axis=1) for x in (k, np.asarray(v[0])))
        logits = np.einsum("tnh,snh->nts", q, k) * kind.logit_scale
        distance = place[:, None] - place
        visible = (distance >= 0) & (distance < (kind.window or 12))
        weights = np.where(visible, np.exp(logits - logits.max()), 0)
        weights /= weights.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(out[0], np.einsum("nts,snh->tnh", weights, v), atol=1e-5)


def test_depth_and_attention_change() -> None:
    config = mixed_layers()
    assert config.with_depth(4).layers == (*config.layers, config.layers[0])
    assert config.with_depth(1).layers == config.layers[:1]
    assert config.with_attention(window=7).windows == (7, 7, 7)
