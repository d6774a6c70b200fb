"""FP8 against the literal algorithm; 8-bit floats; other policies in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import TINY, compiled, make_case, run
from policies.oracle_fp8 import NUMBERS, Float8Head, nearest
from policies.slots import after_prompt, kept, slots_of

import kvjax
from kvjax.cache import float8, layer_specs
from kvjax.config import PRESETS
from kvjax.pallas_kernels.float8 import LARGEST
from kvjax.policies import FP8, Full, PolicyError, Quantized, SnapKV, TreeKV, get_policy, quantized


def test_the_numbers_are_those_of_the_format():
    codes = jax.lax.bitcast_convert_type(jnp.arange(127, dtype=jnp.uint8), jnp.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(codes.astype(jnp.float32)), NUMBERS)
    assert NUMBERS[-1] == LARGEST == 448


def test_a_vector_by_hand():
    """The largest number is 448 of 1/56; 1 is 56, a number of the format; 0.52 is 29.12, nearest to 30 or 28: to 30 - 0.88."""
    stored = jax.jit(float8.encode)(np.asarray([[8.0, -1.0, 0.52, 0.0], [0, 0, 0, 0]], np.float32))
    np.testing.assert_array_equal(stored.codes.astype(jnp.float32), [[448, -56, 30, 0], [0] * 4])
    np.testing.assert_allclose(stored.factor, [1 / 56, 0])
    np.testing.assert_allclose(float8.decode(stored)[0], [8, -1, 30 / 56, 0], rtol=1e-6)


def test_numbers_are_the_nearest_ones():
    """Of heavy-tailed vectors, of tiny and of huge ones."""
    x = np.random.default_rng(0).standard_t(2, size=(300, 16)) * np.logspace(-30, 30, 300)[:, None]
    x = x.astype(np.float32)
    got = np.asarray(float8.decode(jax.jit(float8.encode)(x)))
    np.testing.assert_allclose(got, [nearest(vector) for vector in x], rtol=1e-6)
    assert (np.abs(got - x) <= np.maximum(np.abs(x) / 16, np.abs(x).max(axis=1, keepdims=True) / 458752) * 1.001).all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows"),
    [(4, 2, 52), pytest.param(3, 1, 52, marks=pytest.mark.slow), pytest.param(4, 2, 200, marks=pytest.mark.long)],
)
def test_equals_the_literal_algorithm(heads, kv_heads, rows):
    """A ragged batch: what is held at the end, and outputs at every step."""
    policy, group, steps = FP8(), heads // kv_heads, 5
    lengths = np.random.default_rng(heads).integers(1, 40, size=rows)
    case = make_case(3, lengths, steps, heads, kv_heads)
    _, outputs, states = run(policy, case, padding=np.nan)
    last = slots_of(policy, case, states[-1])
    for row, head in np.ndindex(len(lengths), kv_heads):
        literal = Float8Head()
        for pos in range(lengths[row] + steps):
            literal.append(case.k[row, pos, head], case.v[row, pos, head], pos)
            if (i := pos - lengths[row]) >= 0:
                out = literal.attend(case.q[row, pos, head * group : (head + 1) * group], pos)
                np.testing.assert_allclose(outputs[i, row, head * group : (head + 1) * group], out, atol=2e-3)
            literal.code()
        # A rotated key near the middle of two numbers can be rounded to either: by a sixteenth, and rarely.
        for got, want, share in ((last.k, literal.keys, 2e-3), (last.v, literal.values, 0)):
            wrong = ~np.isclose(got[row, head, : len(want)], want, atol=1e-5)
            assert wrong.mean() <= share or wrong.sum() <= 1
            np.testing.assert_allclose(got[row, head, : len(want)], want, rtol=0.15, atol=1e-5)
            assert not got[row, head, len(want) :].any()


@pytest.mark.parametrize(("exact_layers", "kept_exactly"), [(0, 0), (1, 2)])
def test_bytes_are_those_of_8_bits(exact_layers, kept_exactly):
    """By hand, for a head of 128 numbers in bfloat16: 128 and a factor of 4 bytes for each key and value, and a position."""
    config = PRESETS["llama-3.1-8b"].with_depth(3)
    policy, spec = FP8(exact_layers=exact_layers), layer_specs(config, 1, 6000, 144, jnp.bfloat16)[0]
    slots = Full().layer(spec).capacity
    coded = 8 * (slots * (2 * (128 + 4) + 4) + 4) + 4
    plain = Full().nbytes(config, 1, 6000, 144) // 3
    assert policy.nbytes(config, 1, 6000, 144) == (3 - kept_exactly) * coded + kept_exactly * plain
    assert coded < 0.53 * plain


@pytest.mark.parametrize("scheme", ["fp8", "turboquant"])
def test_the_same_tokens_are_kept(scheme):
    """Composed with eviction of the prompt: SnapKV's tokens, rounded."""
    options = {"keys": "fp8", "bits": 4} if scheme == "turboquant" else {}
    policy, case = SnapKV(budget=16, window=4), make_case(6, [50, 3, 16, 33], 6)
    coded = quantized(policy, scheme=scheme, **options).bind(TINY)
    (plain_end, _, plain_states), (end, _, states) = run(policy, case), run(coded, case)
    for plain, state in zip(plain_states, states, strict=True):
        assert kept(policy, case, plain) == kept(coded, case, state)
    plain, got = slots_of(policy, case, plain_end), slots_of(coded, case, end)
    np.testing.assert_allclose(got.k[:, :, : plain.k.shape[2]], plain.k, rtol=0.07, atol=1e-5)


