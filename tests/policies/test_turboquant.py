"""TurboQuant against the literal algorithm; codes of rotated numbers; other policies in them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from policies.driver import TINY, compiled, make_case, run
from policies.oracle_turboquant import ERRORS, LEVELS, TurboHead, back, hadamard
from policies.slots import after_prompt, kept, slots_of

import kvjax
from kvjax.cache import TokenBlock, codebook, layer_specs, where_rows
from kvjax.config import PRESETS
from kvjax.policies import Full, PolicyError, Quantized, SnapKV, TurboQuant, get_policy, quantized

# Cases worked out by hand.


@pytest.mark.parametrize("bits", LEVELS)
def test_levels_are_those_of_the_table(bits):
    """And their mean square error is that of the table, by numerical integration."""
    found = codebook.levels(bits)
    np.testing.assert_allclose(found[len(found) // 2 :], LEVELS[bits], atol=6e-4)
    np.testing.assert_array_equal(found, -found[::-1])
    x = np.linspace(-9, 9, 200_001)
    density = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    error = np.abs(x[:, None] - found).min(axis=1) ** 2 * density
    assert np.sum(error) * (x[1] - x[0]) == pytest.approx(ERRORS[bits], abs=6e-5)


def test_a_vector_by_hand():
    x, levels = np.asarray([3.0, 0, 4, 0]), codebook.levels(2)
    np.testing.assert_allclose(hadamard(4) @ x / 5, [0.7, 0.7, -0.1, -0.1])
    np.testing.assert_allclose(back(x, levels, hadamard(4), corrected=False), [2.6442, 0, 4.9081, 0], atol=1e-3)
    np.testing.assert_allclose(back(x, levels, hadamard(4)), [2.3715, 0, 4.4018, 0], atol=1e-3)
    matrix = codebook.rotation(4)
    coded, got = coded_and_back(matrix, np.tile(x.astype(np.float32), (1, 1, 4, 1)))
    assert coded.codes.shape == (1, 1, 1, 4)
    np.testing.assert_allclose(got[0, 0, 0], [2.3715, 0, 4.4018, 0], atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(got, axis=-1), 5, rtol=1e-6)


def coded_and_back(matrix, x):
    """Codes of vectors in 2 bits, and the vectors as they come back."""

    @jax.jit
    def work(x):
        coded = codebook.encode(x, 2, matrix, jnp.float32)
        return coded, codebook.rotate_back(codebook.decode(coded, 2), matrix)

    return jax.device_get(work(x))


@pytest.mark.parametrize("dim", [1, 2, 8, 64])
def test_the_rotation_is_a_hadamard_matrix(dim):
    np.testing.assert_allclose(codebook.rotation(dim), hadamard(dim), atol=1e-7)
    signed = codebook.rotation(dim, 3)
    np.testing.assert_allclose(signed @ signed.T, np.eye(dim), atol=1e-6)
    np.testing.assert_allclose(np.abs(signed), np.abs(hadamard(dim)), atol=1e-7)


def test_what_is_constant_lies_on_one_coordinate_but_for_signs():
    np.testing.assert_allclose(codebook.rotation(4) @ np.full(4, 0.5), [1, 0, 0, 0])
    signed = codebook.rotation(64, 0) @ np.full(64, 1 / 8)
    assert np.abs(signed).max() < 0.6


def test_rotation_makes_heavy_tails_cheap():
    """Vectors of t-distributed numbers in 2 bits: as much is lost as of a Gaussian, and several times as much without a rotation."""
    x = np.random.default_rng(0).standard_t(3, size=(1, 1, 2000, 128))
    x = (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)

    def lost(matrix):
        return ((coded_and_back(matrix, x)[1] - x) ** 2).sum(axis=-1).mean()

    assert lost(codebook.rotation(128)) == pytest.approx(ERRORS[2], rel=0.1)
    assert lost(np.eye(128, dtype=np.float32)) > 2 * ERRORS[2]


# Random cases against the oracle.

STEPS = 5
CONFIGURATIONS = {
    "4 bits, gqa": ({"bits": 4}, 4, 2),
    "2 bits, rotated values, mha": ({"bits": 2, "values": "rotated"}, 2, 2),
    "4 bits, groups of 4, mqa": ({"bits": 4, "group": 4}, 4, 1),
    "4 bits, signs": ({"bits": 4, "values": "rotated", "signs": 5}, 2, 1),
    "3 bits": ({"bits": 3}, 2, 2),
    "3 and 4 bits": ({"bits": 3, "value_bits": 4}, 4, 2),
    "3 bits, rotated values": ({"bits": 4, "value_bits": 3, "values": "rotated"}, 2, 1),
    "keys in 8 bits, values in 4": ({"keys": "fp8", "bits": 4}, 4, 2),
    "keys in 8 bits, values in 3": ({"keys": "fp8", "bits": 4, "value_bits": 3}, 2, 2),
}
FAST = "4 bits, gqa", "3 and 4 bits"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in CONFIGURATIONS])
def test_equals_the_literal_algorithm(name):
    """A ragged batch: what is held at the end, and outputs at every step."""
    options, heads, kv_heads = CONFIGURATIONS[name]
    policy = TurboQuant(exact_layers=0, **options)
    lengths = np.random.default_rng(len(name)).integers(1, 40, size=52)
    case = make_case(3, lengths, STEPS, heads, kv_heads)
    _, outputs, states = run(policy, case, padding=np.nan)
    last = slots_of(policy, case, states[-1])
    group, rotation = heads // kv_heads, hadamard(8)
    if policy.signs is not None:
        rotation = codebook.rotation(8, policy.signs).astype(np.float64)
    channels = None if policy.values == "rotated" else int(np.gcd(policy.group, 8))
    for row, head in np.ndindex(len(lengths), kv_heads):
        value_bits = policy.value_bits or policy.bits
        levels = None if policy.keys == "fp8" else codebook.levels(policy.bits)
        literal = TurboHead(levels, value_bits, codebook.levels(value_bits), rotation, channels)
        for pos in range(lengths[row]):
            literal.append(case.k[row, pos, head], case.v[row, pos, head], pos)
            literal.code()
        for i in range(STEPS):
            pos = lengths[row] + i
            literal.append(case.k[row, pos, head], case.v[row, pos, head], pos)
            out = literal.attend(case.q[row, pos, head * group : (head + 1) * group], pos)
            np.testing.assert_allclose(outputs[i, row, head * group : (head + 1) * group], out, atol=1e-4)
            literal.code()
        for got, want in ((last.k, literal.keys), (last.v, literal.values)):
            np.testing.assert_allclose(got[row, head, : len(want)], want, atol=1e-4)
            assert not got[row, head, len(want) :].any()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"values": "levels"}, marks=pytest.mark.slow),
        {"values": "rotated"},
        {"bits": 3},
        pytest.param({"keys": "fp8"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_blocks_are_coded_as_token_by_token(options):
    """Rows of any lengths, in blocks of any length: what is held, and a block of one token attends as a step does."""
    policy, random, size = TurboQuant(exact_layers=0, **options), np.random.default_rng(1), 11
    lengths = random.integers(1, 50, size=60)
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

        def step(state, given):
            token, there = given
            new = layer.append(state, token)
            return where_rows(there, new, state), layer.attend(new, token, {})[0]

        return jax.lax.scan(step, state, (tokens.by_token(), tokens.mask.T))

    held = jax.jit(lambda state: layer.view(state))
    same, pos = jax.jit(layer.init)(), np.zeros(len(lengths), np.int32)
    want = same
    while (left := lengths.astype(np.int32) - pos).max() > 0:
        count = np.minimum(random.integers(0, size + 1, size=len(lengths)).astype(np.int32), left)
        out, same = read(same, pos, count)
        want, outs = one_by_one(want, pos, count)
        out, outs = np.asarray(out), np.asarray(outs)
        np.testing.assert_array_equal(same.next, want.next)
        for mine, theirs in zip(*(jax.tree.leaves(held(state)) for state in (same, want)), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-6)
        there = count > 0
        np.testing.assert_allclose(out[there, 0], outs[0][there], atol=1e-5)
        pos = pos + count
    assert np.asarray(same.next)[:, 0].tolist() == lengths.tolist()


# Memory.


@pytest.mark.parametrize(
    ("options", "bytes_"),
    [
        ({"bits": 4}, 134),
        ({"bits": 4, "values": "rotated"}, 132),
        ({"bits": 2}, 70),
        ({"bits": 3}, 102),
        ({"bits": 3, "value_bits": 4}, 118),
        ({"keys": "fp8"}, 200),
    ],
)
def test_bytes_are_those_of_codes(options, bytes_):
    """By hand, for a head of 128 numbers: codes, a factor of each key, a scale and a zero or a factor of each value; and positions.

    As in vLLM, whose keys of 8 bits have no factor of 4 bytes.
    """
    config = PRESETS["llama-3.1-8b"].with_depth(1)
    policy = TurboQuant(exact_layers=0, **options)
    slots = policy.layer(layer_specs(config, 1, 6000, 144, jnp.bfloat16)[0]).capacity
    assert slots == Full().layer(layer_specs(config, 1, 6000, 144, jnp.bfloat16)[0]).capacity
    assert policy.nbytes(config, 1, 6000, 144) == 8 * (slots * (bytes_ + 4) + 4) + 4


def test_the_first_and_last_layers_are_exact():
    config = TINY.with_depth(6)
    bound = TurboQuant().bind(config)
    exact = [bound.layer(spec).is_plain for spec in layer_specs(config, 1, 64, 8, jnp.float32)]
    assert exact == [True, True, False, False, True, True]


# Other policies.


def test_the_same_tokens_are_kept():
    policy, case = SnapKV(budget=16, window=4), make_case(6, [50, 3, 16, 33], 6)
    coded = quantized(policy, bits=4, scheme="turboquant").bind(TINY)
    (plain_end, _, plain_states), (end, _, states) = run(policy, case), run(coded, case)
    for plain, state in zip(plain_states, states, strict=True):
        assert kept(policy, case, plain) == kept(coded, case, state)
    plain, got = slots_of(policy, case, plain_end), slots_of(coded, case, end)
    error = np.linalg.norm(got.k[:, :, : plain.k.shape[2]] - plain.k, axis=-1)
    live = plain.weight > 0
    assert (error[live] < 0.35 * np.linalg.norm(plain.k, axis=-1)[live]).all()


@pytest.mark.parametrize(
    "text",
    [
        "turboquant",
        "turboquant:keys=fp8,value_bits=3",
        "turboquant:bits=2,values=rotated,signs=1",
        "quantized(snapkv:0.6; bits=4; scheme=turboquant)",
    ],
)
def test_it_is_written_as_text(text, tiny):
    policy = get_policy(text)
    assert get_policy(str(policy)) == policy
    bound = policy.bind(TINY.with_depth(5))
    assert get_policy(str(bound)) == bound
    assert len(kvjax.generate(tiny, [1, 2, 3] * 20, policy=policy, max_new_tokens=4, ignore_eos=True).tokens) == 4


def test_nothing_free_is_read():
    """NaN in factors, scales and zeros that stand for nothing changes nothing."""
    for values in ("levels", "rotated"):
        policy, case = TurboQuant(exact_layers=0, values=values).bind(TINY), make_case(8, [21, 3, 8], 2)
        state = jax.device_get(after_prompt(policy, case))
        free = ~np.asarray(state.live)

        def poisoned(x, free):
            return np.where(free, np.float32(np.nan), x)

        k = state.k.replace(factor=poisoned(state.k.factor, free))
        if values == "rotated":
            v = state.v.replace(factor=poisoned(state.v.factor, free))
        else:
            some = free[:, :, None]
            v = state.v.replace(scale=poisoned(state.v.scale, some), zero=poisoned(state.v.zero, some))
        rows, pos = np.arange(3), case.lengths
        args = case.q[rows, pos], case.k[rows, pos], case.v[rows, pos], pos
        _, step = compiled(policy, case.spec)
        np.testing.assert_array_equal(step(state, *args)[0], step(state.replace(k=k, v=v), *args)[0])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TurboQuant(bits=8), "bits=8 is not supported. Give 2, 3 or 4"),
        (lambda: Quantized(Full(), bits=8, scheme="turboquant"), "bits=8 is not supported"),
        (lambda: Quantized(Full(), scheme="qjl"), "scheme='qjl' is unknown. Give one of 'kivi', 'turboquant', 'fp8'"),
        (lambda: TurboQuant(values="all"), "values='all'"),
        (
            lambda: TurboQuant(exact_layers=0).bind(TINY.with_attention(head_dim=24)),
            "power of two, but this model has 24",
        ),
    ],
)
def test_what_does_not_go(make, says):
    with pytest.raises(PolicyError, match=says):
        make()
