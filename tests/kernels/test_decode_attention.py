"""Decode attention, by every implementation, against float64 NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from kernels.interpreter import races_found
from kernels.lowering import on

from kvjax.pallas_kernels import Attended, DeferredRope, Factors, Rotation, decode_attention
from kvjax.pallas_kernels.decode_attention import decode_attention_pallas_triton
from kvjax.pallas_kernels.op import Unsupported

TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2, "float16": 2e-2}


def draw(seed, batch, kv_heads, group, slots, dim, dtype, rotated):
    """Queries and a ragged cache: whole, of one slot, empty, with holes, with clusters. Dead slots hold NaN."""
    random = np.random.default_rng(seed)
    weight = random.integers(0, 5, size=(batch, kv_heads, slots)).astype(np.float32)
    for i, (b, h) in enumerate(itertools.product(range(batch), range(kv_heads))):
        if i % 5 == 1:
            weight[b, h] = np.arange(slots) == slots // 3
        elif i % 5 == 2:
            weight[b, h] = 0
        elif i % 5 == 3:
            weight[b, h] = 1
        elif i % 5 == 4:
            weight[b, h, slots // 2 :] = 0
    q = random.normal(size=(batch, kv_heads * group, dim))
    k, v = (np.where(weight[..., None] > 0, random.normal(size=(batch, kv_heads, slots, dim)), np.nan) for _ in "kv")
    q, k, v = (to_jax(x, dtype) for x in (q, k, v))
    if not rotated:
        return q, k, v, to_jax(weight), None
    place = to_jax(random.integers(0, slots, size=weight.shape), jnp.int32)
    query = to_jax(random.integers(0, slots, size=weight.shape[:2]), jnp.int32)
    return q, k, v, to_jax(weight), Rotation(place, query, to_jax(np.logspace(0, -3, dim // 2), jnp.float32), 1.1)


def turn(heads, place, rotation):
    """Heads [..., H] rotated to places, in float64."""
    angle = np.asarray(place, np.float64)[..., None] * np.asarray(rotation.inv_freq, np.float64)
    cos, sin = np.cos(angle) * rotation.amplitude, np.sin(angle) * rotation.amplitude
    first, second = np.split(heads, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def expected(q, k, v, weight, rotation, scale):
    """Outputs, log-sum-exps and mean probabilities, head by head."""
    q, k, v, weight = (np.asarray(x, np.float64) for x in (q, k, v, weight))
    rotation = jax.device_get(rotation)
    batch, kv_heads, slots, dim = k.shape
    group = q.shape[1] // kv_heads
    out, lse, probs = np.zeros(q.shape), np.full(q.shape[:2], -np.inf), np.zeros(weight.shape)
    for b, n in np.ndindex(*q.shape[:2]):
        h = n // group
        live = weight[b, h] > 0
        if not live.any():
            continue
        keys = k[b, h, live]
        if rotation is not None:
            keys = turn(keys, rotation.place[b, h, live], rotation)
        query = q[b, n] if rotation is None else turn(q[b, n], rotation.query[b, h], rotation)
        mass = weight[b, h, live] * np.exp(keys @ query * scale)
        lse[b, n] = np.log(mass.sum())
        out[b, n] = mass / mass.sum() @ v[b, h, live]
        probs[b, h, live] += mass / mass.sum() / group
    return out, lse, probs


# batch, KV heads, query heads for each, slots, head dim, dtype, rotated
CASES = [
    (2, 3, 1, 96, 64, "float32", True),
    (2, 2, 4, 160, 64, "bfloat16", False),
    (1, 5, 8, 32, 128, "float32", False),
    (5, 1, 2, 75, 128, "bfloat16", True),
    (2, 2, 6, 96, 64, "bfloat16", False),
    (1, 2, 7, 75, 64, "float32", True),
    (2, 1, 3, 61, 32, "float32", False),
]


class TestDecodeAttention:
    @pytest.fixture(params=["xla", "gpu", "tpu"])
    def attend(self, request):
        """The public function with one implementation, interpreted where it is a Pallas kernel."""

        def attend(q, k, v, weight, rotation=None, **options) -> Attended:
            options |= {"implementation": request.param, "interpret": request.param != "xla", "rotation": rotation}
            got = decode_attention(q, k, v, weight, scale=0.2, **options)
            got = jax.device_get(got)
            assert request.param != "tpu" or not races_found()
            return got

        return attend

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_is_softmax_attention(self, attend, case):
        dtype = case[-2]
        given = draw(sum(case[:5]), *case)
        got = attend(*given, probs=True)
        out, lse, probs = expected(*given, scale=0.2)
        assert got.out.dtype == dtype
        assert got.logsumexp.dtype == got.probs.dtype == jnp.float32
        np.testing.assert_allclose(got.out.astype(np.float32), out, atol=TOLERANCE[dtype])
        np.testing.assert_allclose(got.logsumexp, lse, atol=TOLERANCE[dtype])
        np.testing.assert_allclose(got.probs, probs, atol=TOLERANCE[dtype])

    def test_clusters_of_hundreds_and_thousands(self, attend):
        """Each counts as often as the tokens that it stands for, whatever their number."""
        q, k, v, _, _ = draw(7, 2, 1, 2, 64, 16, "float32", False)
        sizes = np.random.default_rng(7).choice([0, 1, 65, 700, 4000, 30_000], size=(2, 1, 64))
        k, v = (to_jax(np.nan_to_num(x)) for x in (k, v))
        given = q, k, v, to_jax(sizes, jnp.float32), None
        got = attend(*given, probs=True)
        for one, other in zip(got, expected(*given, scale=0.2), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)

    def test_probabilities_are_given_only_when_asked_for(self, attend):
        given = draw(5, 1, 1, 2, 32, 16, "float32", False)
        with_probs, without = attend(*given, probs=True), attend(*given)
        assert without.probs is None
        np.testing.assert_array_equal(without.out, with_probs.out)

    @pytest.mark.parametrize(("dtype", "group"), [("float32", 4), ("bfloat16", 4), ("float32", 6)])
    def test_queries_are_rotated_on_the_way(self, attend, dtype, group):
        """Each row by its own angles, and rounded to their type as they would be before."""
        q, k, v, weight, _ = draw(6, 2, 2, group, 48, 16, dtype, False)
        angle = np.asarray([[3.0], [50.0]]) * np.logspace(0, -2, 8)
        turned = DeferredRope(q, to_jax(np.cos(angle), jnp.float32), to_jax(np.sin(angle), jnp.float32))
        late, before = attend(turned, k, v, weight), attend(jax.jit(DeferredRope.__call__)(turned), k, v, weight)
        np.testing.assert_allclose(
            late.out.astype(np.float32), before.out.astype(np.float32), atol=TOLERANCE[dtype] / 2
        )
        assert late.out.dtype == dtype
        assert not np.allclose(late.logsumexp, attend(q, k, v, weight).logsumexp, atol=0.1)

    def test_a_cluster_counts_like_its_tokens(self, attend):
        q, k, v, _, _ = draw(3, 1, 1, 2, 32, 16, "float32", False)
        k, v = np.nan_to_num(k), np.nan_to_num(v)
        counts = np.random.default_rng(0).integers(1, 4, size=32)
        merged = attend(q, to_jax(k), to_jax(v), to_jax(counts[None, None], jnp.float32))
        spread = [to_jax(np.repeat(x, counts, axis=2)) for x in (k, v)]
        apart = attend(q, *spread, to_jax(np.ones((1, 1, counts.sum())), jnp.float32))
        np.testing.assert_allclose(merged.out, apart.out, atol=1e-6)
        np.testing.assert_allclose(merged.logsumexp, apart.logsumexp, atol=1e-6)

    def test_two_caches_join_by_their_logsumexp(self, attend):
        q, k, v, weight, _ = draw(4, 1, 2, 2, 64, 16, "float32", False)
        whole = attend(q, k, v, weight)
        stores = [np.asarray(x) for x in (k, v, weight)]
        parts = [attend(q, *(to_jax(x[:, :, half]) for x in stores)) for half in (slice(0, 32), slice(32, 64))]
        share = np.exp([part.logsumexp for part in parts])[..., None]
        share /= share.sum(axis=0)
        np.testing.assert_allclose(
            sum(s * part.out for s, part in zip(share, parts, strict=True)), whole.out, atol=1e-6
        )


def draw_float8(seed, batch, kv_heads, group, slots, dim, dtype):
    """As `draw`, with keys and values in 8-bit floats and their factors. Dead slots hold NaN."""
    q, k, v, weight, _ = draw(seed, batch, kv_heads, group, slots, dim, "float32", False)
    random, dead = np.random.default_rng(seed), np.asarray(weight) == 0
    k, v = (jnp.asarray(x * 60).astype(jnp.float8_e4m3fn) for x in (k, v))
    factors = (to_jax(np.where(dead, np.nan, random.uniform(0.5, 2, dead.shape) / 60), jnp.float32) for _ in "kv")
    return q.astype(dtype), k, v, weight, Factors(*factors)


# batch, KV heads, query heads for each, slots, head dim, dtype
FLOAT8 = [
    (2, 3, 1, 96, 64, "float32"),
    (2, 2, 4, 160, 64, "bfloat16"),
    (1, 2, 6, 160, 64, "bfloat16"),
    (1, 2, 4, 300, 64, "float16"),
    (1, 5, 8, 75, 16, "float32"),
]


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
@pytest.mark.parametrize("case", FLOAT8, ids=str)
def test_8_bit_floats_are_multiplied_by_their_factors(implementation, case):
    """Ragged caches, free slots with NaN in codes and factors: against the same numbers in float64."""
    q, k, v, weight, factors = draw_float8(sum(case[:5]), *case)
    options = {"scale": 0.2, "factors": factors, "implementation": implementation, "interpret": implementation != "xla"}
    got = decode_attention(q, k, v, weight, **options)
    wide = (
        np.asarray(x.astype(jnp.float32), np.float64) * np.asarray(factor)[..., None]
        for x, factor in zip((k, v), factors, strict=True)
    )
    out, lse, probs = expected(q.astype(jnp.float32), *wide, weight, None, 0.2)
    assert got.out.dtype == case[-1]
    shown = decode_attention(q, k, v, weight, probs=True, **options).probs
    np.testing.assert_allclose(shown, probs, rtol=3e-2, atol=1e-5)
    np.testing.assert_allclose(got.out.astype(jnp.float32), out, atol=TOLERANCE[case[-1]])
    np.testing.assert_allclose(got.logsumexp, lse, atol=TOLERANCE[case[-1]])


def test_what_the_kernels_refuse_of_8_bit_floats():
    q, k, v, weight, factors = draw_float8(0, 1, 2, 2, 32, 16, "float32")
    with pytest.raises(Unsupported, match="keys are float8_e4m3fn"):
        decode_attention(q, k, v, weight, scale=1.0, factors=factors, implementation="tpu", interpret=True)
    k, v = (x.astype(jnp.float32) for x in (k, v))
    with pytest.raises(Unsupported, match="keys with factors are float32, not float8_e4m3fn"):
        decode_attention(q, k, v, weight, scale=1.0, factors=factors, implementation="gpu", interpret=True)


@pytest.mark.parametrize("splits", [1, 3])
def test_factors_of_8_bit_floats_may_be_far_apart(splits):
    """One slot with a tiny value has nearly all of the probability; another value is 0, with factor 0. Queries are large or tiny."""
    random = np.random.default_rng(0)
    size, slots, dim = 1, 192, 32
    q = jnp.asarray(random.normal(size=(size, 4, dim)) * np.asarray([1e-4, 1.0, 3e4, 1.0])[:, None], jnp.bfloat16)
    codes = [jnp.asarray(random.normal(size=(size, 1, slots, dim)) * 60).astype(jnp.float8_e4m3fn) for _ in "kv"]
    k_factor = np.full((size, 1, slots), 1e-7)
    v_factor = random.uniform(0.5, 2, (size, 1, slots))
    v_factor[..., 70], v_factor[..., 5] = 1e-9, 0.0
    weight = np.ones((size, 1, slots))
    weight[..., 70], weight[..., 150:] = 1e15, 0.0
    factors = Factors(*(to_jax(x, jnp.float32) for x in (k_factor, v_factor)))
    sizes = {"block": 64, "splits": splits, "warps": 4, "stages": 2}
    got = decode_attention_pallas_triton.decode_attention(
        q, *codes, to_jax(weight, jnp.float32), scale=1.0, factors=factors, interpret=True, sizes=sizes
    )
    wide = (
        np.asarray(x.astype(jnp.float32), np.float64) * factor[..., None]
        for x, factor in zip(codes, (k_factor, v_factor), strict=True)
    )
    out, lse, _ = expected(q.astype(jnp.float32), *wide, weight, None, 1.0)
    np.testing.assert_allclose(got.out.astype(jnp.float32), out, rtol=2e-2, atol=1e-2 * np.abs(out).max())
    np.testing.assert_allclose(got.logsumexp, lse, rtol=1e-4)


def test_queries_of_8_bit_floats_are_rotated_on_the_way():
    q, k, v, weight, factors = draw_float8(3, 2, 2, 4, 96, 16, "bfloat16")
    angle = np.asarray([[3.0], [50.0]]) * np.logspace(0, -2, 8)
    turned = DeferredRope(q, to_jax(np.cos(angle), jnp.float32), to_jax(np.sin(angle), jnp.float32))
    options = {"scale": 0.2, "factors": factors}
    late = decode_attention(turned, k, v, weight, implementation="gpu", interpret=True, **options)
    before = decode_attention(turned(), k, v, weight, implementation="xla", **options)
    np.testing.assert_allclose(late.out.astype(np.float32), before.out.astype(np.float32), atol=TOLERANCE["bfloat16"])


@pytest.mark.parametrize("heads", [1, 2, 8, 512])
def test_a_head_has_few_parts(heads):
    """One program combines them."""
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
        assert decode_attention_pallas_triton._sizes(heads, 65536, 128, dtype, False)["splits"] <= 128


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(("kind", "taken"), [("NVIDIA H200", True), ("NVIDIA A100-SXM4-80GB", False)])
def test_a_hopper_gpu_reads_8_bit_floats_by_the_kernel(kind, taken):
    shapes = jax.eval_shape(lambda: draw_shapes(8, 8, 4, 4096, 128))

    def attend(q, k, v, weight, factors):
        return decode_attention(q, k, v, weight, scale=0.1, factors=factors).out

    with on(kind):
        text = jax.jit(attend).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert ('name = "decode_attention"' in text) == taken


def draw_shapes(batch, kv_heads, group, slots, dim):
    """Arguments of an H200's size."""
    codes = jnp.zeros((batch, kv_heads, slots, dim), jnp.float8_e4m3fn)
    each = jnp.zeros((batch, kv_heads, slots), jnp.float32)
    return jnp.zeros((batch, kv_heads * group, dim), jnp.bfloat16), codes, codes, each, Factors(each, each)


def test_auto_is_xla_on_a_cpu():
    q, k, v, weight, _ = draw(0, 1, 2, 2, 32, 16, "float32", False)
    xla = decode_attention(q, k, v, weight, scale=0.3, implementation="xla")
    np.testing.assert_array_equal(decode_attention(q, k, v, weight, scale=0.3).out, xla.out)


@pytest.mark.parametrize(
    ("implementation", "dim", "options", "says"),
    [
        ("gpu", 16, {}, "this program is for cpu"),
        ("tpu", 16, {}, "this program is for cpu"),
        ("gpu", 24, {"interpret": True}, "head dim 24 is not a power of two"),
        ("tpu", 24, {"interpret": True}, "head dim 24 is not a multiple of 16"),
    ],
)
def test_who_cannot_serve_says_why(implementation, dim, options, says):
    q, k, v, weight, _ = draw(0, 1, 2, 2, 32, dim, "float32", False)
    with pytest.raises(Unsupported, match=says):
        decode_attention(q, k, v, weight, scale=0.3, implementation=implementation, **options)
