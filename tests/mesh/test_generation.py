"""What users call, over a mesh: weights that are loaded into their places, text, sessions, compiled programs."""

import re

import jax
import numpy as np
import pytest
from long_share import rotate

import kvjax
from kvjax.conversion import quantize_weights
from kvjax.conversion.checkpoint import Checkpoint
from kvjax.evals.following import following
from kvjax.evals.perplexity import streaming, windowed
from kvjax.evals.report import model_fingerprint
from kvjax.models import abstract
from kvjax.models.params import tree_map_named
from kvjax.models.sharding import bytes_per_device, get_mesh, get_shard, mesh_of, place_all
from kvjax.planning.sums import step_sums
from kvjax.runtime.inspection import retained_positions

from .conftest import model

BITES = {"policy": "snapkv:window=4", "budget": 16, "max_new_tokens": 12, "ignore_eos": True}


def tokens(results):
    return [result.tokens for result in results]


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_any_number_of_rows(rows, uneven, prompts):
    expected = kvjax.generate(uneven, prompts[:rows], **BITES)
    results = kvjax.generate(uneven, prompts[:rows], mesh="data=2,model=4", **BITES)
    assert tokens(results) == tokens(expected)
    stats = results[0].stats
    assert (stats.rows, stats.devices, stats.head_copies) == (rows, 8, 2)
    assert expected[0].stats.devices == 1


def test_slots_on_several_devices(uneven, prompts):
    """A session that extends its prompt in blocks, and what is said of devices; weights lie on the mesh."""
    params = place_all(get_shard("model=2,sequence=2", uneven.config), uneven)
    assert mesh_of(params).shape == {"data": 1, "model": 2, "sequence": 2}
    (one,), (many,) = (
        kvjax.generate(each, prompts[:1], "quest:dense_layers=0,page=4", 16, 12) for each in (uneven, params)
    )
    assert many.tokens == one.tokens
    assert (many.stats.devices, many.stats.head_copies, many.stats.slot_devices) == (4, 1, 2)
    assert 0 < many.stats.repeated_cache_bytes < many.stats.cache_bytes < one.stats.cache_bytes / 2
    assert many.stats.full_cache_bytes < many.stats.cache_bytes  # pages have bounds besides
    replies = []
    for each in (uneven, params):
        session = kvjax.Session(each, prompts[0], "full", prefill_block=16, max_prompt_tokens=100, max_new_tokens=20)
        session.extend(prompts[2])
        replies.append(session.generate([1, 2, 3], 8, ignore_eos=True).tokens)
    assert replies[0] == replies[1]


def test_a_second_call_traces_and_places_nothing(uneven, prompts, monkeypatch):
    """Weights that are on the mesh stay as they are, and sizes of caches are computed once."""
    shard = get_shard("model=2,sequence=2", uneven.config)
    params = place_all(shard, uneven)
    assert all(a is b for a, b in zip(jax.tree.leaves(place_all(shard, params)), jax.tree.leaves(params), strict=True))
    first = kvjax.generate(params, prompts[0], **BITES)

    def refuse(*args, **kwargs):
        raise AssertionError("nothing is traced or moved")

    for module, name in ((jax, "eval_shape"), (jax, "make_jaxpr"), (jax, "device_put")):
        monkeypatch.setattr(module, name, refuse)
    again = kvjax.generate(params, prompts[0], **BITES)
    assert again.tokens == first.tokens
    assert again.stats.repeated_cache_bytes == first.stats.repeated_cache_bytes > 0


def test_questions_and_sampling(uneven, prompts):
    options = {**BITES, "question": [[1, 2], [3], [4, 5, 6]], "temperature": 0.8, "top_p": 0.9, "seed": 3}
    results = kvjax.generate(uneven, prompts[:3], mesh="data=2,model=2", **options)
    assert tokens(results) == tokens(kvjax.generate(uneven, prompts[:3], **options))


@pytest.mark.parametrize(
    "heads",
    [{"num_heads": 4, "num_kv_heads": 1}, {"num_heads": 12, "num_kv_heads": 2}, {"num_heads": 3, "num_kv_heads": 3}],
)
def test_heads_that_devices_do_not_divide(heads, prompts):
    params = model(**heads, head_dim=16)
    results = kvjax.generate(params, prompts, mesh="model=8", **BITES)
    assert tokens(results) == tokens(kvjax.generate(params, prompts, **BITES))


