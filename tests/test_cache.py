"""The verbs of the cache pytree."""

import dataclasses
import functools
import inspect
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from hypothesis import given
from hypothesis import strategies as st
from policies.driver import make_case

from kvjax import cache
from kvjax.cache import state
from kvjax.config import RopeConfig
from kvjax.models import ModelConfig


def token(case, at, position):
    """Every row's inputs of one place, as a token at a position."""
    q, k, v = (to_jax(x[:, at]) for x in (case.q, case.k, case.v))
    return cache.Token(q, k, v, to_jax(position, jnp.int32), case.spec.rope)


@functools.partial(jax.jit, static_argnames="rotated")
def inserted(slots, token, rotated=True):
    return cache.insert(slots, token, rotated=rotated)[0]


def test_buckets_are_few_and_not_wasteful():
    sizes = [cache.bucket(n) for n in range(1, 100_000)]
    assert all(size >= n for n, size in enumerate(sizes, 1))
    assert all(size <= max(64, 1.5 * n) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) == 23
    assert cache.bucket(0) == 0


def test_capacities_are_even():
    assert [cache.round_slots(n) for n in (1, 32, 33, 1025, 2048, 2049, 13107)] == [32, 32, 64, 1056, 2048, 2176, 13184]


def test_what_layers_are_told():
    """Of a model whose second layer alone has a sliding window."""
    config = ModelConfig.uniform(
        "qwen2", 64, 64, 96, 2, 8, 2, 16, 256, RopeConfig(theta=1e4, dim=16), windows=(None, 20)
    )
    first, second = cache.layer_specs(config, 3, 65, 7, jnp.bfloat16)
    assert (first.layer, first.num_layers, first.batch, first.num_heads, first.num_kv_heads) == (0, 2, 3, 8, 2)
    assert (first.head_dim, first.prompt_len, first.new_tokens, first.dtype) == (16, 96, 8, jnp.bfloat16)
    assert (first.scale, first.window) == (1 / 4, None)
    assert first.rope == config.rope.resolve(65 + 7)
    assert second == dataclasses.replace(first, layer=1, window=20)
    assert first.totals(None).tolist() == [104] * 3
    assert first.totals(to_jax([0, 1, 2])).tolist() == [0, 1, 2]


def test_specs_of_equal_sizes_are_the_same():
    """Programs are found by them. Hashes differ between processes, so a copy from a file has none."""
    config = ModelConfig.uniform("qwen2", 64, 64, 96, 2, 8, 2, 16, 256, RopeConfig(theta=1e4, dim=16))
    one, other = (cache.layer_specs(config, 1, length, 8, "float32") for length in (70, 90))
    assert one is other
    spec = one[0]
    assert hash(spec) == hash(dataclasses.replace(spec)) != hash(dataclasses.replace(spec, batch=2))
    read = pickle.loads(pickle.dumps(spec))
    assert read == spec
    assert "_hash" in vars(spec)
    assert "_hash" not in vars(read)


def test_few_sizes_serve_all_lengths():
    assert [cache.bucket(n) for n in (0, 1, 64, 65, 96, 97, 1000)] == [0, 64, 64, 96, 96, 128, 1024]
    assert [cache.bucket(n, 8) for n in (0, 1, 8, 9, 12, 13, 100)] == [0, 8, 8, 12, 12, 16, 128]
    config = ModelConfig.uniform("qwen2", 64, 64, 96, 1, 8, 2, 16, 256, RopeConfig(theta=1e4, dim=16))
    sizes = {cache.layer_specs(config, 1, 700, new, jnp.float32)[0].new_tokens for new in range(1, 4097)}
    assert len(sizes) == 19


compact_indices = jax.jit(cache.compact_indices, static_argnums=1)


