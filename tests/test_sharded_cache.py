"""A cache whose slots are sharded among devices is the cache of one device. A mapped axis of JAX stands for the devices."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from jax.sharding import AbstractMesh
from policies.oracle_arrays import rotate

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Token, TokenBlock, attention, sharded
from kvjax.cache.shard import COPIES, DATA, HEADS, SLOTS, Shard
from kvjax.config import RopeConfig
from kvjax.pallas_kernels import partial_block_attention
from kvjax.policies import KIVI, AdaKV, Policy, ShadowKV, TurboQuant
from kvjax.policies.families.ragged import Ragged
from kvjax.policies.sharded import ShardedStoreLayer
from kvjax.policies.sharded import sharded as sharded_layer

SPEC = LayerSpec(
    layer=0,
    num_layers=1,
    batch=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    prompt_len=64,
    new_tokens=64,
    dtype=jnp.dtype("float32"),
    rope=RopeConfig(theta=10000.0, dim=8).resolve(128),
    scale=8**-0.5,
)


def held(counts: list[int], size: int = 96, seed: int = 0) -> LayerCache:
    """A cache of as many random tokens in each row as are given, what is free being NaN."""
    random = np.random.default_rng(seed)
    live = np.broadcast_to((np.arange(size) < np.asarray(counts)[:, None])[:, None], (2, 2, size))
    k, v = (np.where(live[..., None], random.normal(size=(*live.shape, 8)), np.nan) for _ in range(2))
    return LayerCache(
        k=to_jax(k, jnp.float32),
        v=to_jax(v, jnp.float32),
        pos=to_jax(np.where(live, np.arange(size), -1), jnp.int32),
        weight=to_jax(live * random.integers(1, 4, live.shape), jnp.float32),
        next=to_jax(np.broadcast_to(np.asarray(counts)[:, None], (2, 2)), jnp.int32),
        seen=to_jax(counts, jnp.int32),
    )


def on(devices: int, function: Any, *args: Any) -> Any:
    """What every one of the devices computes."""
    return jax.jit(
        lambda *args: jax.vmap(lambda _: function(*args), axis_name=SLOTS)(jnp.arange(devices, dtype=jnp.int32))
    )(*args)


def same(parts: Any, whole: Any, **tolerance: Any) -> None:
    """All devices have the same bits, and they are near to those of one."""
    parts = np.asarray(parts)
    np.testing.assert_array_equal(parts, np.broadcast_to(parts[:1], parts.shape))
    np.testing.assert_allclose(parts[0], np.asarray(whole), **tolerance)


def token(position: Any, seed: int = 5) -> Token:
    random = np.random.default_rng(seed)
    q, k, v = (to_jax(random.normal(size=(2, n, 8)), jnp.float32) for n in (4, 2, 2))
    return Token(q, k, v, position if isinstance(position, jax.Array) else to_jax(position, jnp.int32), SPEC.rope)


def turned(new: Token) -> np.ndarray:
    """The token's queries, rotated."""
    return rotate(SPEC.rope, np.asarray(new.q), np.asarray(new.position)[:, None])


attend = jax.jit(lambda spec, kept, new: cache.attend(spec, kept, new)[0], static_argnums=0)


