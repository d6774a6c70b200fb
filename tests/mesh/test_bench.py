"""Benchmarks over a mesh: weights and full caches are made in their parts, and rows tell what each device reads."""

import dataclasses

import jax
import numpy as np
import pytest

from kvjax.bench import floor, measure, states
from kvjax.bench.case import Case, read_policy
from kvjax.config import presets
from kvjax.models import Params, init
from kvjax.models.sharding import bytes_per_device, init_on, mesh_of, place_all
from kvjax.runtime import decoding


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, uneven: Params) -> Case:
    """A case of the small model's shape, with no prompt read."""
    monkeypatch.setitem(presets.PRESETS, "small", uneven.config)
    return Case("full", {}, 300, 2, "small", new_tokens=70, prefill=False, dtype="float32", mesh="model=2")


def test_weights_are_made_in_their_parts_and_are_those_of_one_device(small: Case) -> None:
    config, key, shard = small.config, jax.random.key(0), small.shard
    made = init_on(shard, config, key, "float32", "int8")
    whole = place_all(shard, init(config, key, "float32", weights="int8"))
    assert mesh_of(made) is not None
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(whole), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=1e-6)


@pytest.mark.parametrize(
    ("mesh", "policy", "share"),
    [
        ("sequence=2", "full", 2),
        ("data=2,model=2", "streaming_llm:0.2", 4),
        ("model=2", "chunkkv:0.2,reuse=2", 2),
    ],
)
def test_a_row(mesh: str, policy: str, share: int, small: Case) -> None:
    """Of the caches each device reads its share, and nothing is compiled but the program that was asked for."""
    name, settings = read_policy(policy)
    alone = dataclasses.replace(small, policy=name, settings=settings, mesh="")
    case = dataclasses.replace(alone, mesh=mesh)
    one, several = (
        measure.measure(each, init_on(each.shard, each.config, jax.random.key(0), "float32"), 1e9, None)
        for each in (alone, case)
    )
    assert len(decoding.decode.executables) == 1
    assert several["cache_bytes_read"] == pytest.approx(one["cache_bytes_read"] / share, rel=0.06)
    assert several["cache_bytes"] == case.engine(case.shapes, 2).cache_bytes
    assert several["floor_ms"] < one["floor_ms"]
    assert several["peak_bytes"] < one["peak_bytes"]


def test_caches_are_filled_in_their_parts(small: Case) -> None:
    """As full as on one device, and of the shapes and places that programs are compiled for."""
    engine = dataclasses.replace(small, mesh="sequence=2").engine(small.shapes, 2)
    state = states.filled(engine.policy, engine.specs, 300)
    wanted = states.shapes(engine.policy, engine.specs)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), wanted)
    for cache, slots in zip(state.caches, engine.slots(state), strict=True):
        assert bytes_per_device(cache.k) == cache.k.nbytes // 2
        assert np.asarray(slots.count).tolist() == [[300, 300]] * 2
    assert floor.weight_bytes(engine.weights) < floor.weight_bytes(small.shapes)


def test_a_prompt_is_read_over_a_mesh_too(small: Case) -> None:
    case = dataclasses.replace(small, prefill=True, layers=1)
    row = measure.measure(case, init_on(case.shard, case.config, jax.random.key(0), "float32"), None, None)
    assert row["ttft_s"] > 0
    assert row["compression_s"] is None
    assert measure.compile_only(case)["compile_s"] > 0