@given(
    st.lists(st.integers(0, 2**40 - 1), min_size=4, max_size=4),
    st.sampled_from([1, 2, 7, 24, 40]),
    st.sampled_from([1, 3, 24, 40, 48]),
)
def test_compact_is_nonzero(numbers, size, capacity):
    """Rows of bits, in a few shapes of all kinds, each of which is a program."""
    rows = np.asarray([[bool(number >> i & 1) for i in range(size)] for number in numbers])
    for keep, index, live in zip(rows, *jax.device_get(compact_indices(rows, capacity)), strict=True):
        expected = np.flatnonzero(keep)[:capacity]
        assert index[: len(expected)].tolist() == expected.tolist()
        assert live.tolist() == [i < len(expected) for i in range(capacity)]


def test_select_insert_evict():
    """Keep three of a prompt, evict the second, and see the next token take its place."""
    case = make_case(0, [6, 2], steps=2, heads=2, kv_heads=1)
    spec = case.spec
    k, v = (np.zeros((2, spec.prompt_len, 1, 8), np.float32) for _ in range(2))
    k[:, :8], v[:, :8] = case.k, case.v
    keep = np.zeros((2, 1, spec.prompt_len), bool)
    keep[:, :, [0, 3, 5]] = True
    q = np.zeros((2, spec.prompt_len, 2, 8), np.float32)

    @jax.jit
    def gathered(q, k, v, lengths, keep):
        prompt = cache.PromptKV.of(spec.rope, q, k, v, lengths, lengths)
        slots, index = cache.keep(spec, 8, prompt, keep, rotated=False)
        return slots, index, slots.count

    slots, index, count = gathered(q, k, v, case.lengths, keep)
    assert np.asarray(index)[0, 0, :3].tolist() == [0, 3, 5]
    assert np.asarray(slots.pos)[:, 0].tolist() == [
        [0, 3, 5] + [-1] * 5,
        [0] + [-1] * 7,
    ]  # the second row has two tokens
    assert np.asarray(count).tolist() == [[3], [1]]
    assert np.asarray(slots.next).tolist() == [[3], [1]]

    slots = jax.jit(cache.evict)(slots, np.asarray([[1], [0]], np.int32), np.asarray([[True], [False]]))
    assert (np.asarray(slots.weight)[0, 0, :4] > 0).tolist() == [True, False, True, False]
    slots = inserted(slots, token(case, 6, [6, 2]), rotated=False)
    assert np.asarray(slots.pos)[:, 0, :3].tolist() == [[0, 6, 5], [0, 2, -1]]
    np.testing.assert_array_equal(np.asarray(slots.k)[0, 0, 1], case.k[0, 6, 0])
    assert np.asarray(slots.seen).tolist() == [7, 3]


@pytest.mark.parametrize("window", [1, 3, 100])
def test_sliding_window_counts_original_positions(window):
    case = make_case(1, [6], steps=1, heads=1, kv_heads=1)
    spec = dataclasses.replace(case.spec, window=window)
    slots = jax.jit(lambda: cache.empty(spec, 8))()
    for pos in range(6):
        slots = inserted(slots, token(case, pos, [pos]))
    attend = jax.jit(functools.partial(cache.attend, spec, probs=True))
    _, probs = attend(slots, token(case, 5, [5]))
    assert (np.asarray(probs)[0, 0] > 0).tolist() == [5 - window < pos <= 5 for pos in range(8)]


