"""Offloaded policies give what they give otherwise, from stores in host memory; what is at hand is counted by sets."""

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from policies.driver import TINY, compiled, make_case, run

import kvjax
from kvjax.analysis import recall
from kvjax.cache import host_memory, layer_specs
from kvjax.policies import (
    KIVI,
    AdaKV,
    ByHead,
    ByLayer,
    CacheLayer,
    CaM,
    CateKV,
    Chelsea,
    ClusterKV,
    Full,
    Offloaded,
    Policy,
    PolicyError,
    PolicyInfo,
    StreamingLLM,
    TreeKV,
    by_head,
    by_layer,
    offloaded,
)
from kvjax.policies.transforms import offload
from kvjax.runtime import decoding
from kvjax.runtime.sampling import Greedy

CLUSTERS = ClusterKV(budget=24, sinks=4, dense_layers=0, n_clusters=5, iterations=2, window=8, new_clusters=3)
"""Clusters its tail three times in the 24 steps of `case`."""


@dataclasses.dataclass(frozen=True)
class Fading(Policy):
    """Halves the values of tokens with small keys at every step: a policy that reads keys and writes values."""

    about = PolicyInfo("fading")

    def layer(self, spec):
        return FadingLayer(self, spec)


@dataclasses.dataclass(frozen=True)
class FadingLayer(CacheLayer[Fading]):
    @property
    def compress_reads_kv(self) -> bool:
        return True

    def compress(self, state):
        small = jnp.linalg.norm(state.k, axis=-1, keepdims=True) < 3.0
        return state.replace(v=jnp.where(small, 0.5 * state.v, state.v))


STREAMED = [Full(), StreamingLLM(budget=16, sinks=2), Fading()]


def case(seed: int):
    """Prompts shorter than the sinks, as long as the budget, and longer; 8 rows of 4 query heads."""
    return make_case(seed, [50, 3, 24, 25, 1, 4, 33, 60], steps=24)


@pytest.mark.parametrize("policy", STREAMED, ids=lambda policy: policy.info.name)
def test_streamed_layers_attend_as_before(policy):
    inputs = make_case(5, [50, 3, 16], steps=12)
    state, outputs, _ = run(offloaded(policy), inputs)
    np.testing.assert_array_equal(outputs, run(policy, inputs)[1])
    assert host_memory.on_host(state.cache.k)
    assert host_memory.on_host(state.cache.v)
    leaves = jax.tree.leaves(state)
    assert sum(map(host_memory.on_host, leaves)) == 2


def found_by_hand(chosen: list[list[set[int]]], steps: int) -> np.ndarray:
    """Of each head, how many of its [step][head] chosen tokens one of its last `steps` queries chose too."""
    found = np.zeros(len(chosen[0]), int)
    for i in range(1, len(chosen)):
        for head, tokens in enumerate(chosen[i]):
            found[head] += len(tokens & set().union(*(c[head] for c in chosen[max(0, i - steps) : i])))
    return found


@pytest.fixture(scope="module", params=[(1, "selected"), (3, "layer")], ids=str)
def offloaded_runs(request):
    """An offloaded policy and what it did: 224 rows and query heads, in cases of the same shape."""
    steps, fetch = request.param
    policy = offloaded(CLUSTERS, steps, fetch)
    seeds = range(7) if policy.steps == 1 else range(1)
    return policy, [(case(seed), *run(policy, case(seed))[1:]) for seed in seeds]


def test_sparse_layers_attend_as_before(offloaded_runs):
    for inputs, outputs, states in offloaded_runs[1]:
        np.testing.assert_array_equal(outputs, run(CLUSTERS, inputs)[1])
        for state in (states[0], states[-1]):
            assert host_memory.on_host(state.inner.cache.k)
            assert sum(map(host_memory.on_host, jax.tree.leaves(state))) == 2