@pytest.mark.parametrize(
    "traits",
    rotate(
        [
            {"tied": True},
            {"qkv_bias": True, "qk_norm": True},
            {"output_bias": True, "mlp_bias": True},
            {"sandwich_norms": True},
        ],
        always=[{"qkv_bias": True, "qk_norm": True}],
    ),
)
def test_families(traits, prompts):
    params = model(4, 2, 16, **traits)
    random = np.random.default_rng(2)
    noisy = jax.tree.map(lambda x: x + np.float32(0.1) * random.standard_normal(x.shape).astype(np.float32), params)
    one, many = (kvjax.generate(noisy, prompts, mesh=mesh, **BITES) for mesh in (None, "model=4"))
    assert tokens(many) == tokens(one)
    np.testing.assert_allclose([r.logprobs for r in many], [r.logprobs for r in one], atol=2e-5)


def test_loaded_and_saved(tmp_path, uneven, prompts):
    """A model that was saved is loaded into places, runs there, is saved from there, and is the same to the bit."""
    kvjax.save(uneven, tmp_path / "saved")
    params = kvjax.load(tmp_path / "saved", mesh="data=2,model=4", progress=False)
    assert len(params.embed.sharding.device_set) == 8
    assert params.embed.shape == (64, 48)  # 61 rows and zeros
    assert bytes_per_device(params) < 0.5 * bytes_per_device(uneven)
    assert tokens(kvjax.generate(params, prompts, **BITES)) == tokens(kvjax.generate(uneven, prompts, **BITES))
    kvjax.save(params, tmp_path / "again")
    again = kvjax.load(tmp_path / "again", mesh="model=2", progress=False)
    assert again.config == uneven.config
    back = kvjax.load(tmp_path / "again", progress=False)
    jax.tree.map(np.testing.assert_array_equal, back, uneven)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_in_fewer_bits(weights, prompts, tmp_path):
    params = quantize_weights(model(4, 2, 16, hidden_size=64, intermediate_size=256), weights)
    expected = tokens(kvjax.generate(params, prompts, **BITES))
    placed = place_all(get_shard("model=2", params.config), params)
    assert tokens(kvjax.generate(placed, prompts, **BITES)) == expected
    assert bytes_per_device(placed) < 0.8 * bytes_per_device(params)
    kvjax.save(placed, tmp_path / "saved")
    again = kvjax.load(tmp_path / "saved", weights="as stored", mesh="data=2,model=2", progress=False)
    jax.tree.map(np.testing.assert_array_equal, again, placed)


def test_groups_that_devices_do_not_divide(uneven):
    params = quantize_weights(model(4, 2, 16, hidden_size=64, intermediate_size=96), "int4")
    with pytest.raises(ValueError, match="3 groups of one scale, which model=2"):
        place_all(get_shard("model=2", params.config), params)


def test_such_groups_are_refused_before_anything_is_read(uneven, tmp_path, monkeypatch):
    kvjax.save(uneven, tmp_path / "model", format="safetensors")

    def read(*_):
        raise AssertionError("something was read")

    monkeypatch.setattr(Checkpoint, "read", read)
    with pytest.raises(
        ValueError,
        match=r"layers\.0\.attn\.o\.levels: inputs are in 2 groups of one scale, which model=4 devices do not divide",
    ):
        kvjax.load(tmp_path / "model", weights="int4", mesh="model=4")