def softmax_over_slots(kept: LayerCache, query: Any, *, seen: Any) -> np.ndarray:
    """Attention of queries [B, N, H] in float64, over slots [B, N, C] that they see."""
    out = np.zeros(query.shape)
    k, v, weight = (np.asarray(x, np.float64) for x in (kept.k, kept.v, kept.weight))
    for b, n in np.ndindex(query.shape[:2]):
        slots = np.flatnonzero(seen[b, n] & (weight[b, n // 2] > 0))
        if len(slots):
            share = weight[b, n // 2, slots] * np.exp(k[b, n // 2, slots] @ query[b, n] * SPEC.scale)
            out[b, n] = share @ v[b, n // 2, slots] / share.sum()
    return out


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_slots_come_back_in_order(devices: int) -> None:
    kept = held([50, 7])
    ordered = sharded.global_order(sharded.shard_order(np.asarray(kept.k), devices), devices, 96)
    np.testing.assert_array_equal(ordered, kept.k)
    back = on(devices, lambda x: cache.gathered(cache.shard_slots(x, devices)), kept)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(kept), strict=True):
        same(got, want)
    parts = on(devices, lambda x: cache.shard_slots(x, devices).k, kept)
    one = sharded.shard_order(np.asarray(kept.k), devices).reshape(2, 2, devices, -1, 8)
    np.testing.assert_array_equal(np.asarray(parts), np.moveaxis(one, 2, 0))
    # Of 50 tokens no device has more than a run more than another.
    tokens = np.isfinite(np.asarray(parts)[:, 0, 0, :, 0]) & (np.asarray(parts)[:, 0, 0, :, 0] != 0)
    assert np.ptp(tokens.sum(axis=-1)) <= sharded.RUN


@pytest.mark.parametrize("devices", [2, 4])
def test_new_tokens(devices: int) -> None:
    """Each goes into the device whose slot it is, past runs' ends, into a cache that was empty or not, and into none when there is no slot.

    What else is known of slots is whole on every device.
    """
    whole, parts = held([14, 95]), on(devices, lambda x: cache.shard_slots(x, devices), held([14, 95]))
    known, knowns = whole.pos, jnp.broadcast_to(whole.pos, (devices, *whole.pos.shape))

    def insert(kept: LayerCache, known: Any, new: Token) -> Any:
        kept, (known,) = cache.insert(kept, new, [(known, 2 * new.position[:, None])])
        return kept, known

    step, steps = jax.jit(insert), jax.jit(jax.vmap(insert, (0, 0, None), axis_name=SLOTS))
    for i in range(20):
        new = token([14 + i, 95 + i], seed=i)
        (whole, known), (parts, knowns) = step(whole, known, new), steps(parts, knowns, new)
    same(knowns, known)
    assert np.asarray(known)[0, :, 14:34].tolist() == [list(range(28, 68, 2))] * 2
    back = jax.jit(jax.vmap(cache.gathered, axis_name=SLOTS))(parts)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(whole), strict=True):
        same(got, want)


@functools.cache
def attend_among(devices: int, spec: LayerSpec, small: bool) -> Any:
    """Attention by devices, compiled while `small` says how they put together what they have found."""

    def work(kept: LayerCache, new: Token) -> Any:
        return cache.attend(spec, cache.shard_slots(kept, devices), new)[0]

    return jax.jit(jax.vmap(work, (None, None), axis_name=SLOTS, axis_size=devices))


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("counts", [[50, 7], [0, 1], [96, 33]])
@pytest.mark.parametrize("window", [None, 20])
def test_attention(counts: list[int], window: int | None, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a new token, whichever way devices put together what they have found; some have no live slot, and of one row none has."""
    monkeypatch.setattr(sharded, "SMALL_GATHER", 1 << 18 if small else 0)
    spec, kept, new = dataclasses.replace(SPEC, window=window), held(counts), token([c - 1 for c in counts])
    out = attend_among(4, spec, small)(kept, new)
    pos, last = np.repeat(np.asarray(kept.pos), 2, axis=1), np.asarray(new.position)[:, None, None]
    seen = pos > (-1 if window is None else last - window)
    same(out, softmax_over_slots(kept, turned(new), seen=seen), atol=1e-5)
    same(out, attend(spec, kept, new), atol=1e-5)


def by_slots(
    q: Any, k: Any, v: Any, q_pos: Any, pos: Any, weight: Any, *, run: Any, stripes: Any, **options: Any
) -> Any:
    """Attention of parts, where slots stand for positions."""
    slot = stripes.among_all(jnp.arange(pos.shape[-1], dtype=jnp.int32))
    places = jnp.where((pos >= 0) & (slot >= run.first[..., None]), slot, -1)
    queries = run.own[:, :1] + jnp.arange(q.shape[1], dtype=jnp.int32)
    return partial_block_attention(q, k, v, jnp.where(q_pos >= 0, queries, -1), places, weight, **options)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(("window", "by_slot"), [(None, False), (None, True), (20, False)])
def test_blocks(devices: int, window: int | None, by_slot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is written across runs, and each of its tokens sees what comes before it, by positions or, as kernels for GPUs do, by slots."""
    if by_slot:
        monkeypatch.setattr(attention, "partial_block_attention", by_slots)
    spec, kept = dataclasses.replace(SPEC, window=window), held([29, 0])
    kept = dataclasses.replace(kept, weight=to_jax(np.asarray(kept.weight) > 0, jnp.float32))
    random = np.random.default_rng(2)
    q, k, v = (to_jax(random.normal(size=(2, 24, n, 8)), jnp.float32) for n in (4, 2, 2))
    position, count, total = (to_jax(x, jnp.int32) for x in ([29, 0], [24, 9], [96, 96]))
    block = TokenBlock(q, k, v, position, count, total, SPEC.rope)

    def read(kept: LayerCache) -> Any:
        after = cache.insert_block(kept, block)
        return cache.attend_block(spec, after, block), after

    want, after = jax.jit(read)(kept)
    out, back = on(
        devices,
        lambda x: jax.tree.map(
            lambda y: y, (lambda o, c: (o, cache.gathered(c)))(*read(cache.shard_slots(x, devices)))
        ),
        kept,
    )
    for got, expected in zip(jax.tree.leaves(back), jax.tree.leaves(after), strict=True):
        same(got, expected)
    inside = np.arange(24) < np.asarray([24, 9])[:, None]
    same(np.asarray(out)[:, inside], np.asarray(want)[inside], atol=1e-5)
    positions = np.asarray([29, 0])[:, None] + np.arange(24)
    query = rotate(SPEC.rope, np.asarray(q), positions[..., None])
    pos = np.repeat(np.asarray(after.pos), 2, axis=1)
    for i in (0, 8):
        at = positions[:, i, None, None]
        seen = (pos <= at) & (pos > (-1 if window is None else at - window)) & (pos >= 0)
        np.testing.assert_allclose(
            np.asarray(out)[0][:, i], softmax_over_slots(after, query[:, i], seen=seen), atol=1e-5
        )


@pytest.mark.parametrize(("devices", "window"), [(2, None), (3, 20)])
def test_segments_of_one_store(devices: int, window: int | None) -> None:
    """Heads of unequal sizes, an empty one among them, whose segments begin and end in any device's runs, and grow past a run's end."""
    layer = AdaKV(budget=8, window=4).layer(dataclasses.replace(SPEC, window=window))
    random, size = np.random.default_rng(3), layer.capacity
    start, following = (np.asarray(x, np.int32) for x in ([[0, 61], [3, 90]], [[61, 78], [3, 139]]))
    slot = np.arange(size)
    inside = (slot >= start[..., None]) & (slot < following[..., None])
    pos = np.where(inside, slot - start[..., None], -1).max(axis=1)[:, None]
    k, v = (np.where(pos[..., None] >= 0, random.normal(size=(2, 1, size, 8)), np.nan) for _ in range(2))
    store = Ragged(
        *(to_jax(x, jnp.float32) for x in (k, v)),
        *(to_jax(x, jnp.int32) for x in (pos, start, following, [61, 49])),
    )

    def steps(state: Any) -> Any:
        found = []
        for place in range(3):
            new = token([61 + place, 49 + place], seed=place)
            state = layer.append(state, new)
            found.append(layer.attend(state, new, {})[0])
        return jnp.stack(found), state

    want, after = jax.jit(steps)(store)
    assert np.isfinite(np.asarray(want)).all()

    def parts(state: Any) -> Any:
        out, end = steps(cache.shard_slots(state, devices))
        return out, cache.gathered(end)

    got, back = on(devices, parts, store)
    same(got, want, atol=1e-6)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(after), strict=True):
        same(a, b, atol=1e-6)


@pytest.mark.parametrize(
    "policy",
    [
        KIVI(bits=2, group=16, residual=16),
        pytest.param(KIVI(bits=4, group=32, residual=32), marks=pytest.mark.slow),
        pytest.param(TurboQuant(bits=4, exact_layers=0, group=4), marks=pytest.mark.slow),
        TurboQuant(bits=2, exact_layers=0, values="rotated"),
    ],
    ids=str,
)
def test_few_bits(policy: Policy) -> None:
    """Packed where the slots are, groups of keys when they have come together, past runs' ends; one row begins with nothing."""
    layer, window = policy.layer(SPEC), policy.layer(dataclasses.replace(SPEC, window=40))
    assert layer.shards_own_store
    random = np.random.default_rng(4)
    q, k, v = (random.normal(size=(2, 40, n, 8)).astype(np.float32) for n in (4, 2, 2))

    @jax.jit
    def begin(q: Any, k: Any, v: Any) -> Any:
        places = jnp.broadcast_to(jnp.arange(40, dtype=jnp.int32)[:, None], (2, 40, 1))
        lengths, total = (jnp.asarray(x, jnp.int32) for x in ([40, 1], [128, 128]))
        both = [SPEC.rope.rotate_by_table(x, jnp.broadcast_to(places, x.shape[:3]), 128) for x in (q, k)]
        return layer.prefill(PromptKV(q, k, v, *both, None, lengths, lengths, total), {})[0]

    def steps(state: Any) -> Any:
        def step(state: Any, place: Any) -> Any:
            new = token(jnp.stack([40 + place, 1 + place]))
            new = dataclasses.replace(new, k=new.k + jnp.sin(place.astype(jnp.float32)))
            state = layer.append(state, new)
            return state, jnp.stack([each.attend(state, new, {})[0] for each in (layer, window)])

        state, found = jax.lax.scan(step, state, jnp.arange(40, dtype=jnp.int32))
        return found, state

    begun = begin(q, k, v)
    want, after = jax.jit(steps)(begun)

    def parts(state: Any) -> Any:
        out, end = steps(cache.shard_slots(state, 3))
        return out, cache.gathered(end)

    got, back = on(3, parts, begun)
    same(got, want, atol=1e-5)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(after), strict=True):
        same(a, b, atol=1e-6)


def test_a_store_of_its_own() -> None:
    """ShadowKV's values: each device holds some, and all are sent what a query selects."""
    policy = ShadowKV(budget=12, rank=10, chunk=4, outlier_chunks=2, local_chunks=1)
    shard = Shard(AbstractMesh((1, 1, 1, 2), (DATA, HEADS, COPIES, SLOTS)))
    layer = sharded_layer(policy.layer(dataclasses.replace(SPEC, shard=shard)))
    whole = policy.layer(SPEC)
    random, new = np.random.default_rng(4), token([64, 64])
    state = jax.tree.map(
        lambda x: to_jax(random.normal(size=x.shape).astype(x.dtype)),
        jax.eval_shape(whole.init),
    )
    state = dataclasses.replace(
        state,
        cache=held([9, 14], size=whole.capacity),
        selectable=to_jax(np.ones((2, 2, 16), bool)),
        budget=to_jax([3, 1], jnp.int32),
    )

    def attended(state: Any) -> Any:
        parts = dataclasses.replace(state, v=cache.local_part(state.v, 2))
        return layer.attend(parts, new, {})[0]

    assert isinstance(layer, ShardedStoreLayer)
    same(on(2, attended, state), jax.jit(lambda state: whole.attend(state, new, {})[0])(state), atol=1e-5)


def test_groups_that_would_straddle_devices_are_not_sharded() -> None:
    assert not KIVI(group=64, residual=64).layer(SPEC).shards_own_store
    assert not KIVI(group=24, residual=24).layer(SPEC).shards_own_store


@pytest.mark.parametrize(("page", "by_slot"), [*((page, False) for page in (1, 4, 24, 32, 48)), (1, True), (24, True)])
def test_selected_pages(page: int, by_slot: bool) -> None:
    """Pages that devices divide, and such as they do not; of which some are not meant, and the last has free slots."""
    kept, new, random = held([50, 31]), token([49, 30]), np.random.default_rng(1)
    kept = dataclasses.replace(kept, weight=to_jax(np.asarray(kept.weight) > 0, jnp.float32))
    index = np.stack([random.permutation(96 // page)[:3] for _ in range(8)]).reshape(2, 4, -1)
    live = random.random((2, 4, index.shape[-1] * (page if by_slot else 1))) < 0.7
    args = to_jax(index, jnp.int32), to_jax(live), page
    out = on(4, lambda x: cache.attend_selected(SPEC, cache.shard_slots(x, 4), new, *args), kept)
    slots = (index[..., None] * page + np.arange(page)).reshape(2, 4, -1)
    meant = live if by_slot else np.repeat(live, page, axis=-1)
    seen = np.zeros((2, 4, 96), bool)
    for b, n in np.ndindex(2, 4):
        seen[b, n, slots[b, n][meant[b, n]]] = True
    same(out, softmax_over_slots(kept, turned(new), seen=seen), atol=1e-5)
    alone = jax.jit(lambda kept, new: cache.attend_selected(SPEC, kept, new, *args))
    same(out, alone(kept, new), atol=1e-5)


def test_keys_in_slots() -> None:
    kept, pos = held([96, 96]), to_jax([[0, 17, 95], [15, 16, 64]], jnp.int32)
    same(on(4, lambda x: cache.keys_at(cache.shard_slots(x, 4), pos), kept), jax.jit(cache.keys_at)(kept, pos))


def test_an_empty_cache_is_sharded_without_devices() -> None:
    """So its bytes are known where there are none."""
    parts = jax.jit(lambda: cache.sharded_empty(cache.empty(SPEC, 96), 4))()
    assert parts.k.shape == (2, 2, 32, 8)
    assert (parts.pos.shape, parts.slot_shards) == ((2, 2, 96), 4)
    same(on(4, lambda: cache.shard_slots(cache.empty(SPEC, 96), 4).v), parts.v)
    assert cache.local_slots(1 << 20, 8) == 1 << 17
