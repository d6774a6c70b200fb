"""What families differ in, over meshes: factors, norms after attention and MLP, growing queries, layers without rotation, sinks."""

import dataclasses
import zlib

import jax
import numpy as np
import pytest

import kvjax
from kvjax.config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, MoEConfig, RopeConfig
from kvjax.models import init
from kvjax.models.params import tree_map_named


@pytest.mark.parametrize("mesh", ["model=2", "data=2,sequence=2"])
def test_a_mesh_gives_what_one_device_does(mesh: str) -> None:
    mixer = AttentionConfig(4, 2, 8, RopeConfig(1e4, 8), qk_norm=True, query_growth=0.5, query_period=16)
    layer = LayerConfig(mixer, MLPConfig(64), "post")
    scales = {"embed_scale": 2.0, "residual_scale": 0.5, "logit_divisor": 0.5}
    layers = layer, dataclasses.replace(layer, norms="pre").unrotated
    params = init(ModelConfig("llama", 61, 48, layers, 256, **scales), jax.random.key(4))
    prompts = [np.random.default_rng(i).integers(3, 61, size).tolist() for i, size in enumerate((70, 7))]
    given = {"policy": "snapkv:budget=20,window=4", "max_new_tokens": 20, "ignore_eos": True}
    want = kvjax.generate(params, prompts, **given)
    got = kvjax.generate(params, prompts, **given, mesh=mesh)
    for one, other in zip(got, want, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("mesh", "policy"),
    [
        ("model=4", "full"),
        ("data=2,sequence=2", "h2o:budget=20"),
        ("model=2,sequence=2", "quest:budget=32"),
        ("model=2", "turboquant"),
    ],
)
def test_sinks_and_biased_experts(mesh: str, policy: str) -> None:
    """Sinks are sharded with their query heads, also where devices share KV heads. Biases are with their experts."""
    mixer = AttentionConfig(4, 2, 16, RopeConfig(1e4, 16), sinks=True)
    biased = LayerConfig(mixer, MoEConfig(4, 2, 32, activation="clamped_swiglu", bias=True))
    sigmoid = LayerConfig(mixer, MoEConfig(4, 2, 32, router="sigmoid", shared=32))
    params = init(ModelConfig("gpt_oss", 61, 48, (biased, sigmoid), 256), jax.random.key(4))

    def drawn(name: str, leaf: jax.Array) -> jax.Array:
        if not name.endswith(("sinks", "bias")):
            return leaf
        numbers = np.random.default_rng(zlib.crc32(name.encode())).normal(size=leaf.shape)
        return jax.numpy.asarray(numbers, leaf.dtype)

    params = tree_map_named(drawn, params)
    prompts = [np.random.default_rng(i).integers(3, 61, size).tolist() for i, size in enumerate((70, 7))]
    given = {"policy": policy, "max_new_tokens": 20, "ignore_eos": True}
    want = kvjax.generate(params, prompts, **given)
    got = kvjax.generate(params, prompts, **given, mesh=mesh)
    for one, other in zip(got, want, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