def test_nothing_free_is_read():
    """NaN in factors of free slots changes nothing."""
    policy, case = FP8().bind(TINY), make_case(8, [21, 3, 8], 2)
    state = jax.device_get(after_prompt(policy, case))
    free = ~np.asarray(state.live)
    k, v = (x.replace(factor=np.where(free, np.float32(np.nan), x.factor)) for x in (state.k, state.v))
    rows, pos = np.arange(3), case.lengths
    args = case.q[rows, pos], case.k[rows, pos], case.v[rows, pos], pos
    _, step = compiled(policy, case.spec)
    np.testing.assert_array_equal(step(state, *args)[0], step(state.replace(k=k, v=v), *args)[0])


def test_any_head_dim():
    case = make_case(4, [9, 30], 2, dim=12)
    _, outputs, _ = run(FP8(), case)
    _, plain, _ = run(Full(), case)
    np.testing.assert_allclose(outputs, plain, atol=0.2)


@pytest.mark.parametrize("text", ["fp8", "fp8:exact_layers=1", "quantized(snapkv:0.6; scheme=fp8)"])
def test_it_is_written_as_text(text, tiny):
    policy = get_policy(text)
    assert get_policy(str(policy)) == policy
    bound = policy.bind(TINY.with_depth(3))
    assert get_policy(str(bound)) == bound
    assert len(kvjax.generate(tiny, [1, 2, 3] * 20, policy=policy, max_new_tokens=4, ignore_eos=True).tokens) == 4


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: FP8(exact_layers=-1), "fp8: exact_layers=-1 is too small"),
        (lambda: Quantized(Full(), bits=4, scheme="fp8"), "bits=4 has no effect with scheme='fp8'"),
        (lambda: Quantized(Full(), keys="fp8"), "keys='fp8' has no effect with scheme='kivi'"),
        (lambda: quantized(TreeKV(budget=16), scheme="fp8").bind(TINY), "cannot be moved, merged or evicted"),
    ],
)
def test_what_does_not_go(make, says):
    with pytest.raises(PolicyError, match=says):
        make()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_tokens_are_rounded_to_the_dtype_of_the_cache(dtype):
    (spec,) = layer_specs(TINY.with_depth(1), 1, 32, 8, dtype)[:1]
    layer = FP8().layer(spec)
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, spec.num_heads, spec.head_dim)).astype(np.float32)
    k, v = (jnp.asarray(x[:, : spec.num_kv_heads]) for x in (k, v))
    token = kvjax.cache.Token(jnp.asarray(q), k, v, jnp.asarray([3]), spec.rope)
    state = jax.jit(layer.append)(layer.init(), token)
    want = float8.encode(v.astype(dtype))
    np.testing.assert_array_equal(state.v.factor[:, :, 0], want.factor)
    np.testing.assert_array_equal(state.v.codes[:, :, 0].astype(jnp.float32), want.codes.astype(jnp.float32))
    exact = float8.encode(v).factor
    assert (dtype == "float32") == bool((exact == want.factor).all())