@pytest.mark.parametrize(("numbers", "parts"), [(state.MOVED, 2), (0, 8)], ids=["two parts", "eight parts"])
def test_places_that_are_kept_move_to_the_front_in_order(numbers, parts, monkeypatch):
    """Within the cache, whatever the size of the parts; rows and heads have as many tokens as they have, up against the end."""
    monkeypatch.setattr(state, "MOVED", numbers)
    random, slots, capacity = np.random.default_rng(0), 320, 256
    count = np.asarray([[320, 200], [5, 256]])
    k, v = (random.normal(size=(2, 2, slots, 4)).astype(np.float32) for _ in range(2))
    there = np.arange(slots) < count[..., None]
    pos = np.where(there, 3 * np.arange(slots), -1).astype(np.int32)
    arrays = k, v, pos, there.astype(np.float32), count.astype(np.int32) % slots, np.asarray([960, 960], np.int32)
    kept = cache.LayerCache(*map(to_jax, arrays))
    keep = random.random((2, 2, slots)) < 0.6
    q, total = (to_jax(x) for x in (np.zeros((2, 1, 2, 4), np.float32), np.asarray([960, 960], np.int32)))

    def keep_places(kept, keep):
        return cache.keep_places(kept, capacity, keep)

    got, prompt = jax.device_get(
        jax.jit(lambda kept, keep: (keep_places(kept, keep), cache.kept_as_prompt(kept, q, total)))(kept, keep)
    )
    moved = re.findall(r"f32\[2,2,(\d+),4\] = gather", str(jax.make_jaxpr(keep_places)(kept, keep)))
    assert set(moved) == {str(capacity // parts)}
    for row, head in np.ndindex(2, 2):
        chosen = np.flatnonzero(keep[row, head, slots - count[row, head] :])[:capacity]
        for x, old in ((prompt.k, k), (prompt.v, v)):
            free = slots - count[row, head]
            assert not x[row, :free, head].any(), "whatever is in free slots"
            np.testing.assert_array_equal(x[row, free:, head], old[row, head, : slots - free])
        for x, old in ((got.k, k), (got.v, v), (got.pos, pos)):
            np.testing.assert_array_equal(x[row, head, : len(chosen)], old[row, head, chosen])
        assert (got.pos[row, head, len(chosen) :] == -1).all()
        assert int(got.next[row, head]) == len(chosen) == int(got.weight[row, head].sum())


@pytest.mark.parametrize("slots", [4, 8, 33, 48])
def test_any_number_of_slots_can_be_compacted(slots):
    random = np.random.default_rng(slots)
    k, v = (random.normal(size=(2, 2, slots, 4)).astype(np.float32) for _ in range(2))
    pos = np.broadcast_to(np.arange(slots, dtype=np.int32), (2, 2, slots))
    whole = np.full((2, 2), slots, np.int32)
    held = cache.LayerCache(*map(to_jax, (k, v, pos, np.ones_like(k[..., 0]), whole, whole[0])))
    keep = random.random((2, 2, slots)) < 0.6
    got, (moved,) = jax.device_get(jax.jit(cache.keep_slots)(held, keep, [held.pos]))
    for row, head in np.ndindex(2, 2):
        chosen = np.flatnonzero(keep[row, head])
        for x, old in ((got.k, k), (got.v, v), (got.pos, pos), (moved, pos)):
            np.testing.assert_array_equal(x[row, head, : len(chosen)], old[row, head, chosen])
        assert not got.k[row, head, len(chosen) :].any()
        assert not got.v[row, head, len(chosen) :].any()
        assert int(got.next[row, head]) == len(chosen) == int(got.weight[row, head].sum())


def test_slots_and_masks_must_have_one_size():
    """Annotations are not checked for users, so the function itself is called."""
    unchecked = inspect.unwrap(cache.keep_slots)
    x, pos = jnp.ones((1, 1, 8, 4)), jnp.arange(8, dtype=jnp.int32)[None, None]
    held = cache.LayerCache(x, x, pos, jnp.ones((1, 1, 8)), pos[..., 0], pos[0, :, 0])
    with pytest.raises(ValueError, match=r"keep has shape \(1, 1, 4\), but the cache's slots are \(1, 1, 8\). Give"):
        unchecked(held, held.pos[..., :4] >= 0)
    with pytest.raises(ValueError, match=r"an array of `extra` has shape \(1, 1, 9\)"):
        unchecked(held, held.pos >= 0, [jnp.zeros((1, 1, 9))])
