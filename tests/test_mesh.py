"""What can be said of a mesh on one device: its text, its errors, and how parameters are sharded."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

import kvjax
from kvjax.cache import LayerSpec, PromptKV, layer_specs
from kvjax.cache.shard import COPIES, DATA, HEADS, SAME_HEADS, SLOTS, Shard
from kvjax.config import MLPConfig, RopeConfig
from kvjax.models import ModelConfig, abstract
from kvjax.models.attention import prompt_attention
from kvjax.models.params import quantized_shape, tree_map_named
from kvjax.models.sharding import get_mesh, get_shard, partition, place, place_from
from kvjax.policies import KIVI, Full
from kvjax.runtime.mesh import first_row, over_mesh, policy_shard, repeated_row, resumed, saved, state_partitions


def shard_of(data: int = 1, heads: int = 1, copies: int = 1, slots: int = 1) -> Shard:
    return Shard(AbstractMesh((data, heads, copies, slots), (DATA, HEADS, COPIES, SLOTS)))


def each_device(function: Callable[..., Any], copies: int = 1, slots: int = 1) -> Callable[..., Any]:
    """What every device with the same KV heads computes; mapped axes of JAX stand for the devices."""
    among_slots = jax.vmap(function, None, axis_name=SLOTS, axis_size=slots)
    return jax.vmap(among_slots, None, axis_name=COPIES, axis_size=copies)


def spec_on(shard: Shard, config: ModelConfig) -> LayerSpec:
    """The first layer, 2 rows and 128 slots on all devices together."""
    return layer_specs(config, 2, 64, 64, jnp.float32)[0].on(shard)


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
    with pytest.raises(kvjax.PolicyError, match="host memory"):
        policy_shard("model=1", tiny.config, policy)


def test_every_matrix_is_sharded(tiny):
    """Of all that a model has, only norms, and biases after a sum, are whole on every device."""
    config = tiny.config.with_attention(qkv_bias=True, output_bias=True, qk_norm=True)
    layer = dataclasses.replace(config.layers[0], mlp=MLPConfig(96, bias=True), norms="both")
    config = dataclasses.replace(config, layers=(layer,) * 2)
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


def test_devices_with_the_same_heads_divide_columns():
    """In the order of the mesh; gathered they are as many again."""
    shard, x = shard_of(copies=2, slots=2), np.arange(24.0, dtype=np.float32).reshape(3, 8)
    own = jax.jit(each_device(shard.own_columns, 2, 2))(x)
    np.testing.assert_array_equal(np.reshape(own, (4, 3, 2)), np.split(x, 4, axis=1))
    gathered = over_mesh(shard.gather_over_same_heads, shard, PartitionSpec(None, SAME_HEADS), PartitionSpec())
    assert jax.eval_shape(gathered, x).shape == (3, 8)


@pytest.mark.parametrize("sizes", [{"data": 2}, {"heads": 2}, {"slots": 2}, {"data": 2, "heads": 2, "slots": 2}])
def test_axes_of_a_cache(sizes, tiny):
    """Rows are partitioned along `data` even of one device, KV heads and slots only among several."""
    (found,) = state_partitions(Full(), [spec_on(shard_of(**sizes), tiny.config)])
    heads, slots = (axis if axis in sizes else None for axis in (HEADS, SLOTS))
    assert found.k == PartitionSpec(DATA, heads, slots, None)
    assert found.pos == PartitionSpec(DATA, heads, None)
    assert found.seen == PartitionSpec(DATA)


def test_saved_states_have_the_slots_of_one_device_in_order(tiny):
    """Of 2 devices that share slots, the first has every other run of 32, counted in whatever entries an array has of a run."""
    policy, spec = KIVI(group=16, residual=16), spec_on(shard_of(data=2, heads=2, slots=2), tiny.config)
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(policy.layer(spec.whole).init)
    whole = jax.tree.map(lambda x: random.integers(0, 100, x.shape).astype(x.dtype), shapes)
    (moved,) = resumed(policy, [spec], [whole])

    def by_runs(x, axis):
        runs = np.split(x, 4, axis)
        return np.concatenate([runs[i] for i in (0, 2, 1, 3)], axis)

    np.testing.assert_array_equal(moved.k.codes, by_runs(whole.k.codes, 2))
    np.testing.assert_array_equal(moved.k.scale, by_runs(whole.k.scale, 2))
    np.testing.assert_array_equal(moved.v.scale, by_runs(whole.v.scale, 3))
    np.testing.assert_array_equal(moved.pos, whole.pos)
    (back,) = saved(policy, [spec], [jax.tree.map(jnp.asarray, moved)])
    jax.tree.map(np.testing.assert_array_equal, back, whole)


def test_the_first_row_is_repeated_for_all(tiny):
    """In a model of a single layer, too."""
    spec = spec_on(shard_of(data=2), tiny.config)
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(Full().layer(spec.whole).init)
    whole = jax.tree.map(lambda x: random.integers(0, 100, x.shape).astype(x.dtype), shapes)
    first = first_row(Full(), [spec], [whole])
    for one, array in zip(jax.tree.leaves(first), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(one, array[:1])
    for rows, array in zip(jax.tree.leaves(repeated_row(Full(), [spec], first)), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(rows, np.concatenate([array[:1]] * 2))


@pytest.mark.parametrize(("heads", "kv_heads", "copies", "own"), [(4, 1, 2, 2), (6, 2, 3, 6)])
def test_devices_with_the_same_heads_divide_the_prompts_queries(heads, kv_heads, copies, own):
    """Each attends with the query heads of its columns; with all, where those of a device are parts of two groups."""
    config = ModelConfig.uniform("llama", 64, 48, 96, 1, heads, kv_heads, 4, 256, RopeConfig(theta=1e4, dim=4))
    spec = spec_on(shard_of(copies=copies), config)
    random, lengths = np.random.default_rng(0), to_jax([8, 8], jnp.int32)
    q, k, v = (to_jax(random.normal(size=(2, 8, n, 4)), jnp.float32) for n in (heads, kv_heads, kv_heads))

    @jax.jit
    def attended(q, k, v):
        prompt = PromptKV(q, k, v, q, k, None, lengths, lengths, lengths)
        own = each_device(lambda prompt: prompt_attention(spec, prompt), copies)(prompt)
        return own[:, 0], prompt_attention(spec.whole, prompt)

    parts, whole = attended(q, k, v)
    for device, part in enumerate(np.asarray(parts)):
        first = device * own if own < heads else 0
        np.testing.assert_allclose(part, whole[:, :, first : first + own], atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "sharing"),
    [({"heads": 2}, "model=2 devices"), ({"heads": 2, "slots": 2}, "4 devices along model and sequence")],
)
def test_groups_of_one_scale_stay_together(sizes, sharing):
    matrix = quantized_shape(jax.ShapeDtypeStruct((48, 96), jnp.float32), "int4")
    with pytest.raises(
        ValueError, match=rf"o\.levels: inputs are in 3 groups of one scale, which {sharing} do not divide"
    ):
        place(shard_of(**sizes), "layers.0.attn.o", matrix)


def test_a_device_reads_its_rows_and_columns_once(tiny):
    """All of a matrix of other widths than heights, where there is one device."""
    numbers, read = np.arange(12.0, dtype=np.float32).reshape(4, 3), []

    def part(rows, columns):
        read.append((rows, columns))
        return numbers[rows, columns]

    shard = get_shard(get_mesh("model=1"), tiny.config)
    found = place_from(shard, "layers.0.mlp.up", jax.ShapeDtypeStruct((4, 3), jnp.float32), part)
    np.testing.assert_array_equal(found, numbers)
    assert read == [(slice(0, 4), slice(0, 3))]
