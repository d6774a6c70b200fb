"""What can be said of a mesh on one device: its text, its errors, and how parameters are dealt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import kvjax
from kvjax.models import ModelConfig, abstract
from kvjax.models.params import tree_map_named
from kvjax.models.sharding import get_mesh, get_shard, partition
from kvjax.runtime.mesh import policy_shard


@pytest.mark.parametrize("text", ["", "model", "model=0", "model=x", "rows=2", "model=1,model=1", "model=1;data=1"])
def test_text_that_is_no_mesh(text):
    with pytest.raises(ValueError, match="data=2,model=4"):
        get_mesh(text)


def test_meshes_that_cannot_be(tiny):
    with pytest.raises(ValueError, match="asks for 4096 devices, but there"):
        kvjax.generate(tiny, [1, 2], mesh="data=64,model=64")
    with pytest.raises(ValueError, match=r"axes \['x'\]"):
        kvjax.generate(tiny, [1, 2], mesh=Mesh(np.asarray(jax.devices()[:1]), ("x",)))
    with pytest.raises(ValueError, match="one of the two"):
        kvjax.load(device=jax.devices()[0], mesh="model=1")


def test_one_device_is_a_mesh_too(tiny):
    options = {"policy": "treekv", "budget": 16, "max_new_tokens": 8, "ignore_eos": True}
    one, meshed = (kvjax.generate(tiny, [[1, 2, 3], [4]], mesh=mesh, **options) for mesh in (None, "data=1,model=1"))
    assert [r.tokens for r in meshed] == [r.tokens for r in one]


def test_every_axis_has_its_place(tiny):
    mesh = jax.sharding.AbstractMesh((2, 2, 4), ("data", "sequence", "model"))
    shard = get_shard(mesh, tiny.config)
    assert (shard.data, shard.heads, shard.copies, shard.slots) == (2, 2, 2, 2)
    assert (shard.same_heads, shard.model, shard.devices) == (4, 8, 16)
    with pytest.raises(ValueError, match="sequence=7: "):
        get_shard(jax.sharding.AbstractMesh((7,), ("sequence",)), tiny.config)
    with pytest.raises(ValueError, match=r"axes \['x', 'model'\]"):
        kvjax.Engine(tiny, prompt_len=8, mesh=jax.sharding.AbstractMesh((2, 2), ("x", "model")))
    engines = [kvjax.Engine(each, batch=2, prompt_len=40, mesh=mesh, dtype="float32") for each in (tiny, tiny.config)]
    assert engines[0].cache_bytes == engines[1].cache_bytes
    assert engines[0].compile_seconds == 0


def test_host_memory_is_refused(tiny):
    policy = kvjax.get_policy("offloaded(clusterkv:64)").bind(tiny.config)
    with pytest.raises(kvjax.PolicyError, match="host's memory"):
        policy_shard("model=1", tiny.config, policy)


def test_every_matrix_is_dealt(tiny):
    """Of all that a model has, only norms, and biases after a sum, are whole on every device."""
    config = ModelConfig(
        **{
            **vars(tiny.config),
            "qkv_bias": True,
            "output_bias": True,
            "mlp_bias": True,
            "sandwich_norms": True,
            "qk_norm": True,
        }
    )
    whole = set()
    tree_map_named(
        lambda name, leaf: (
            whole.add(name.rpartition(".")[2]) if partition(name, leaf.ndim) == PartitionSpec() else None
        ),
        abstract(config),
    )
    assert whole == {
        "attn_norm",
        "mlp_norm",
        "attn_post_norm",
        "mlp_post_norm",
        "norm",
        "q_norm",
        "k_norm",
        "o_bias",
        "down_bias",
    }


def test_no_mesh_is_one_device(tiny):
    shard, x = get_shard(None, tiny.config), jnp.arange(3.0)
    assert shard.devices == 1
    for function in (
        shard.sum_over_model,
        shard.gather_over_model,
        shard.own_columns,
        shard.sum_over_heads,
        shard.gather_over_same_heads,
        shard.max_over_data,
        shard.gather_over_data,
    ):
        assert function(x) is x
