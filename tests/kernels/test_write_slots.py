"""Update one slot per head in several arrays at once, by every implementation, against loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from kernels.lowering import on

from kvjax.config import Rope
from kvjax.pallas_kernels import DeferredRope, Float8Codes, Float8Factor, SlotUpdate, write_sharded_slots, write_slots
from kvjax.pallas_kernels.float8 import FLOAT8
from kvjax.pallas_kernels.op import Unsupported

ROWS, HEADS, SLOTS, DIM = 2, 3, 7, 16


@pytest.fixture(params=["xla", "gpu"])
def write(request):
    """The public function with one implementation, interpreted where it is a Pallas kernel."""

    def write(*args, **options):
        return write_slots(*args, **options, implementation=request.param, interpret=request.param != "xla")

    return write


def draw(dtype):
    """Keys, values, positions and weights of a cache, and slots of which one is beyond its end."""
    random = np.random.default_rng(0)
    shape = ROWS, HEADS, SLOTS
    pairs = [to_jax(random.normal(size=(*shape, DIM)), dtype) for _ in "kv"]
    marks = [to_jax(random.integers(0, 9, shape), jnp.int32), to_jax(random.normal(size=shape), jnp.float32)]
    slot = random.integers(0, SLOTS, (ROWS, HEADS))
    slot[1, 0] = SLOTS
    new = [to_jax(random.normal(size=(ROWS, HEADS, DIM)), dtype) for _ in "kv"]
    return [*pairs, *marks], to_jax(slot, jnp.int32), new


def written(array, slot, value):
    """The same, one head after the other; nothing where the slot does not exist."""
    array, slot = np.array(array), np.asarray(slot)
    value = np.broadcast_to(np.asarray(value, array.dtype), (ROWS, HEADS, *array.shape[3:]))
    for row, head in np.ndindex(ROWS, HEADS):
        if slot[row, head] < SLOTS:
            array[row, head, slot[row, head]] = value[row, head]
    return array


@functools.partial(jax.jit, static_argnums=0)
def deferred_and_turned(rope, k, pos):
    return DeferredRope(k, *rope.cos_sin(pos)), rope.rotate(k, pos[:, None])


class TestWriteSlots:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_codes_vectors_in_8_bit_floats(self, write, dtype):
        """Keys are rotated before. The vector 0 has factor 0."""
        _, slot, (k, v) = draw(dtype)
        v = v.at[0, 1].set(0.0)
        rope = Rope(tuple(10.0 ** -np.linspace(0, 3, DIM // 2)), 1.1)
        late, turned = deferred_and_turned(rope, k, to_jax([3, 50], jnp.int32))
        codes, factors = jnp.zeros((ROWS, HEADS, SLOTS, DIM), FLOAT8), jnp.full((ROWS, HEADS, SLOTS), -1.0)
        values = [kind(x) for x in (late, v) for kind in (Float8Codes, Float8Factor)]
        got = write([codes, factors, codes, factors], slot, values)
        for x, (written_codes, written_factors) in zip((turned, v), (got[:2], got[2:]), strict=True):
            x = np.asarray(x.astype(jnp.float32), np.float64)
            largest = np.abs(x).max(axis=-1)
            np.testing.assert_allclose(written_factors, written(factors, slot, largest / 448), rtol=1e-6)
            scaled = x * 448 / np.where(largest > 0, largest, 1)[..., None]
            exact = written(np.zeros(codes.shape), slot, scaled)
            np.testing.assert_allclose(np.asarray(written_codes.astype(jnp.float32)), exact, rtol=1 / 15, atol=2**-9)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_writes_one_slot_a_head(self, write, dtype):
        arrays, slot, (k, v) = draw(dtype)
        values = [k, v, to_jax([[4], [5]], jnp.int32), 1.0]
        got = write(arrays, slot, values)
        for new, array, value in zip(got, arrays, values, strict=True):
            assert new.dtype == array.dtype
            np.testing.assert_array_equal(new, written(array, slot, value))

    def test_vectors_that_all_heads_share_are_coded(self, write):
        _, slot, (k, _) = draw("float32")
        arrays = [jnp.zeros((ROWS, HEADS, SLOTS, DIM), FLOAT8), jnp.zeros((ROWS, HEADS, SLOTS))]
        shared, each = k[:, :1], jnp.broadcast_to(k[:, :1], k.shape)
        got, expected = (write(arrays, slot, [Float8Codes(x), Float8Factor(x)]) for x in (shared, each))
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_turns_keys_as_rope_does(self, write, dtype):
        (keys, *_), slot, (k, _) = draw(dtype)
        rope = Rope(tuple(10.0 ** -np.linspace(0, 3, DIM // 2)), 1.1)
        pos = to_jax([3, 1000], jnp.int32)
        deferred, turned = deferred_and_turned(rope, k, pos)
        (got,) = write([keys], slot, [deferred])
        expected = written(keys, slot, turned)
        np.testing.assert_allclose(np.asarray(got, np.float32), expected.astype(np.float32), atol=1e-6)

    @pytest.mark.parametrize("live", [[True, False], [False, True], [False, False]])
    def test_rows_that_are_not_live_do_not_change(self, write, live):
        arrays, slot, (k, v) = draw("float32")
        values, seen = [k, v, to_jax([[4], [5]], jnp.int32), 1.0], to_jax([8, 3], jnp.int32)
        *stores, counted, after = write(arrays, slot, values, [slot, seen], live=to_jax(live))
        there = np.where(np.asarray(live)[:, None], np.asarray(slot), SLOTS)
        for new, array, value in zip(stores, arrays, values, strict=True):
            np.testing.assert_array_equal(new, written(array, there, value))
        np.testing.assert_array_equal(counted, np.asarray(slot) + np.asarray(live, int)[:, None])
        np.testing.assert_array_equal(after, np.asarray(seen) + np.asarray(live, int))

    def test_counters_go_up_by_one(self, write):
        arrays, slot, (k, v) = draw("float32")
        seen, other = to_jax([8, 3], jnp.int32), to_jax(2 * np.asarray(slot))
        for counters in ([slot, seen], [other], [seen, other]):
            values = [k, v, 4, 1.0]
            got = write(arrays, slot, values, counters)
            expected = [written(array, slot, value) for array, value in zip(arrays, values, strict=True)]
            for new, wanted in zip(got, [*expected, *(np.asarray(counter) + 1 for counter in counters)], strict=True):
                np.testing.assert_array_equal(new, wanted)


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
def test_divided_among_caches_as_if_alone(implementation):
    """Heads of a layer in two caches of different sizes: each has what it would have in a cache of all."""
    random = np.random.default_rng(1)
    k, v = (to_jax(random.normal(size=(ROWS, 5, DIM)), jnp.float32) for _ in "kv")
    rope, pos = Rope(tuple(10.0 ** -np.linspace(0, 3, DIM // 2)), 1.1), to_jax([3, 1000], jnp.int32)
    deferred, turned = deferred_and_turned(rope, k, pos)
    values = [deferred, v, to_jax(np.asarray(pos)[:, None]), 1.0]
    writings = []
    for heads, slots in (((3, 1), SLOTS), ((0, 4, 2), SLOTS + 4)):
        shape = ROWS, len(heads), slots
        arrays = np.zeros((*shape, DIM), np.float32), np.ones((*shape, DIM), np.float32), np.full(shape, -1, np.int32)
        arrays = [*map(to_jax, (*arrays, np.zeros(shape, np.float32)))]
        slot = to_jax(random.integers(0, slots, shape[:2]), jnp.int32)
        seen = to_jax(random.integers(0, 9, ROWS), jnp.int32)
        writings.append(SlotUpdate(arrays, slot, values, [slot, seen], heads))
    got = write_sharded_slots(writings, implementation=implementation, interpret=implementation != "xla")
    turned, v, pos = jax.device_get((turned, v, pos))
    for written_to, writing in zip(*jax.device_get((got, writings)), strict=True):
        mine = np.asarray(writing.heads)
        for row, place in np.ndindex(ROWS, len(mine)):
            at = int(writing.slot[row, place])
            news = turned[row, mine[place]], v[row, mine[place]], pos[row], 1.0
            for new, before, value in zip(written_to, writing.arrays, news, strict=False):
                wanted = np.array(before[row, place])
                wanted[at] = value
                np.testing.assert_allclose(new[row, place], wanted, atol=1e-6)
        for new, before in zip(written_to[4:], writing.counters, strict=True):
            np.testing.assert_array_equal(new, before + 1)


def test_a_slot_that_counts_is_given_once():
    """Given twice, XLA would copy it before and after, in each layer of a step."""
    array, slot = to_jax(np.zeros((1, 2, 8, DIM)), jnp.bfloat16), to_jax(np.zeros((1, 2)), jnp.int32)
    with on():
        lowered = jax.jit(lambda array, slot: write_slots([array], slot, [1.0], [slot])).trace(array, slot)
    (call,) = [line for line in lowered.lower(lowering_platforms=("cuda",)).as_text().splitlines() if "triton" in line]
    assert call.partition("@")[2].partition("(")[2].partition(")")[0].count("%") == 3  # the value, the array, the slot


def test_who_cannot_serve_says_why():
    arrays = [to_jax(np.zeros((1, 2, 4, 24)), jnp.float32)]
    with pytest.raises(Unsupported, match="head dim 24 is not a power of two"):
        write_slots(arrays, to_jax(np.zeros((1, 2)), jnp.int32), [0.0], implementation="gpu", interpret=True)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_what_the_kernel_refuses_of_8_bit_floats():
    array, slot, vector = jnp.zeros((1, 2, 4)), jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2, 96))
    with pytest.raises(Unsupported, match="head dim 96"):
        write_slots([array], slot, [Float8Factor(vector)], implementation="gpu", interpret=True)
    codes = jax.ShapeDtypeStruct((1, 2, 4, 16), FLOAT8)
    for kind, taken in (("NVIDIA H200", True), ("NVIDIA A100-SXM4-80GB", False)):
        with on(kind):
            traced = jax.jit(lambda x, at, new: write_slots([x], at, [Float8Codes(new)])).trace(
                codes, slot, vector[..., :16]
            )
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert ('name = "write_slots"' in text) == taken
