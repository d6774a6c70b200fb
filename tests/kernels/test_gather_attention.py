"""Gather attention, by every implementation, against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from kernels.interpreter import races_found

from kvjax.pallas_kernels import DeferredRope, gather_attention
from kvjax.pallas_kernels.gather_attention import gather_attention_pallas_triton as pallas_triton
from kvjax.pallas_kernels.op import Unsupported

TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}
SCALE = 0.1


def draw(seed, batch, heads, kv_heads, selecting, dim, page, pages, slots, dtype):
    """Selections in any order, some pages twice; of a head nothing, of another one slot. What is not selected holds NaN."""
    random = np.random.default_rng(seed)
    index = random.integers(0, slots // page, size=(batch, selecting, pages))
    live = random.random((batch, selecting, pages * page)) < 0.7
    live[0, 0] = False
    live[-1, -1] = np.arange(pages * page) == pages * page // 2
    if selecting > 2:
        live[0, 1] = True
    read = np.zeros((batch, kv_heads, slots), bool)
    for b, r in np.ndindex(batch, selecting):
        read[b, r * kv_heads // selecting, picked(index[b, r], live[b, r], page)] = True
    q = random.normal(size=(batch, heads, dim))
    k, v = (np.where(read[..., None], random.normal(size=(*read.shape, dim)), np.nan) for _ in "kv")
    q, k, v = (to_jax(x, dtype) for x in (q, k, v))
    return q, k, v, to_jax(index, jnp.int32), to_jax(live)


def picked(index, live, page):
    """Slots that one head reads."""
    return (index[:, None] * page + np.arange(page)).reshape(-1)[live]


def expected(q, k, v, index, live, page):
    """Outputs and log-sum-exps, head by head."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    index, live = np.asarray(index), np.asarray(live)
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for b, n in np.ndindex(*q.shape[:2]):
        r, h = n * index.shape[1] // q.shape[1], n * k.shape[1] // q.shape[1]
        slots = picked(index[b, r], live[b, r], page)
        if len(slots):
            mass = np.exp(k[b, h, slots] @ q[b, n] * SCALE)
            lse[b, n] = np.log(mass.sum())
            out[b, n] = mass / mass.sum() @ v[b, h, slots]
    return out, lse


def check(attended, inputs, page):
    out, lse = expected(*inputs, page)
    dtype = inputs[0].dtype
    assert attended.out.dtype == dtype
    assert attended.probs is None
    np.testing.assert_allclose(np.asarray(attended.out, np.float64), out, atol=TOLERANCE[dtype.name])
    np.testing.assert_allclose(attended.logsumexp, lse, atol=2e-6)


TOKENS = {
    "each query head": (2, 4, 2, 4, 64, 1, 37, 128, "float32"),
    "groups": (3, 8, 1, 1, 64, 1, 40, 64, "bfloat16"),
    "two of four query heads": (2, 8, 2, 4, 128, 1, 64, 128, "float32"),
    "heads alone": (9, 4, 4, 4, 64, 1, 5, 128, "float32"),
    "groups of six": (2, 12, 2, 2, 64, 1, 40, 64, "bfloat16"),
}
PAGES = {
    "pages, groups": (2, 8, 2, 2, 128, 16, 5, 128, "float32"),
    "pages, each query head": (1, 4, 2, 4, 128, 64, 5, 512, "bfloat16"),
    "pages, heads of 64": (1, 6, 3, 3, 64, 128, 3, 512, "bfloat16"),
    "pages, groups of five": (2, 10, 2, 2, 128, 16, 5, 128, "float32"),
}
SERVED = [(name, implementation) for implementation in ("xla", "gpu") for name in TOKENS | PAGES]
SERVED += [(name, "tpu") for name in PAGES]


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
def test_queries_are_rotated_on_the_way(implementation):
    q, *rest = draw(6, 2, 4, 2, 4, 64, 1, 21, 64, "float32")
    angle = np.random.default_rng(7).normal(size=(2, 32))
    q = DeferredRope(q, to_jax(np.cos(angle), jnp.float32), to_jax(np.sin(angle), jnp.float32))
    options = {"implementation": implementation, "interpret": implementation != "xla"}
    check(gather_attention(q, *rest, scale=SCALE, **options), (jax.jit(DeferredRope.__call__)(q), *rest), 1)


