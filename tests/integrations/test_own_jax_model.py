"""The page about policies in a model of one's own: its code runs, and its model's tokens are those of kvjax' transformer."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from policies.driver import TINY, each, every_policy

import kvjax
from kvjax.cache import layer_specs
from kvjax.config import RopeConfig
from kvjax.models import Params, init
from kvjax.policies import Policy, PolicyError, get_policy, policies

PAGE = Path(__file__).resolve().parents[2] / "docs/howto/own_jax_model.md"
CODE = re.findall(r"```\{testcode\}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
SIZES, MODEL = CODE[:2]
PROMPTS = [np.random.default_rng(i).integers(0, 64, n).tolist() for i, n in enumerate((48, 20))]
NEW = 16

# What the page says that needs more of a model.
NEEDS_MORE = {"kvzip", "kvgrad", "attention_matching", "kvzap", "fast_kvzip", "infinigen"}
POLICIES = [p for p in every_policy(budget=24) if p.info.name not in NEEDS_MORE]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The page's names."""
    names: dict[str, Any] = {}
    for code in (SIZES, MODEL):
        exec(code, names)
    return names


@pytest.fixture(scope="module")
def weights() -> Params:
    """A random model of the page's sizes."""
    return init(TINY, jax.random.key(3))


def model_with(page: dict[str, Any], weights: Params, policy: Policy) -> Any:
    """The page's model with a kvjax model's weights."""
    specs = layer_specs(weights.config, 2, 48, NEW, jnp.float32)
    model = page["Llama"](weights.config, specs, policy, nnx.Rngs(0))
    model.embed.embedding[...], model.norm.scale[...] = weights.embed, weights.norm
    model.head.kernel[...] = weights.head.T
    for block, layer in zip(model.blocks, weights.layers, strict=True):
        block.norms[0].scale[...], block.norms[1].scale[...] = layer.attn_norm, layer.mlp_norm
        for name in ("q", "k", "v", "o"):
            getattr(block.attention, name).kernel[...] = getattr(layer.attn, name).T
        for name in ("gate", "up", "down"):
            getattr(block, name).kernel[...] = getattr(layer.mlp, name).T
    return model


def check(policy: Policy, page: dict[str, Any], weights: Params) -> None:
    """Greedy tokens of both models are equal."""
    model = model_with(page, weights, policy)
    tokens = np.zeros((2, model.blocks[0].attention.spec.prompt_len), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.asarray([len(prompt) for prompt in PROMPTS], np.int32)
    got = nnx.jit(page["generate"], static_argnames="count")(model, tokens, lengths, NEW)
    want: Any = kvjax.generate(weights, PROMPTS, policy, max_new_tokens=NEW, ignore_eos=True)
    assert got.tolist() == [row.tokens for row in want]


def test_its_tokens_are_those_of_kvjax(page, weights):
    """With the page's own policy."""
    assert page["config"] == TINY
    check(page["policy"], page, weights)


SCALED = {"rope": RopeConfig(theta=10.0, dim=0), "scale": 0.5}


@pytest.mark.parametrize(
    "changes", [pytest.param(SCALED, marks=pytest.mark.slow, id="scaled"), pytest.param({"window": 32}, id="window")]
)
def test_so_are_those_of_other_attention(changes, page):
    """A scale, no rotation, and layers with a sliding window, which the policy does not compress."""
    config = TINY.with_attention(**changes)
    check(kvjax.TreeKV(budget=24).for_model(config), page, init(config, jax.random.key(3)))


@pytest.mark.rotating
@each(POLICIES, later=True)
def test_so_are_those_of_every_policy(policy, page, weights):
    check(policy, page, weights)


@pytest.mark.parametrize("name", ["kvzap", "catekv", "duoattention", "pyramid(snapkv:48)"])
def test_a_policy_that_is_not_bound_says_so(name, page):
    def run() -> None:
        model = page["Llama"](TINY, page["specs"], get_policy(name), nnx.Rngs(0))
        model.prefill(jnp.zeros((2, 64), jnp.int32), jnp.asarray([48, 20], jnp.int32))

    with pytest.raises(PolicyError, match=r"is not bound to a model\. Use the result of bind\(config\)"):
        run()


def test_the_model_is_short():
    assert len(MODEL.splitlines()) < 100


def test_the_page_names_policies_that_there_are():
    assert set(policies()) >= NEEDS_MORE
