"""Attention over caches among which heads are divided, by every implementation, against NumPy in float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from kernels.lowering import decoding_step

from kvjax.bench.case import Case
from kvjax.pallas_kernels import CacheShard, DeferredRope, sharded_decode_attention
from kvjax.pallas_kernels.head_shards import head_at, is_among, place_among
from kvjax.pallas_kernels.op import Unsupported

ROWS, GROUP, DIM, SCALE = 2, 2, 16, 0.3
DIVISIONS = [(((1, 3), 32), ((4, 0, 2), 80)), (((0, 1, 2), 48),), (((2,), 96), ((0,), 16), ((1, 3), 40))]
"""Heads and capacity of each cache."""


def draw(division, dtype, group=GROUP):
    """Queries, and caches of which a third of the slots is free and holds NaN."""
    random = np.random.default_rng(0)
    caches = []
    for heads, slots in division:
        shape = ROWS, len(heads), slots
        weight = random.choice([0, 1, 80, 0, 1, 2000], shape)
        held = [np.where(weight[..., None] > 0, random.normal(size=(*shape, DIM)), np.nan) for _ in "kv"]
        caches.append(CacheShard(*(to_jax(x, dtype) for x in held), to_jax(weight, jnp.float32), heads))
    count = group * sum(len(heads) for heads, _ in division)
    return to_jax(random.normal(size=(ROWS, count, DIM)), dtype), caches


def expected(q, caches):
    """One query head after the other."""
    q, out = np.asarray(q, np.float64), np.zeros(q.shape)
    group = q.shape[1] // sum(len(held.heads) for held in caches)
    for held in caches:
        k, v, weight = (np.asarray(x, np.float64) for x in (held.k, held.v, held.weight))
        for row, place, member in np.ndindex(ROWS, len(held.heads), group):
            head, live = held.heads[place] * group + member, weight[row, place] > 0
            share = weight[row, place, live] * np.exp(k[row, place, live] @ q[row, head] * SCALE)
            out[row, head] = share @ v[row, place, live] / share.sum()
    return out


class TestDividedAttention:
    @pytest.fixture(params=["xla", "gpu"])
    def attend(self, request):
        """The public function with one implementation, interpreted where it is a Pallas kernel."""

        def attend(q, caches):
            options = {"scale": SCALE, "implementation": request.param, "interpret": request.param != "xla"}
            heads = [held.heads for held in caches]

            @jax.jit
            def work(q, arrays):
                held = [CacheShard(*three, those) for three, those in zip(arrays, heads, strict=True)]
                return sharded_decode_attention(q, held, **options)

            return work(q, [held[:3] for held in caches])

        return attend

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize(
        ("division", "group"), [*((each, GROUP) for each in DIVISIONS), (DIVISIONS[0], 3)], ids=str
    )
    def test_each_head_attends_over_its_cache(self, attend, division, group, dtype):
        q, caches = draw(division, dtype, group)
        got = attend(q, caches)
        assert got.dtype == dtype
        tolerance = {"float32": 1e-5, "bfloat16": 3e-2}[dtype]
        np.testing.assert_allclose(np.asarray(got, np.float32), expected(q, caches), atol=tolerance)

    def test_queries_are_rotated_on_the_way(self, attend):
        q, caches = draw(DIVISIONS[0], "float32")
        angle = np.asarray([[3.0], [50.0]]) * np.logspace(0, -2, DIM // 2)
        turned = DeferredRope(q, to_jax(np.cos(angle), jnp.float32), to_jax(np.sin(angle), jnp.float32))
        before = jax.jit(DeferredRope.__call__)(turned)
        np.testing.assert_allclose(attend(turned, caches), expected(before, caches), atol=1e-5)

    def test_a_head_with_nothing_gives_zeros(self, attend):
        q, (short, long) = draw(DIVISIONS[0], "float32")
        weight = np.array(short.weight)
        weight[1, 0] = 0
        got = np.asarray(attend(q, [short._replace(weight=to_jax(weight)), long]))
        first = short.heads[0] * GROUP
        assert not np.any(got[1, first : first + GROUP])
        assert np.all(np.any(got[0], axis=-1))


def test_who_cannot_serve_says_why():
    q, caches = draw([((0,), 8), ((1,), 32)], "float32")
    with pytest.raises(Unsupported, match="8 slots are fewer than a block"):
        sharded_decode_attention(q, caches, scale=1.0, implementation="gpu", interpret=True)


@pytest.mark.parametrize("heads", [(0, 1, 2), (4, 0, 2)])
def test_a_program_finds_its_cache(heads):
    among, place_of, at = (jax.jit(lambda i, f=f: f(i, heads)) for f in (is_among, place_among, head_at))
    for head in range(6):
        assert bool(among(np.int32(head))) == (head in heads)
    for place, head in enumerate(heads):
        assert int(place_of(np.int32(head))) == place
        assert int(at(np.int32(place))) == head


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_two_kinds_of_heads_take_as_many_kernels_as_one():
    """A decoding step with CateKV, lowered for an H200, has those of the full cache, under other names."""

    def kernels(name, settings):
        case = Case(name, settings, 4096, 1, "llama-3.1-8b", layers=3, prefill=False)
        text = decoding_step(case)
        bodies = re.findall(r"func\.func private @(\w+)\((.*?)\n  }", text, re.DOTALL)
        named = {name: re.findall(r'name = "(\w+)"', body) for name, body in bodies}
        called = re.findall(r"call @(\w+)\(", text[: text.index("func.func private")])
        return [kernel.replace("sharded_decode", "decode") for name in called for kernel in named.get(name, [])]

    sharded, whole = kernels("catekv", {"share_adaptive": 0.4}), kernels("full", {})
    assert whole.count("decode_attention") == 3
    assert sharded == whole
