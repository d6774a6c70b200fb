"""KIVI against the literal algorithm; packed numbers; other policies in few bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from policies.driver import TINY, compiled, make_case, run
from policies.oracle_arrays import ROPE, rotate, softmax
from policies.oracle_kivi import KiviHead, rounded
from policies.slots import after_prompt, kept, slots_of

import kvjax
from kvjax.cache import PromptKV, Token, TokenBlock, layer_specs, packing, where_rows
from kvjax.cache.packing import PackedCache
from kvjax.policies import (
    KIVI,
    AdaKV,
    CateKV,
    ChunkKV,
    ClusterKV,
    Full,
    PolicyError,
    Quantized,
    Quest,
    SnapKV,
    StreamingLLM,
    TreeKV,
    by_head,
    by_layer,
    pyramid,
    quantized,
)

STEPS = 7
CONFIGURATIONS = {
    "2 bits, gqa": ({"bits": 2, "group": 4, "residual": 8}, 4, 2),
    "4 bits, mha": ({"bits": 4, "group": 8, "residual": 8}, 2, 2),
    "8 bits, mqa, groups that do not divide the cache": ({"bits": 8, "group": 6, "residual": 6}, 4, 1),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_equals_the_literal_algorithm(name):
    """A ragged batch, prompts that fill groups and such that do not: what is held, and outputs, at every step."""
    options, heads, kv_heads = CONFIGURATIONS[name]
    policy = KIVI(**options).bind(TINY)
    lengths = np.random.default_rng(7).integers(1, 50, size=16)
    lengths[:4] = 1, 8, 7, 48
    case = make_case(3, lengths, STEPS, heads, kv_heads)
    _, outputs, states = run(policy, case)
    last = slots_of(policy, case, states[-1])
    group = heads // kv_heads
    for row, head in np.ndindex(16, kv_heads):
        literal = KiviHead(policy.bits, policy.group, np.gcd(policy.group, 8), policy.residual)
        for pos in range(lengths[row]):
            literal.append(case.k[row, pos, head], case.v[row, pos, head], pos)
        for i in range(STEPS):
            literal.pack()
            pos = lengths[row] + i
            literal.append(case.k[row, pos, head], case.v[row, pos, head], pos)
            out = literal.attend(case.q[row, pos, head * group : (head + 1) * group], pos)
            np.testing.assert_allclose(outputs[i, row, head * group : (head + 1) * group], out, atol=1e-4)
        for got, want in ((last.k, literal.keys), (last.v, literal.values)):
            np.testing.assert_allclose(got[row, head, : len(want)], want, atol=1e-4)
            assert not got[row, head, len(want) :].any()


@pytest.mark.parametrize("policy", [KIVI(residual=128), quantized(SnapKV(budget=500))], ids=lambda p: p.info.name)
def test_nothing_is_lost_within_the_residual(policy):
    """A step attends before it packs, so the token that fills the residual is read exactly, with all before it."""
    residual = policy.residual
    case = make_case(9, [residual - 3, residual - 10, 1], 3)
    exact, packed = (run(p.bind(TINY), case)[1] for p in (Full(), policy))
    np.testing.assert_allclose(packed, exact, atol=1e-5)


# Packed numbers.

pack = jax.jit(packing.pack, static_argnums=(1, 2, 3, 4))
unpack = jax.jit(packing.unpack, static_argnums=1)
put = jax.jit(packing.put, static_argnums=(3, 4, 5))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("group", "along"), [(4, "slots"), (5, "channels")])
def test_no_number_is_off_by_more_than_half_a_step(bits, group, along):
    x = np.random.default_rng(bits).normal(size=(2, 3, 8, 10)).astype(np.float32) ** 3
    packed = pack(x, bits, group, along, jnp.float32)
    assert packed.codes.dtype == jnp.uint8
    assert packed.codes.shape == (2, 3, 8 * bits // 8, 10)
    assert packed.scale.shape == ((2, 3, 2, 10) if along == "slots" else (2, 3, 2, 8))
    back = np.asarray(unpack(packed, bits))
    scale = packed.scale if along == "slots" else np.swapaxes(packed.scale, 2, 3)
    half = np.repeat(scale, group, axis=2 if along == "slots" else 3) / 2
    assert (np.abs(back - x) <= half * (1 + 1e-4)).all()
    tall, wide = (group, 1) if along == "slots" else (1, group)
    for i in range(0, 8, tall):
        for j in range(0, 10, wide):
            at = (1, 2, slice(i, i + tall), slice(j, j + wide))
            np.testing.assert_allclose(back[at], rounded(x[at].astype(np.float64), bits), atol=1e-4)


def test_a_part_is_what_it_is_of_the_whole():
    x = np.random.default_rng(0).normal(size=(1, 2, 24, 6)).astype(np.float32)
    for along in ("slots", "channels"):
        packed = pack(x, 4, 2, along, jnp.float32)
        part = jax.jit(lambda packed, start: packing.unpack(packed.part(start, 12, 4), 4))(packed, np.int32(8))
        np.testing.assert_array_equal(part, np.asarray(unpack(packed, 4))[:, :, 8:20])


def test_one_slot_is_set_and_no_other():
    x, new = (np.random.default_rng(i).normal(size=(2, 3, 8, 6)).astype(np.float32) for i in range(2))
    packed = pack(x, 2, 3, "channels", jnp.float32)
    slot = np.asarray([[0, 1, 5], [7, 8, 2]], np.int32)  # 8 is past the last
    back = unpack(put(packed, new[:, :, 0], slot, 2, 3, jnp.float32), 2)
    want = np.array(unpack(packed, 2))
    alone = np.asarray(unpack(pack(new, 2, 3, "channels", jnp.float32), 2))
    for row, head in np.ndindex(2, 3):
        if slot[row, head] < 8:
            want[row, head, slot[row, head]] = alone[row, head, 0]
    np.testing.assert_array_equal(back, want)


def test_codes_by_hand():
    """0, 1, 2, 3 in 2 bits fill one byte, the first in the lowest bits: 0b11100100; equal numbers come back exactly."""
    x = np.asarray([[[[0, 7], [1, 7], [2, 7], [3, 7]]]], np.float32)
    packed = pack(x, 2, 4, "slots", jnp.float32)
    assert packed.codes.tolist() == [[[[0b11100100, 0]]]]
    assert packed.scale.tolist() == [[[[1.0, 1.0]]]]
    assert packed.zero.tolist() == [[[[0.0, 7.0]]]]
    np.testing.assert_array_equal(unpack(packed, 2), x)


def test_8_codes_of_3_bits_share_3_bytes():
    """By hand: 7, 1, 2, ... 6, 0 from the lowest bits on, in 24 bits; one is set, then a run."""
    codes = np.asarray([7, 1, 2, 3, 4, 5, 6, 0, 5, 5, 5, 5, 5, 5, 5, 5], np.uint8)
    word = sum(int(code) << (3 * i) for i, code in enumerate(codes[:8]))
    joined = packing.join_codes(jnp.asarray(codes)[None, None, :, None], 3)
    assert joined.ravel().tolist() == [word & 255, word >> 8 & 255, word >> 16, *[0b01101101, 0b11011011, 0b10110110]]
    assert packing.split_codes(joined, 3).ravel().tolist() == codes.tolist()
    one = packing.set_codes(joined, jnp.full((1, 1, 1), 2, jnp.uint8), jnp.full((1, 1), 5, jnp.int32), 3)
    codes[5] = 2
    assert packing.split_codes(one, 3).ravel().tolist() == codes.tolist()
    slot = jnp.arange(8, 16, dtype=jnp.int32)[None, None]
    run = packing.set_codes_run(one, jnp.full((1, 1, 8, 1), 1, jnp.uint8), slot, slot >= 13, 3)
    assert packing.split_codes(run, 3).ravel().tolist() == [*codes[:13].tolist(), 1, 1, 1]


@pytest.mark.parametrize(
    ("size", "group", "blocks"), [(2048, 32, (4, 512)), (96, 32, (1, 96)), (13056, 128, (34, 384)), (10, 2, (1, 10))]
)
def test_blocks_divide_the_cache(size, group, blocks):
    assert packing.blocks(size, group) == blocks


def test_blocks_together_are_the_whole():
    """Attention over a cache of several blocks, against the same cache unpacked."""
    policy = quantized(Full(), bits=4, group=32, residual=32).bind(TINY)
    case = make_case(5, [1100, 700], 1)
    state, (out, *_), _ = run(policy, case)
    assert packing.blocks(state.pos.shape[-1], 32)[0] > 1
    layer, spec = policy.layer(case.spec), case.spec

    @jax.jit
    def whole(state, q, k, v, pos):
        return Full().layer(spec).attend(layer.view(state), Token(q, k, v, pos, spec.rope), {})[0]

    want = whole(state, *(x[[0, 1], case.lengths] for x in (case.q, case.k, case.v)), case.lengths)
    np.testing.assert_allclose(out, want, atol=1e-5)


# Memory.


@pytest.mark.parametrize(("bits", "share"), [(2, 0.26), (4, 0.38), (8, 0.6)])
def test_bytes_are_those_of_packed_numbers(bits, share):
    """By hand, for one head: codes, a scale and a zero in bfloat16 for 32 numbers (a head has 16), positions, the residual."""
    policy = KIVI(bits=bits)
    spec = layer_specs(TINY, 1, 6000, 144, jnp.bfloat16)[0]
    slots = policy.layer(spec).capacity
    assert slots == Full().layer(spec).capacity  # whole groups already
    numbers = slots * 16
    keys, values = numbers * bits // 8 + 4 * numbers // 32, numbers * bits // 8 + 4 * numbers // 16
    head = keys + values + 4 * slots + (32 + 33) * 16 * 2 + 4
    held = policy.nbytes(TINY, 1, 6000, 144)
    assert held == 2 * (2 * head + 4)
    assert held < (share + 0.05) * Full().nbytes(TINY, 1, 6000, 144)


def test_attention_unpacks_a_block_at_a_time():
    """What a step needs besides the cache is far less than the cache would be in full precision."""
    policy = KIVI().bind(TINY)
    spec = dataclasses.replace(make_case(0, [1], 1).spec, head_dim=64, prompt_len=16384, new_tokens=16)
    layer = policy.layer(dataclasses.replace(spec, rope=TINY.rope.resolve(1)))
    state = jax.eval_shape(layer.init)
    shapes = ((1, 4, 64), jnp.float32), ((1, 2, 64), jnp.float32), ((1, 2, 64), jnp.float32), ((1,), jnp.int32)
    token = Token(*(jax.ShapeDtypeStruct(*shape) for shape in shapes), layer.spec.rope)
    program = jax.jit(lambda state, token: layer.attend(state, token, {})[0]).lower(state, token).compile()
    full = 2 * 2 * 16384 * 64 * 4
    assert program.memory_analysis().temp_size_in_bytes < full / 4


# Other policies in few bits.

EVICTING = {
    "chunkkv": ChunkKV(budget=16, window=4, chunk=4),
    "pyramid": pyramid(ChunkKV(budget=16, window=4, chunk=4), beta=4),
    "catekv": CateKV(
        budget=16, sinks=2, recent=4, chunk=4, window=4, eta=0.5, profile=(("consistent", "adaptive"),) * 2
    ),
}


@pytest.mark.parametrize("name", EVICTING)
def test_the_same_tokens_are_kept(name):
    """What a policy keeps, half a step away at most; every head packs when its own residual is full."""
    policy, case = EVICTING[name].bind(TINY), make_case(6, [50, 3, 16, 33], 12)
    packed = quantized(EVICTING[name], bits=8, group=4, residual=4).bind(TINY)
    (plain_end, plain_out, plain_states), (end, out, states) = run(policy, case), run(packed, case)
    for plain, state in zip(plain_states, states, strict=True):
        assert kept(policy, case, plain) == kept(packed, case, state)
    plain, got = slots_of(policy, case, plain_end), slots_of(packed, case, end)
    size = plain.pos.shape[-1]
    for x, y in ((plain.k, got.k), (plain.v, got.v)):
        np.testing.assert_allclose(y[:, :, :size], x, atol=0.5 * np.ptp(case.k) / 250)
    np.testing.assert_allclose(out, plain_out, atol=0.05)


@pytest.mark.slow
def test_chunkkv_in_4_bits(tiny):
    """ChunkKV × KIVI: freed by the one and packed by the other, through the compiled loop, and in a residual exact."""
    chunks = ChunkKV(budget=32, window=4, chunk=4)
    prompts, options = [[5, 9, 2, 7, 7, 1] * 30, [3, 1, 4]], {"max_new_tokens": 12, "ignore_eos": True}
    policies = chunks, quantized(chunks, bits=4), quantized(chunks, bits=4, residual=96)
    plain, packed, exact = (kvjax.generate(tiny, prompts, policy=p, **options) for p in policies)
    stats = packed[0].stats
    assert stats.cache_bytes == policies[1].nbytes(tiny.config, 2, 180, 12, jnp.float32)
    assert [g.tokens for g in exact] == [g.tokens for g in plain]
    np.testing.assert_allclose(packed[0].logprobs[:6], plain[0].logprobs[:6], atol=0.05)  # before they take other words
    long = [p.nbytes(tiny.config, 1, 8192, 64) for p in (ChunkKV(budget=2048), quantized(ChunkKV(budget=2048), bits=4))]
    assert long[1] < 0.45 * long[0]


@pytest.mark.parametrize(
    "policy",
    [TreeKV(budget=64), StreamingLLM(budget=64), AdaKV(budget=64), Quest(budget=64), ClusterKV(budget=64)],
    ids=lambda policy: policy.info.name,
)
def test_policies_that_change_their_slots_are_refused(policy):
    with pytest.raises(PolicyError, match=rf"quantized\({policy.info.name}\): .* cannot be moved, merged or evicted"):
        quantized(policy).bind(TINY.with_depth(3))  # of sparse ones two are dense


def test_compositions_are_quantised_part_by_part():
    inner = by_head({"a": Full(), "b": SnapKV()}, [["a", "b"], ["b", "a"]])
    bound = quantized(by_layer([inner, Full()]), bits=4).bind(TINY)
    assert bound.layers[0].groups == (quantized(Full(), 4), quantized(SnapKV(), 4))
    assert bound.bind(TINY) == bound
    mixed = by_head({"a": KIVI(), "b": TreeKV(budget=16, sinks=2)}, [["a", "b"], ["b", "a"]]).bind(TINY)
    assert mixed.groups[0] == quantized(Full())


def test_places_beyond_a_caches_slots_are_free():
    """Of whole groups of 48 tokens, 64 slots are 96."""
    policy, case = KIVI(bits=4, group=48, residual=48).bind(TINY), make_case(8, [21, 3], 2)
    layer = policy.layer(dataclasses.replace(case.spec, prompt_len=60))
    lengths = to_jax([21, 3], jnp.int32)
    state = jax.jit(lambda q, k, v: layer.prefill(PromptKV.of(layer.spec.rope, q, k, v, lengths, lengths), {})[0])(
        *(np.zeros((2, 60, *x.shape[2:]), np.float32) for x in (case.q, case.k, case.v))
    )
    slots = jax.device_get(jax.jit(lambda state: layer.view(state))(state))
    assert slots.pos.shape == (2, 2, 96)
    assert (slots.pos[slots.weight == 0] == -1).all()


def test_nothing_free_is_read():
    """NaN in scales, zeros and residual places that stand for nothing changes nothing."""
    policy, case = KIVI(bits=4, group=4, residual=8).bind(TINY), make_case(8, [21, 3, 8], 2)
    state = jax.device_get(after_prompt(policy, case))
    assert isinstance(state, PackedCache)
    slots = np.arange(state.pos.shape[-1])
    groups = slots[::4]
    k_free = (groups >= np.asarray(state.k_packed)[..., None])[..., None]
    v_free = (slots >= np.asarray(state.next)[..., None])[:, :, None]

    def poisoned(x, free):
        nan = np.float32(np.nan)
        return x.replace(scale=np.where(free, nan, x.scale), zero=np.where(free, nan, x.zero))

    bad = state.replace(k=poisoned(state.k, k_free), v=poisoned(state.v, v_free))
    rows, pos = np.arange(3), case.lengths
    args = case.q[rows, pos], case.k[rows, pos], case.v[rows, pos], pos
    _, step = compiled(policy, case.spec)
    np.testing.assert_array_equal(step(state, *args)[0], step(bad, *args)[0])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bits": 3}, "bits=3 is not supported. Give 2, 4 or 8"),
        ({"group": 0}, "group=0"),
        ({"group": 32, "residual": 48}, "multiple of group"),
    ],
)
def test_bad_hyperparameters(options, says):
    with pytest.raises(PolicyError, match=f"kivi: .*{says}"):
        KIVI(**options)
    with pytest.raises(PolicyError, match=says):
        Quantized(Full(), **options)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"bits": 2, "group": 4, "residual": 8}, 11),
        pytest.param({"bits": 4, "group": 6, "residual": 6}, 32, marks=pytest.mark.slow),
    ],
)
def test_blocks_are_packed_as_token_by_token(options, size):
    """200 rows of any lengths, in blocks of any length: the state to the bit, and attention over what had been packed before."""
    policy, random = KIVI(**options).bind(TINY), np.random.default_rng(1)
    lengths = random.integers(1, 70, size=200)
    case = make_case(4, lengths, 1, heads=2, kv_heads=1)
    layer = policy.layer(dataclasses.replace(case.spec, block=size))
    q, k, v = (to_jax(x) for x in (case.q, case.k, case.v))

    def block_at(pos, count, width):
        at = (pos[:, None] + jnp.arange(width, dtype=jnp.int32))[..., None, None]
        parts = (jnp.take_along_axis(x, at, axis=1, mode="clip") for x in (q, k, v))
        return TokenBlock(*parts, pos, count, pos, case.spec.rope)

    @jax.jit
    def read(state, pos, count):
        return layer.read_block(state, block_at(pos, count, size), {})[:2]

    @jax.jit
    def one_by_one(state, pos, count):
        tokens = block_at(pos, count, size)

        def append(state, given):
            token, there = given
            return where_rows(there, layer.append(state, token), state), None

        return jax.lax.scan(append, state, (tokens.by_token(), tokens.mask.T))[0]

    held = jax.jit(lambda state: layer.view(state))
    same, pos = jax.jit(layer.init)(), np.zeros(200, np.int32)
    want = same
    while (left := lengths.astype(np.int32) - pos).max() > 0:
        count = np.minimum(random.integers(0, size + 1, size=200).astype(np.int32), left)
        before = jax.device_get(held(one_by_one(same, pos, np.minimum(count, 1))))
        out, same = read(same, pos, count)
        out = np.asarray(out)
        want = one_by_one(want, pos, count)
        for mine, theirs in zip(jax.tree.leaves(held(same)), jax.tree.leaves(held(want)), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        for row in (0, 7, 133):
            for i in range(int(count[row])):
                at = int(pos[row])
                new = rotate(ROPE, case.k[row, at : at + i + 1, 0], at + np.arange(i + 1))
                keys = np.concatenate([before.k[row, 0, :at].astype(np.float64), new])
                values = np.concatenate([before.v[row, 0, :at].astype(np.float64), case.v[row, at : at + i + 1, 0]])
                for head in range(2):
                    weights = softmax(keys @ rotate(ROPE, case.q[row, at + i, head], at + i) * case.spec.scale)
                    np.testing.assert_allclose(out[row, i, head], weights @ values, atol=1e-5)
        pos = pos + count
    assert np.asarray(same.next)[:, 0].tolist() == lengths.tolist()


def test_what_is_packed_is_not_chosen_from_again():
    spec = make_case(0, [50], 4).spec
    assert quantized(SnapKV(budget=20, window=4)).layer(spec).reads == "whole"
    assert quantized(SnapKV(budget=500, window=4)).layer(spec).reads == "blocks"