def test_hits_are_what_the_last_queries_chose(offloaded_runs):
    """By sets, and as `analysis.recall.hit_rate` counts the same selections."""
    policy, runs = offloaded_runs
    for inputs, _, states in runs:
        size = CLUSTERS.layer(inputs.spec).selection_shape[1]
        slots = [np.asarray(state.slot) for state in states]
        found, asked = np.asarray(states[-1].found), np.asarray(states[-1].chosen)
        rates = []
        for row, head in np.ndindex(8, 4):
            chosen = []
            for i, slot in enumerate(slots[1:]):
                selected = slot[row, head, :size]
                seen = inputs.lengths[row] + i + 1
                chosen.append({*selected[selected >= 0].tolist(), *range(min(CLUSTERS.sinks, seen))})
                assert len(chosen[-1]) <= 24
            assert found[row, head] == found_by_hand([[tokens] for tokens in chosen], policy.steps)[0]
            assert asked[row, head] == sum(map(len, chosen[1:]))
            rates.append(np.asarray([np.isin(np.arange(96), list(tokens)) for tokens in chosen]))
        assert offload.hit_rate(states[-1]) == recall.hit_rate(np.stack(rates, axis=1), policy.steps)
        assert offload.hit_rate(states[1]) is None  # after one query


def test_selections_are_those_of_the_policy(offloaded_runs):
    """What the counts are made from: the slots that the policy itself selects in the same state."""
    inputs, _, states = offloaded_runs[1][0]
    spec, rows = inputs.spec, np.arange(8)
    select = jax.jit(lambda state, q, pos: CLUSTERS.layer(spec).select(state, spec.rope.rotate(q, pos[:, None])))
    plain = run(CLUSTERS, inputs)[2]
    for i in (0, 7, 8, 23):
        pos = inputs.lengths + i
        index, live = jax.device_get(select(plain[i], inputs.q[rows, pos], pos))
        selected = np.asarray(states[i + 1].slot)[:, :, : index.shape[-1]]
        np.testing.assert_array_equal(selected, np.where(live, index, -1))


