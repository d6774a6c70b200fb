"""The page about policies in a model of one's own, on a mesh."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import kvjax
from kvjax.cache import LayerSpec
from kvjax.policies import PolicyError, partition_specs

PAGE = Path(__file__).resolve().parents[2] / "docs/howto/own_jax_model.md"


def test_a_step_on_the_pages_mesh_is_that_of_one_device():
    sizes, model, sinks, samples, mesh = re.findall(
        r"```\{testcode\}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    names = {}
    exec(sizes + model, names)
    names["model"] = names["Llama"](names["config"], names["specs"], names["policy"], nnx.Rngs(0))
    names["tokens"] = jax.random.randint(jax.random.key(1), (2, names["specs"][0].prompt_len), 0, 64)
    names["lengths"] = lengths = jnp.asarray([48, 20], jnp.int32)
    exec(sinks, names)
    assert names["out"].shape == (2, 4, 16)
    exec(samples, names)
    want, _ = names["model"].step(names["logits"].argmax(axis=-1).astype(jnp.int32), lengths, names["states"])
    exec(mesh, names)
    assert names["devices"] == 2
    np.testing.assert_allclose(np.asarray(names["logits"]), np.asarray(want), atol=1e-5)
    for state in names["held"]:
        assert state.cache.k.sharding.spec[0] == "data"


def test_partitions_are_those_of_rows_and_of_the_shard():
    spec = LayerSpec(num_heads=8, num_kv_heads=4, head_dim=16, prompt_len=32, new_tokens=16, batch=2)
    assert partition_specs(kvjax.TreeKV(budget=16), spec).cache.k == PartitionSpec("data", None, None, None)
    mesh = jax.make_mesh((2, 2, 1, 2), ("data", "heads", "copies", "slots"))
    own = spec.on(kvjax.cache.Shard(mesh))
    assert partition_specs(kvjax.SnapKV(budget=48), own).k == PartitionSpec("data", "heads", "slots", None)
    with pytest.raises(PolicyError, match="host memory"):
        partition_specs(kvjax.offloaded(kvjax.Full()), spec)
