"""Models whose layers differ, with rings of slots and full caches, over meshes."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.conversion import from_hf
from kvjax.models import Params, init

pytestmark = pytest.mark.mesh


@pytest.fixture(scope="module")
def gemma() -> Params:
    """Windows of 40 tokens and a local rotary embedding in every other layer."""
    sizes = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    depth = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    fields = {
        "model_type": "gemma3_text",
        "sliding_window": 40,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    }
    return init(from_hf(sizes | depth | fields), jax.random.key(0))


@pytest.mark.rotating
@pytest.mark.parametrize("mesh", ["model=2", "data=2,model=2", "model=2,sequence=2", "sequence=4"])
@pytest.mark.parametrize(("policy", "budget"), [("full", None), ("snapkv:window=4", 30)])
@pytest.mark.parametrize("block", [None, 32])
def test_a_mesh_gives_what_one_device_does(
    gemma: Params, mesh: str, policy: str, budget: int | None, block: int | None
) -> None:
    prompts = [np.random.default_rng(i).integers(3, 101, size).tolist() for i, size in enumerate((130, 7, 90, 61))]
    options = {"policy": policy, "budget": budget, "max_new_tokens": 50, "ignore_eos": True, "prefill_block": block}
    want = kvjax.generate(gemma, prompts, **options)
    got = kvjax.generate(gemma, prompts, mesh=mesh, **options)
    assert [each.tokens for each in got] == [each.tokens for each in want]