def test_weights_stay_where_they_are(uneven):
    shard = get_shard("data=2,model=4", uneven.config)
    placed = place_all(shard, uneven)
    again = place_all(shard, placed)
    for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(again), strict=True):
        ours, theirs = ([s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for x in (a, b))
        assert ours == theirs
    # Whole parameters are only on devices where the table says so.
    whole = abstract(uneven.config)
    parts = tree_map_named(lambda name, x: x.sharding.shard_shape(x.shape), placed)
    assert parts.layers[0].attn.q == (whole.layers[0].attn.q.shape[0] // 2, 48)
    assert parts.layers[0].attn.o == (48, whole.layers[0].attn.o.shape[1] // 4)
    assert parts.layers[0].mlp.down == (48, 25)
    assert parts.norm == (48,)


@pytest.mark.parametrize(("policy", "mesh"), [("treekv:sinks=2,block=4", "data=2,model=2"), ("full", "sequence=4")])
def test_session(policy, mesh, uneven, prompts):
    sessions = [kvjax.Session(uneven, prompts[0], policy, 16, 64, mesh=mesh) for mesh in (None, mesh)]
    for text in ([1, 2, 3], [7]):
        one, many = (session.generate(text, 6, ignore_eos=True) for session in sessions)
        assert many.tokens == one.tokens
    forks = [session.ask([[5], [6, 7]], 4, ignore_eos=True) for session in sessions]
    assert tokens(forks[0]) == tokens(forks[1])
    assert sessions[1].cache_bytes < sessions[0].cache_bytes


def test_compiled_ahead_of_time(uneven, prompts):
    from kvjax.models import ModelConfig

    shape: ModelConfig = uneven.config
    server = kvjax.aot_compile(
        shape,
        "snapkv:window=4",
        16,
        batch=2,
        prompt_len=50,
        max_new_tokens=12,
        dtype="float32",
        mesh="data=2,model=2",
        ignore_eos=True,
    )
    assert tokens(server.generate(uneven, prompts[:3])) == tokens(kvjax.generate(uneven, prompts[:3], **BITES))
    assert "batch=2" in repr(server)
    alone = kvjax.aot_compile(shape, "snapkv:window=4", 16, batch=2, prompt_len=50, max_new_tokens=12, dtype="float32")
    assert server.memory.weights < alone.memory.weights
    assert server.memory.cache < alone.memory.cache


def test_a_mesh_of_the_users_own(uneven, prompts):
    devices = np.asarray(jax.devices())
    meshes = [
        jax.sharding.Mesh(devices[:2], ("model",)),
        jax.sharding.Mesh(devices[::-1].reshape(4, 2), ("model", "data")),
        jax.make_mesh((2, 2), ("data", "model")),
    ]
    expected = tokens(kvjax.generate(uneven, prompts, **BITES))
    for mesh in meshes:
        assert tokens(kvjax.generate(uneven, prompts, mesh=mesh, **BITES)) == expected
    assert get_mesh(meshes[1]).shape == {"data": 2, "model": 4, "sequence": 1}
    assert get_mesh(meshes[1]).devices[1, 0, 0] == meshes[1].devices[0, 1]


def test_evaluation_of_a_model_on_a_mesh(uneven):
    """Texts are scored as on one device, whole or token by token, and result files know the model again."""
    many = place_all(get_shard("data=2,model=4", uneven.config), uneven)
    text = np.random.default_rng(4).integers(0, 61, 40).tolist()
    pairs, policy = [(text[:30], text[30:])] * 3, kvjax.get_policy("h2o:16")
    for params, score in (
        (many, lambda params: windowed(params, text, 20).logprobs),
        (many, lambda params: streaming(params, text, "snapkv:16,window=4").logprobs),
        (many, lambda params: [each.logprob for each in following(params, policy, pairs)]),
    ):
        np.testing.assert_allclose(score(params), score(uneven), atol=2e-5)
    assert model_fingerprint(many) == model_fingerprint(uneven)


@pytest.mark.parametrize("policy", ["shadowkv:16,chunk=4,outlier_chunks=1,local_chunks=1", "snapkv:16,window=4"])
def test_what_is_kept_is_looked_at(policy, uneven, prompts):
    """In the order of one device, also where slots are sharded."""
    many = place_all(get_shard("sequence=2", uneven.config), uneven)
    one, other = (
        retained_positions(params, prompts[0], kvjax.get_policy(policy), max_new_tokens=3) for params in (uneven, many)
    )
    np.testing.assert_array_equal(other, one)


@pytest.mark.parametrize("mesh", ["sequence=2", "data=2,model=2"])
def test_a_reading_that_was_stopped_on_a_mesh_goes_on_on_one_device(mesh, uneven, tmp_path, monkeypatch):
    """Caches are written as one device has them, though their bytes are as many."""
    monkeypatch.setattr("time.monotonic", iter(range(0, 10**6, 100)).__next__)
    many = place_all(get_shard(mesh, uneven.config), uneven)
    text, file = np.random.default_rng(5).integers(0, 61, 600).tolist(), tmp_path / "state.npz"

    def interrupt(done, total):
        raise KeyboardInterrupt

    whole = streaming(uneven, text, "full")
    with pytest.raises(KeyboardInterrupt):
        streaming(many, text, "full", checkpoint=file, progress=interrupt)
    for params in (uneven, many):
        (tmp_path / "copy.npz").write_bytes(file.read_bytes())
        seen: list[int] = []
        found = streaming(
            params,
            text,
            "full",
            checkpoint=tmp_path / "copy.npz",
            progress=lambda done, _, seen=seen: seen.append(done),
        )
        assert seen == [87]  # of 599 tokens, less one chunk of 512
        np.testing.assert_allclose(found.logprobs, whole.logprobs, atol=2e-5)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_step_has_as_many_sums_as_a_plan_counts(uneven, layers):
    config = uneven.config.with_depth(layers)
    engine = kvjax.Engine(config, prompt_len=16, max_new_tokens=8, mesh="model=2", dtype="float32")
    text = engine.executables()[1].as_text()
    assert len(re.findall(r" all-(?:reduce|gather)(?:-start)?\(", text)) == step_sums(config)
