"""What families differ in, over meshes: factors, norms after attention and MLP, growing queries, layers without rotation, sinks,
recurrent layers, and gated attention.
"""

import dataclasses
import zlib
from typing import Any

import jax
import numpy as np
import pytest
from long_share import rotate

import kvjax
from kvjax.config import AttentionConfig, DeltaNetConfig, LayerConfig, MLPConfig, ModelConfig, MoEConfig, RopeConfig
from kvjax.models import Params, init
from kvjax.models.params import tree_map_named


@pytest.mark.parametrize("mesh", ["model=2", "data=2,sequence=2"])
def test_a_mesh_gives_what_one_device_does(mesh: str) -> None:
    mixer = AttentionConfig(4, 2, 8, RopeConfig(1e4, 8), qk_norm=True, query_growth=0.5, query_period=16)
    layer = LayerConfig(mixer, MLPConfig(64), "post")
    scales = {"embed_scale": 2.0, "residual_scale": 0.5, "logit_divisor": 0.5}
    layers = layer, dataclasses.replace(layer, norms="pre").unrotated
    params = init(ModelConfig("llama", 61, 48, layers, 256, **scales), jax.random.key(4))
    prompts = [np.random.default_rng(i).integers(3, 61, size).tolist() for i, size in enumerate((70, 7))]
    _check(params, prompts, mesh)


def recurrent() -> Params:
    """Three gated delta nets and a layer with gated attention."""
    attention = AttentionConfig(8, 4, 8, RopeConfig(1e4, 8), qk_norm=True, gated=True)
    layer = LayerConfig(attention, MLPConfig(64))
    delta = dataclasses.replace(layer, mixer=DeltaNetConfig(key_heads=4, value_heads=8, key_dim=8, value_dim=4))
    return init(
        ModelConfig("qwen3_5_text", 61, 48, (delta, delta, layer, delta), 256, norm_offset=1.0), jax.random.key(5)
    )


@pytest.mark.parametrize("mesh", rotate(["model=2", "data=2,model=2", "model=2,sequence=2"], always=["data=2,model=2"]))
def test_recurrent_layers_over_a_mesh(mesh: str) -> None:
    """Heads are sharded, and several devices have the same ones."""
    prompts = [np.random.default_rng(i).integers(3, 61, size).tolist() for i, size in enumerate((70, 7))]
    _check(recurrent(), prompts, mesh)


def test_a_saved_state_goes_to_another_mesh() -> None:
    params = recurrent()
    prompts = [np.random.default_rng(i).integers(3, 61, size).tolist() for i, size in enumerate((40, 7))]
    sizes = {"policy": "full", "batch": 2, "prompt_len": 40, "max_new_tokens": 16}
    engines = [kvjax.Engine(params, **sizes, mesh=mesh) for mesh in (None, "model=4", "data=2,model=2")]
    alone, _ = engines[0].prefill(prompts)
    want = engines[0].decode(alone, 12)[1]
    state = engines[1].prefill(prompts)[0]
    state, first, _ = engines[1].decode(state, 5)
    state = engines[2].resume(engines[1].save(state))
    rest = engines[2].decode(state, 7)[1]
    np.testing.assert_array_equal(np.concatenate([first[:, :5], rest[:, :7]], axis=1), want[:, :12])


def test_devices_that_cannot_share_a_delta_net_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"cannot share .* 8 recurrent heads of 8 x 4; give a number of devices that divides 32"
    ):
        kvjax.Engine(recurrent(), "full", prompt_len=8, mesh="model=3")


def _check(params: Params, prompts: list[list[int]], mesh: str) -> None:
    given: dict[str, Any] = {"policy": "snapkv:budget=20,window=4", "max_new_tokens": 20, "ignore_eos": True}
    want = kvjax.generate(params, prompts, **given)
    got = kvjax.generate(params, prompts, **given, mesh=mesh)
    for one, other in zip(got, want, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("mesh", "policy"),
    rotate(
        [
            ("model=4", "full"),
            ("data=2,sequence=2", "h2o:budget=20"),
            ("model=2,sequence=2", "quest:budget=32"),
            ("model=2", "turboquant"),
        ],
        always=[("data=2,sequence=2", "h2o:budget=20")],
    ),
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
