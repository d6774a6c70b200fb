"""Mixtures of experts over meshes: each device has some of the experts, whole."""

import itertools

import jax
import numpy as np
import pytest
from long_share import rotate

import kvjax
from kvjax.config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, MoEConfig, RopeConfig
from kvjax.models import Params, init


@pytest.fixture(scope="module")
def params() -> Params:
    """Four experts with a shared MLP in two of three layers."""
    mixer = AttentionConfig(8, 4, 8, RopeConfig(1e4, 8))
    moe = LayerConfig(mixer, MoEConfig(4, 2, 32, shared=64, shared_gate=True))
    dense = LayerConfig(mixer, MLPConfig(64))
    return init(ModelConfig("qwen2_moe", 61, 48, (moe, dense, moe), 256), jax.random.key(4))


@pytest.mark.parametrize(
    ("policy", "mesh"),
    rotate(
        itertools.product(
            ("full", "snapkv:budget=20,window=4"), ("model=2", "model=4", "data=2,model=2", "model=2,sequence=2")
        ),
        always=[("full", "model=2,sequence=2"), ("snapkv:budget=20,window=4", "data=2,model=2")],
    ),
)
def test_a_mesh_gives_what_one_device_does(params: Params, mesh: str, policy: str) -> None:
    """Prompts of many tiles, and steps of one tile a pair."""
    prompts = [np.random.default_rng(i).integers(3, 61, size).tolist() for i, size in enumerate((130, 7, 90, 61))]
    want = kvjax.generate(params, prompts, policy=policy, max_new_tokens=30, ignore_eos=True)
    got = kvjax.generate(params, prompts, policy=policy, max_new_tokens=30, ignore_eos=True, mesh=mesh)
    for one, other in zip(got, want, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_experts_over_a_mesh(params: Params, kind: str) -> None:
    fewer = kvjax.conversion.quantize_weights(params, kind)
    prompt = np.random.default_rng(0).integers(3, 61, 70).tolist()
    want = kvjax.generate(fewer, prompt, policy="full", max_new_tokens=20, ignore_eos=True)
    got = kvjax.generate(fewer, prompt, policy="full", max_new_tokens=20, ignore_eos=True, mesh="model=2")
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-3)
    assert got.tokens == want.tokens