def test_only_what_is_missing_is_fetched():
    """NaN in the host's store where the device has the token, or no head asks for it, changes nothing."""
    policy, inputs = offloaded(CLUSTERS), case(0)
    _, step = compiled(policy, inputs.spec)
    states = run(policy, inputs)[2]
    rows, size = np.arange(8), CLUSTERS.layer(inputs.spec).selection_shape[1]
    for i in (3, 12):
        before, after = states[i], states[i + 1]
        needed = np.zeros(before.inner.cache.pos.shape, bool)
        slot = [np.asarray(state.slot) for state in (before, after)]
        for row, head in np.ndindex(8, 4):
            old, new = (set(x[row, head, :size].tolist()) for x in slot)
            needed[row, head // 2, sorted(new - old - {-1})] = True
        assert 0 < needed.sum() < 0.5 * np.prod(needed.shape)
        slots = before.inner.cache
        k, v = (
            jax.device_put(np.where(needed[..., None], np.asarray(x), np.float32(np.nan)), x.sharding)
            for x in (slots.k, slots.v)
        )
        poisoned = before.replace(inner=before.inner.replace(cache=slots.replace(k=k, v=v)))
        pos = inputs.lengths + i
        args = inputs.q[rows, pos], inputs.k[rows, pos], inputs.v[rows, pos], pos
        np.testing.assert_array_equal(step(before, *args)[0], step(poisoned, *args)[0])


def test_many_misses_come_in_blocks():
    """A selection of 300 slots, of which any number may be missing."""
    random = np.random.default_rng(1)
    store = tuple(to_jax(random.normal(size=(2, 2, 400, 4)), jnp.float32) for _ in range(2))
    index = to_jax([[random.permutation(400)[:300] for _ in range(4)] for _ in range(2)], jnp.int32)
    fill = jax.jit(host_memory.read_missing)
    for missing in (0, 1, 127, 128, 129, 300):
        lack = np.arange(300) < random.integers(0, missing + 1, size=(2, 4, 1))
        lack[1, 2] = np.arange(300) >= 300 - missing
        got = tuple(np.full((2, 4, 300, 4), 7.0, np.float32) for _ in range(2))
        for x, found in zip(store, fill(host_memory.to_host(store), index, lack, got), strict=True):
            want = np.take_along_axis(np.repeat(np.asarray(x), 2, axis=1), np.asarray(index)[..., None], axis=2)
            np.testing.assert_array_equal(found, np.where(lack[..., None], want, 7.0))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_where_slots_are(platform, monkeypatch):
    """Both ways to look for them, with slots that are free and such as are there twice."""
    monkeypatch.setattr(host_memory, "target", lambda: SimpleNamespace(platform=platform))
    random = np.random.default_rng(2)
    slot = random.integers(-1, 40, (2, 3, 30)).astype(np.int32)
    index = random.integers(0, 40, (2, 3, 25)).astype(np.int32)
    place, there = jax.device_get(jax.jit(lambda *args: host_memory.find(*args))(slot, index))
    np.testing.assert_array_equal(there, (slot[:, :, None] == index[..., None]).any(axis=-1))
    assert 0 < np.sum(there) < there.size
    found = np.take_along_axis(slot, np.asarray(place), axis=-1)
    np.testing.assert_array_equal(found[there], index[there])


def test_no_copy_of_the_store_on_the_device(tiny):
    """A store of 4096 slots, and a program whose temporaries are a fraction of it."""
    policy = offloaded(ClusterKV(budget=64, sinks=4, dense_layers=0, n_clusters=10, iterations=1, cluster_decode=False))
    policy = by_layer([policy, StreamingLLM(budget=64)])
    specs = layer_specs(tiny.config, 1, 3980, 16, jnp.float32)
    caches = tuple(jax.jit(policy.layer(spec).init)() for spec in specs)
    store = caches[0].inner.cache.k
    state = decoding.Decoding(
        caches, *(jnp.zeros(1, jnp.int32),) * 2, jnp.int32(0), jnp.zeros(1, bool), jnp.zeros(1, jnp.uint32)
    )
    program = decoding.decode.compiled(policy, specs, tiny, state, jnp.int32(0), Greedy(), jnp.zeros(0, jnp.int32))
    shape = ",".join(map(str, store.shape))
    assert f"f32[{shape}]" in program.as_text()
    assert not re.search(rf"= f32\[{shape}\]\S* copy\(", program.as_text())
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < store.nbytes / 2
    assert memory.alias_size_in_bytes >= 2 * store.nbytes
    held = (
        policy.nbytes(tiny.config, 1, 3980, 16, jnp.float32),
        policy.host_nbytes(tiny.config, 1, 3980, 16, jnp.float32),
    )
    assert held[1] == 2 * store.nbytes
    assert held[0] < held[1] / 4


def test_generation_tells_what_it_held_and_hit(tiny):
    prompts, options = [[5, 9, 2, 7, 7, 1] * 20, [3, 1, 4]], {"max_new_tokens": 12, "ignore_eos": True}
    inner = by_layer(
        [Full(), ClusterKV(budget=24, sinks=4, dense_layers=0, n_clusters=5, iterations=1, cluster_decode=False)]
    )
    plain, got = (kvjax.generate(tiny, prompts, policy=policy, **options) for policy in (inner, offloaded(inner)))
    for a, b in zip(plain, got, strict=True):
        assert (a.tokens, a.logprobs) == (b.tokens, b.logprobs)
    stats, shapes = got[0].stats, (tiny.config, 2, 120, 12, jnp.float32)
    assert stats.cache_bytes == offloaded(inner).nbytes(*shapes) < plain[0].stats.cache_bytes
    assert stats.host_cache_bytes == offloaded(inner).host_nbytes(*shapes) > 0
    assert stats.step_bytes_read == plain[0].stats.step_bytes_read == inner.bytes_read(*shapes)
    assert stats.hit_rate is not None
    assert 0 < stats.hit_rate < 1
    # Of the layers, the first is read whole in each of 11 steps; of the others missed tokens come, pairs of 2 * 16 floats.
    assert stats.fetched_bytes > 11 * stats.host_cache_bytes / tiny.config.num_layers
    assert (stats.fetched_bytes - 11 * stats.host_cache_bytes // tiny.config.num_layers) % (
        2 * tiny.config.head_dim * 4
    ) == 0
    assert plain[0].stats.fetched_bytes == 0
    assert (plain[0].stats.host_cache_bytes, plain[0].stats.hit_rate) == (0, None)


@pytest.mark.parametrize("name", ["chosen", "found"])
def test_only_offloaded_states_count_hits(name):
    """A policy's own state may have a field of one of these names."""
    state = flax.struct.dataclass(type("Own", (), {"__annotations__": {name: Any}}))(jnp.ones(3, jnp.int32))
    assert offload.hits((state,)) == (0, 0)
    assert offload.fetched_bytes((state,), 2) == 0


def test_compositions_are_offloaded_part_by_part(tiny):
    tree, clusters = TreeKV(budget=16, sinks=2), ClusterKV(budget=24)
    heads = by_head({"a": tree, "b": clusters}, [["a", "b"], ["b", "a"]])
    bound = offloaded(by_layer([heads, offloaded(tree, steps=2)]), steps=3).bind(TINY)
    assert isinstance(bound, ByLayer)
    assert isinstance(bound.layers[0], ByHead)
    assert bound.layers[0].groups == (offloaded(tree, 3), offloaded(clusters, 3))
    assert bound.layers[1] == offloaded(tree, steps=2)
    assert bound.bind(TINY) == bound
    assert offloaded(offloaded(clusters)).bind(TINY) == offloaded(clusters)
    labels = (("consistent", "adaptive"),) * 2
    cate = offloaded(CateKV(budget=64, profile=labels)).bind(TINY)
    assert isinstance(cate, ByHead)
    assert all(isinstance(group, Offloaded) for group in cate.groups)


@pytest.mark.parametrize("policy", [CaM(), Chelsea(), ClusterKV(), StreamingLLM()], ids=lambda policy: policy.info.name)
def test_what_is_said_of_a_policy_is_said_of_it_offloaded(policy):
    far, spec = offloaded(policy), layer_specs(TINY, 1, 6000, 16, jnp.float32)[1]
    name = f"offloaded({policy.info.name})"
    assert far.info == dataclasses.replace(policy.info, name=name, transform="offloaded")
    layer, inner = far.layer(spec), policy.layer(spec)
    assert isinstance(layer, offload.OffloadedSparseLayer) == (inner.attention == "sparse")
    assert layer.capacity == inner.capacity


def test_nothing_selected_stays_where_no_steps_are_asked_for():
    inputs = case(0)
    _, outputs, states = run(offloaded(CLUSTERS, steps=0), inputs)
    np.testing.assert_array_equal(outputs, run(CLUSTERS, inputs)[1])
    assert states[-1].slot.size == 0
    first = [sum(min(CLUSTERS.sinks, length + i) for i in range(1, 24)) for length in inputs.lengths]
    np.testing.assert_array_equal(states[-1].found, np.repeat(first, 4).reshape(8, 4))
    missed = int(np.sum(np.asarray(states[-1].chosen) - np.asarray(states[-1].found)))
    assert offload.fetched_bytes(states[-1], 24) == missed * 2 * inputs.spec.head_dim * 4


def test_device_bytes_fall(tiny):
    for policy in (Full(), ClusterKV(budget=128, dense_layers=0), TreeKV(budget=512), Chelsea()):
        whole = policy.nbytes(tiny.config, 1, 8000, 100)
        far = offloaded(policy)
        kept = far.nbytes(tiny.config, 1, 8000, 100)
        assert kept < 0.4 * whole
        assert far.host_nbytes(tiny.config, 1, 8000, 100) >= 0.5 * whole
        assert policy.host_nbytes(tiny.config, 1, 8000, 100) == 0


@pytest.mark.parametrize("policy", [AdaKV(budget=64), KIVI()], ids=lambda policy: policy.info.name)
def test_stores_of_another_kind_are_refused(policy):
    with pytest.raises(PolicyError, match="has its keys and values in a store of its own"):
        offloaded(policy).nbytes(TINY, 1, 100, 10)


def test_only_pinned_memory_counts(monkeypatch):
    def has(*kinds: str) -> bool:
        memories = [SimpleNamespace(kind=kind) for kind in kinds]
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(addressable_memories=lambda: memories)])
        return host_memory.available()

    assert has("device", "pinned_host")
    assert not has("device", "unpinned_host")


def test_what_cannot_be_done(monkeypatch):
    with pytest.raises(PolicyError, match=r"offloaded\(full\): steps=-1"):
        offloaded(Full(), steps=-1)
    with pytest.raises(PolicyError, match="'selected', 'layer'"):
        Offloaded(Full(), fetch="all")
    monkeypatch.setattr(host_memory, "available", lambda: False)
    with pytest.raises(PolicyError, match="no memory of kind pinned_host"):
        offloaded(Full()).bind(TINY)