class TestGatherAttention:
    @pytest.mark.parametrize(("name", "implementation"), SERVED)
    def test_equals_attention_over_the_selection(self, name, implementation):
        shape = (TOKENS | PAGES)[name]
        page, interpret = shape[5], implementation != "xla"

        @jax.jit
        def compute(*inputs):
            return gather_attention(*inputs, scale=SCALE, page=page, implementation=implementation, interpret=interpret)

        for seed in range(1 if implementation == "tpu" else 4):
            inputs = draw(seed, *shape)
            check(compute(*inputs), inputs, page)
        assert implementation != "tpu" or not races_found()

    @pytest.mark.parametrize("implementation", ["xla", "gpu", "tpu"])
    def test_whole_pages_up_to_a_token(self, implementation):
        """Pages are meant or not; of the page that holds a row's last token, only the slots up to it are read."""
        page, tokens = 16, to_jax([39, 128])
        q, k, v, index, _ = draw(1, *PAGES["pages, groups"])
        live = to_jax(np.random.default_rng(1).random(index.shape) < 0.7)
        held = (np.arange(k.shape[2]) < np.asarray(tokens)[:, None])[:, None, :, None]
        k, v = (to_jax(np.where(held, np.nan_to_num(np.asarray(x), nan=0.5), np.float32(np.nan))) for x in (k, v))
        out = gather_attention(
            *(q, k, v, index, live),
            scale=SCALE,
            page=page,
            tokens=tokens,
            implementation=implementation,
            interpret=implementation != "xla",
        )
        slots = np.asarray(index)[..., None] * page + np.arange(page)
        meant = np.asarray(live)[..., None] & (slots < np.asarray(tokens)[:, None, None, None])
        check(out, (q, k, v, index, meant.reshape(*index.shape[:2], -1)), page)

    def test_programs_share_a_head(self):
        inputs = draw(3, *TOKENS["each query head"])
        sizes = {"block": 16, "splits": 3, "warps": 4, "stages": 1}
        check(pallas_triton.gather_attention(*inputs, scale=SCALE, sizes=sizes, interpret=True), inputs, 1)


def test_what_does_not_fit_together():
    q, k, v, index, live = draw(0, *PAGES["pages, groups"])
    for page in (8, 17):
        with pytest.raises(ValueError, match=rf"5 pages of {page} slots, live for 80, and a cache of 128 slots"):
            gather_attention(q, k, v, index, live, scale=SCALE, page=page)


def test_heads_that_do_not_fit_together():
    q, k, v, index, live = draw(0, *TOKENS["each query head"])
    for heads in (1, 3):
        some = [to_jax(np.asarray(x)[:, :heads]) for x in (index, live)]
        with pytest.raises(ValueError, match=rf"{heads} selecting heads for 4 query heads and 2 KV heads"):
            gather_attention(q, k, v, *some, scale=SCALE)


def refused(implementation, interpret=True, dim=128, page=16, heads=2, dtype="float32"):
    inputs = draw(0, 1, heads, 1, 1, dim, page, 2, 64, dtype)
    with pytest.raises(Unsupported) as error:
        gather_attention(*inputs, scale=SCALE, page=page, implementation=implementation, interpret=interpret)
    return str(error.value)


def test_refusals():
    assert "pages of 1 slots are not a multiple of 16" in refused("tpu", page=1)
    assert "pages of 16 slots are not a multiple of 128, as a head dim of 64 requires" in refused("tpu", dim=64)
    assert "keys are float16" in refused("tpu", dtype="float16")
    assert "head dim 80 is not a power of two" in refused("gpu", dim=80)
    assert "this program is for cpu, not for a gpu" in refused("gpu", interpret=False)
