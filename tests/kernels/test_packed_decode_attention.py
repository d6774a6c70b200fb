"""Attention over keys and values in a few bits, by every implementation, against float64 NumPy loops."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from kernels.lowering import decoding_step
from policies.driver import TINY, compiled, make_case

from kvjax.bench.case import Case
from kvjax.cache import attention
from kvjax.pallas_kernels import Packed, PackedSlots, packed_decode_attention
from kvjax.pallas_kernels.op import WITHOUT, Unsupported
from kvjax.policies import KIVI

TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2}


def draw(batch, kv_heads, group, size, dim, dtype, bits, tokens, residual, fills, seed=0):
    """Queries and random bits, heads filled to `fills` slots in turn. What is free holds NaN, and any bits."""
    random, count, channels = np.random.default_rng(seed), 8 // bits, int(np.gcd(tokens, dim))
    filled = np.asarray([n for n, _ in zip(itertools.cycle(fills), range(batch * kv_heads), strict=False)])
    filled = filled.reshape(batch, kv_heads)
    k_packed, recent = np.maximum(filled - 1, 0) // residual * residual, residual + 1
    slot = np.arange(size)

    def levels(along, shape, used):
        codes = random.integers(0, 256, size=(batch, kv_heads, size // count, dim))
        scale, zero = random.uniform(0.2, 1.0, size=shape) * 3 / (2**bits - 1), random.uniform(-1.5, -0.5, size=shape)
        scale, zero = (to_jax(np.where(used, x, np.nan), dtype) for x in (scale, zero))
        return Packed(to_jax(codes, jnp.uint8), scale, zero, along)

    def exact(places, first):
        """Numbers of the slots from `first` on, each at its place."""
        x = np.full((batch, kv_heads, places, dim), np.nan)
        for b, h in np.ndindex(batch, kv_heads):
            for s in range(max(first[b, h], 0), filled[b, h]):
                x[b, h, s % places] = random.normal(size=dim)
        return to_jax(x, dtype)

    whole = (batch, kv_heads, size // tokens, dim), (batch, kv_heads, dim // channels, size)
    k = levels("slots", whole[0], (slot[::tokens] < k_packed[..., None])[..., None])
    v = levels("channels", whole[1], (slot < filled[..., None] - recent)[:, :, None])
    q = to_jax(random.normal(size=(batch, kv_heads * group, dim)), dtype)
    visible = random.random((batch, kv_heads, size)) < 0.8
    numbers = (to_jax(x, jnp.int32) for x in (k_packed, filled))
    slots = PackedSlots(k, v, exact(residual, k_packed), exact(recent, filled - recent), *numbers)
    return q, slots, to_jax(visible)


def number(x, b, h, s, c, bits):
    """One number of a packed array: its level, times the scale of its group, and the group's zero."""
    count = 8 // bits
    code = int(x.codes[b, h, s // count, c]) >> (s % count * bits) & (2**bits - 1)
    if x.along == "slots":
        at = b, h, s // (x.codes.shape[2] * count // x.scale.shape[2]), c
    else:
        at = b, h, c // (x.codes.shape[3] // x.scale.shape[2]), s
    return code * float(x.scale[at]) + float(x.zero[at])


def expected(q, slots, visible, bits, scale):
    """Outputs, slot by slot and number by number."""
    q, visible = np.asarray(q, np.float64), np.asarray(visible)
    k, v = (
        Packed(*(np.asarray(y).astype(np.float64 if i else np.uint8) for i, y in enumerate((x.codes, x.scale, x.zero))), x.along)
        for x in (slots.k, slots.v)
    )  # fmt: skip
    k_recent, v_recent = (np.asarray(x, np.float64) for x in (slots.k_recent, slots.v_recent))
    dim, group, out = q.shape[2], q.shape[1] // visible.shape[1], np.zeros(q.shape)
    for b, h in np.ndindex(visible.shape[:2]):
        filled, k_packed = int(slots.next[b, h]), int(slots.k_packed[b, h])
        keys, values = [], []
        for s in range(filled):
            if not visible[b, h, s]:
                continue
            old = s < filled - v_recent.shape[2]
            keys.append(
                [number(k, b, h, s, c, bits) for c in range(dim)]
                if s < k_packed
                else k_recent[b, h, s % k_recent.shape[2]]
            )
            values.append(
                [number(v, b, h, s, c, bits) for c in range(dim)] if old else v_recent[b, h, s % v_recent.shape[2]]
            )
        for n in range(h * group, (h + 1) * group) if keys else ():
            logits = np.asarray(keys) @ q[b, n] * scale
            weight = np.exp(logits - logits.max())
            out[b, n] = weight / weight.sum() @ np.asarray(values)
    return out


# batch, KV heads, query heads for each, slots, head dim, dtype, bits, tokens of a group, residual, slots filled
CASES = [
    (2, 3, 2, 160, 16, "float32", 2, 32, 32, (160, 0, 1, 33, 100, 97)),
    (1, 2, 4, 96, 32, "bfloat16", 4, 32, 32, (95, 66)),
    (1, 3, 1, 72, 16, "float32", 8, 8, 16, (72, 17, 15)),
    (1, 2, 1, 256, 16, "float32", 2, 128, 128, (250, 129)),
    (2, 1, 8, 136, 64, "bfloat16", 2, 4, 8, (136, 60)),
    (1, 2, 6, 96, 32, "float32", 4, 32, 32, (95, 66)),
]


class TestPackedDecodeAttention:
    @pytest.fixture(params=["xla", "gpu"])
    def attend(self, request):
        """The public function with one implementation, interpreted where it is a Pallas kernel."""
        return functools.partial(
            packed_decode_attention, implementation=request.param, interpret=request.param != "xla"
        )

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_is_attention_over_the_numbers(self, attend, case):
        """Heads filled to different slots, with nothing, with exact ones alone; keys that are packed while values are exact."""
        given, bits = draw(*case), case[6]
        got = attend(*given, bits=bits, scale=0.3)
        assert got.dtype == case[5]
        np.testing.assert_allclose(np.asarray(got, np.float32), expected(*given, bits, 0.3), atol=TOLERANCE[case[5]])

    def test_one_head_fills_as_its_own(self, attend):
        """Each row and KV head by itself is what it is among the others."""
        given = draw(2, 2, 2, 96, 16, "float32", 4, 8, 16, (96, 40, 3, 60))
        together = np.asarray(attend(*given, bits=4, scale=0.3))
        b, h = 1, 1
        q, *others = jax.tree.map(np.asarray, given)
        alone = jax.tree.map(lambda x: to_jax(x[b:, h:]), others)
        got = attend(to_jax(q[b:, 2 * h :]), *alone, bits=4, scale=0.3)
        np.testing.assert_allclose(got, together[b:, 2 * h :], atol=1e-6)


def test_kivi_decodes_by_it(monkeypatch):
    """Prompts and steps of a layer with a sliding window, by the interpreted kernel as by XLA; residuals fill and are packed."""
    case = make_case(3, [1, 8, 23, 54], 10, dim=16)
    spec = dataclasses.replace(case.spec, window=20)
    inside = (np.arange(spec.prompt_len) < case.lengths[:, None])[..., None, None]
    rows = np.arange(len(case.lengths))

    def outputs():
        prefill, step = compiled.__wrapped__(KIVI(bits=4, group=8, residual=8).bind(TINY), spec)
        state = prefill(*(np.where(inside, x[:, : spec.prompt_len], 0) for x in (case.q, case.k, case.v)), case.lengths)
        for pos in (case.lengths + i for i in range(case.steps)):
            out, state = step(state, *(x[rows, pos] for x in (case.q, case.k, case.v)), pos)
            yield out

    by_xla = list(outputs())
    kernel = functools.partial(packed_decode_attention, implementation="gpu", interpret=True)
    monkeypatch.setattr(attention, "packed_decode_attention", kernel)
    np.testing.assert_allclose(list(outputs()), by_xla, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("by_xla", [False, True])
def test_a_decoding_step_reads_the_bits(by_xla, monkeypatch):
    """Lowered for an H200: the kernel, and not so much as 256 keys or values of all heads as floats, of which XLA would make more."""
    if by_xla:
        monkeypatch.setenv(WITHOUT, "packed_decode_attention")
    text = decoding_step(Case("kivi", {"bits": 4}, 4096, 1, "llama-3.1-8b", layers=2, prefill=False))
    arrays = {tuple(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<((?:\d+x)+)(?:f32|bf16)>", text)}
    assert ('name = "packed_decode_attention"' in text) != by_xla
    assert any(len(dims) > 2 and math.prod(dims) >= 8 * 256 * 128 for dims in arrays) == by_xla


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dim": 24, "tokens": 8}, "head dim 24 is not a power of two"),
        ({"tokens": 24, "residual": 24}, "groups of 24 tokens are not a power of two"),
        ({"tokens": 2, "residual": 8}, "groups of 2 tokens are not a power of two of at least the 4"),
    ],
)
def test_what_the_kernel_refuses(change, says):
    sizes = {"batch": 1, "kv_heads": 1, "group": 2, "size": 96, "dim": 16, "dtype": "float32", "bits": 2, "tokens": 8}
    given = draw(**sizes | {"residual": 8, "fills": (50,)} | change)
    with pytest.raises(Unsupported, match=says):
        packed_decode_attention(*given, bits=2, scale=1.0, implementation="gpu", interpret=True)
