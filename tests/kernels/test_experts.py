"""The choice of experts and their MLPs, by every implementation, against their definition in float64."""

import jax
import numpy as np
import pytest
from arrays import to_jax

from kvjax.pallas_kernels import GroupedMatrix, Norm, best_experts, expert_mlp
from kvjax.pallas_kernels.experts import few_pairs_pallas_triton as few_pairs
from kvjax.pallas_kernels.experts import many_pairs_pallas_triton as many_pairs
from kvjax.pallas_kernels.experts import one_token_pallas_triton as one_token
from kvjax.pallas_kernels.experts.tiles import Biases, tiles
from kvjax.pallas_kernels.op import Unsupported

EXPERTS, EACH, DIM, WIDTH = 6, 3, 64, 128


def draw(tokens, seed=0, low=0, high=EXPERTS):
    """Tokens, their experts between `low` and `high`, weights and matrices."""
    rng = np.random.default_rng(seed)
    experts = np.stack([rng.permutation(np.arange(low, high))[:EACH] for _ in range(tokens)])
    shapes = (tokens, DIM), (EXPERTS * WIDTH, DIM), (EXPERTS * WIDTH, DIM), (EXPERTS * DIM, WIDTH)
    x, gate, up, down = (to_jax(rng.normal(size=shape) / np.sqrt(shape[1]), "bfloat16") for shape in shapes)
    weights = rng.random((tokens, EACH)).astype(np.float32)
    return x, to_jax(experts, "int32"), to_jax(weights), gate, up, down


def expected(x, experts, weights, gate, up, down, activation):
    """Each token through each of its experts. Hidden units are rounded as the products of bfloat16 are."""
    x, gate, up, down = (np.asarray(w, np.float64) for w in (x, gate, up, down))
    act = {
        "silu": lambda g: g / (1 + np.exp(-g)),
        "gelu_tanh": lambda g: g / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))),
    }[activation]
    out = np.zeros(x.shape)
    for r, token in enumerate(x):
        for e, weight in zip(np.asarray(experts[r]), np.asarray(weights[r]), strict=True):
            if 0 <= e < EXPERTS:
                rows, outputs = (slice(e * n, (e + 1) * n) for n in (WIDTH, DIM))
                out[r] += weight * (down[outputs] @ (act(gate[rows] @ token) * (up[rows] @ token)))
    return out


MXFP4_EXPERTS, MXFP4_DIM, MXFP4_WIDTH = 4, 2144, 32
"""Rows of 67 groups, more than are read at a time, and no power of two."""


def draw_mxfp4(tokens, seed=0, low=0, high=MXFP4_EXPERTS):
    """Tokens, their experts between `low` and `high`, weights, matrices and biases."""
    rng = np.random.default_rng(seed)
    experts = np.stack([rng.permutation(np.arange(low, high))[:2] for _ in range(tokens)])
    hidden, outputs = MXFP4_EXPERTS * MXFP4_WIDTH, MXFP4_EXPERTS * MXFP4_DIM
    shapes = (hidden, MXFP4_DIM), (hidden, MXFP4_DIM), (outputs, MXFP4_WIDTH)
    matrices = [
        GroupedMatrix(
            to_jax(rng.integers(0, 256, size=(rows, 16, columns // 32), dtype=np.uint8)),
            to_jax(rng.integers(118, 124, size=(rows, columns // 32), dtype=np.uint8)),
        )
        for rows, columns in shapes
    ]
    x = to_jax(rng.normal(size=(tokens, MXFP4_DIM)), "bfloat16")
    weights = to_jax(rng.random((tokens, 2)).astype(np.float32))
    biases = Biases(*(to_jax(rng.normal(size=rows), "bfloat16") for rows, _ in shapes))
    return x, to_jax(experts, "int32"), weights, *matrices, biases


def expected_mxfp4(x, experts, weights, gate, up, down, biases, activation):
    """Each token through each of its experts, whose matrices are dequantised in float64."""
    gate, up, down = (unpacked(w).reshape(MXFP4_EXPERTS, -1, w.shape[1]) for w in (gate, up, down))
    added = [
        np.zeros((MXFP4_EXPERTS, 1)) if biases is None else np.asarray(b, np.float64).reshape(MXFP4_EXPERTS, -1)
        for b in (biases or [None] * 3)
    ]
    x = np.asarray(x, np.float64)
    out = np.zeros(x.shape)
    for r, token in enumerate(x):
        for e, weight in zip(np.asarray(experts[r]), np.asarray(weights[r]), strict=True):
            if not 0 <= e < MXFP4_EXPERTS:
                continue
            g, u = gate[e] @ token + added[0][e], up[e] @ token + added[1][e]
            if activation == "clamped_swiglu":
                g, u = np.minimum(g, 7), np.clip(u, -7, 7)
                h = g / (1 + np.exp(-1.702 * g)) * (u + 1)
            else:
                h = g / (1 + np.exp(-g)) * u
            out[r] += weight * (down[e] @ h + added[2][e])
    return out


def unpacked(matrix):
    """The low half of byte m of a group is input m, and the high half input m + 16."""
    codes, scale = np.asarray(matrix.levels), np.asarray(matrix.scale, np.float64)
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.concatenate([codes & 15, codes >> 4], axis=1)
    numbers = np.where(codes < 8, 1, -1) * sizes[codes & 7] * 2 ** (scale - 127)[:, None]
    return numbers.swapaxes(1, 2).reshape(len(codes), -1)


def close(got, wanted):
    return np.linalg.norm(np.asarray(got) - wanted) < 0.01 * np.linalg.norm(wanted)


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 50])
def test_experts_by_definition(tokens, activation, implementation):
    """Up to 16 tokens by the kernels for few pairs, others by those for many."""
    given = draw(tokens, seed=tokens)
    got = expert_mlp(*given, activation=activation, implementation=implementation, interpret=implementation != "xla")
    assert got.dtype == np.float32
    assert close(got, expected(*given, activation))


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_tokens_are_normed(tokens, implementation):
    """A single token of the kernels is divided by its root mean square after the products."""
    x, *given = draw(tokens, seed=tokens)
    x, gain = 3 * x, to_jax(np.linspace(0.5, 2, DIM), "bfloat16")
    wide = np.asarray(x, np.float64)
    normed = wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + 0.5) * np.asarray(gain, np.float64)
    options = {"implementation": implementation, "interpret": implementation != "xla"}
    for norm in Norm(gain, 0.5), Norm(gain - 1, 0.5, offset=1.0):
        assert close(expert_mlp(x, *given, norm=norm, **options), expected(normed, *given, "silu"))


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
@pytest.mark.parametrize("tokens", [5, 40])
def test_experts_of_other_devices_are_ignored(tokens, implementation):
    """Those below 0, and those after the last."""
    given = draw(tokens, low=-3, high=EXPERTS + 4)
    assert (np.asarray(given[1]) < 0).any()
    assert (np.asarray(given[1]) >= EXPERTS).any()
    got = expert_mlp(*given, total=13, implementation=implementation, interpret=implementation != "xla")
    assert close(got, expected(*given, "silu"))


@pytest.mark.parametrize("tokens", [7, 40])
def test_a_token_does_not_depend_on_others(tokens):
    """Bit for bit, whatever experts the others have."""
    x, experts, *rest = draw(tokens)
    others = draw(tokens, seed=9)
    mixed = to_jax(np.where(np.arange(tokens)[:, None] == 2, experts, others[1]), "int32")
    tokens_mixed = to_jax(np.where(np.arange(tokens)[:, None] == 2, x, others[0]), "bfloat16")
    options = {"implementation": "gpu", "interpret": True}
    alone, beside = expert_mlp(x, experts, *rest, **options), expert_mlp(tokens_mixed, mixed, *rest, **options)
    np.testing.assert_array_equal(alone[2], beside[2])
    assert not np.array_equal(alone[3], beside[3])


def test_all_tokens_may_have_the_same_experts():
    """Then one tile after the other has the same expert, and other experts have none."""
    for tokens in (9, 60):
        x, experts, *rest = draw(tokens)
        same = to_jax(np.broadcast_to(np.array([4, 1, 2]), experts.shape), "int32")
        assert close(expert_mlp(x, same, *rest, implementation="gpu", interpret=True), expected(x, same, *rest, "silu"))


@pytest.mark.parametrize(
    ("tokens", "activation"),
    [
        (1, "clamped_swiglu"),
        (3, "clamped_swiglu"),
        *(pytest.param(n, a, marks=pytest.mark.slow) for n, a in ((1, "silu"), (3, "silu"), (16, "clamped_swiglu"))),
    ],
)
def test_experts_in_mxfp4_by_definition(tokens, activation):
    """With biases and without, and for a single token in steps of one load and of four."""
    *given, biases = draw_mxfp4(tokens, seed=tokens)
    for added in biases, None:
        wanted = expected_mxfp4(*given, added, activation)
        got = expert_mlp(*given, added, activation=activation, implementation="gpu", interpret=True)
        assert got.dtype == np.float32
        assert close(got, wanted)
    if tokens == 1:
        for sizes in (
            {"units": 32, "outputs": 16, "warps": 8, "together": 1},
            ONE_TOKEN,
        ):
            assert close(single_token(*given, activation, sizes=sizes), wanted)
            added = single_token(*given, activation, biases=biases, sizes=sizes)
            assert close(added, expected_mxfp4(*given, biases, activation))


ONE_TOKEN = {"units": 32, "outputs": 32, "warps": 8, "together": 4}
"""Sizes of the kernels for a single token."""


def single_token(*given, sizes, norm=None, biases=None):
    *given, activation = given
    options = {"activation": activation, "total": None, "interpret": True}
    return few_pairs.expert_mlp(*given, norm=norm, biases=biases, sizes=sizes, **options)


@pytest.mark.slow
def test_tokens_of_experts_in_mxfp4_are_normed():
    """Before they are brought into the order of the codes."""
    for tokens in (1, 3):
        x, *given = draw_mxfp4(tokens, seed=tokens)
        gain = to_jax(np.linspace(0.5, 2, MXFP4_DIM), "bfloat16")
        wide = np.asarray(x, np.float64)
        normed = wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + 0.5) * np.asarray(gain, np.float64)
        wanted = expected_mxfp4(normed, *given, "silu")
        assert close(expert_mlp(x, *given, norm=Norm(gain, 0.5), implementation="gpu", interpret=True), wanted)
        if tokens == 1:
            *given, biases = given
            norm = Norm(gain, 0.5)
            assert close(single_token(x, *given, "silu", norm=norm, biases=biases, sizes=ONE_TOKEN), wanted)


def run_ptx(text, operands):
    """Run PTX with lists of 32-bit operands by their numbers, and return the first two. Few instructions are known."""

    def values(name):
        if name[0].isdigit():
            return np.uint32(int(name, 0))
        return operands[int(name[1:])] if name[0] == "$" else registers[name]

    def permuted(a, b, selector):
        bytes_of = [(word >> np.uint32(8 * i)) & 255 for word in (a, b + 0 * a) for i in range(4)]
        return sum(bytes_of[int(selector) >> 4 * i & 7].astype(np.uint32) << np.uint32(8 * i) for i in range(4))

    def chosen_bits(a, b, c, table):
        found = np.zeros_like(a)
        for i in range(8):
            minterm = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            found |= minterm if int(table) >> i & 1 else np.uint32(0)
        return found

    def fused(a, b, c):
        """Products and sums of halves are exact in float64, and rounded once."""
        a, b, c = (
            np.stack([w, w >> np.uint32(16)], -1).astype(np.uint16).view(np.float16).astype(float) for w in (a, b, c)
        )
        low, high = np.moveaxis((a * b + c).astype(np.float16).view(np.uint16).astype(np.uint32), -1, 0)
        return low | high << np.uint32(16)

    known = {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "shl.b32": lambda a, by: a << by,
        "shr.u32": lambda a, by: a >> by,
        "prmt.b32": permuted,
        "lop3.b32": chosen_bits,
        "fma.rn.f16x2": fused,
    }
    registers = {}
    for line in text.strip("{ }").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name and name != ".reg":
            to, *of = rest.replace(" ", "").split(",")
            value = known[name](*map(values, of))
            if to[0] == "$":
                operands[int(to[1:])] = value
            else:
                registers[to] = value
    return operands[0], operands[1]


def halves_in_words(values):
    """Two float16 a word [N, 4] -> two words [N]."""
    return list(np.ascontiguousarray(values, np.float16).view(np.uint32).T)


def test_codes_become_float16_by_their_bits():
    """PTX adds the products of all codes and inputs to sums in float16, rounded after each half-byte."""
    rng = np.random.default_rng(0)
    codes = np.stack([rng.permutation(256) for _ in range(4)], 1)
    low, high = (np.float16(rng.normal(size=codes.shape) * 2.0**13) for _ in range(2))
    before = np.float16(rng.normal(size=codes.shape) * 20)
    words = codes.astype(np.uint8).view(np.uint32)[:, 0]
    operands = [None, None, words, *halves_in_words(low), *halves_in_words(high), *halves_in_words(before)]
    got = np.stack(run_ptx(one_token.PTX, operands), 1).view(np.float16)
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    wanted = before
    for half, x in (codes % 16, low), (codes // 16, high):
        number = np.where(half < 8, 1, -1) * sizes[half % 8]
        wanted = np.float16(wanted.astype(float) + number * 2.0**-14 * x.astype(float))
    np.testing.assert_array_equal(got, wanted)


def test_inputs_become_float16_by_powers_of_two():
    """Those of a group, in bfloat16, are exact down to 2^-28 of its largest one; a group of zeros stays zero."""
    rng = np.random.default_rng(0)
    x = (
        rng.choice([-1, 1], size=(5, 32))
        * rng.integers(128, 256, size=(5, 32))
        * 2.0 ** rng.integers(-27, 1, size=(5, 32))
    )
    x *= np.array([[2.0**-90], [1], [8], [2.0**100], [0]])
    numbers, factors = map(np.asarray, one_token._scaled(to_jax(x)))
    largest = np.abs(numbers[:4]).max(1)
    assert ((largest >= 2.0**14) & (largest < 2.0**15)).all()
    np.testing.assert_array_equal(numbers.astype(float) * 2.0**-14 * factors[:, None], x)


@pytest.mark.parametrize("outlier", [1.0, 1000.0])
def test_a_single_token_is_as_precise_as_bfloat16(outlier):
    """Although sums are in float16, also with an input that is much larger than all others."""
    x, *given, _ = draw_mxfp4(1)
    x = to_jax(np.where(np.arange(MXFP4_DIM) == 40, outlier, 1.0) * np.asarray(x, np.float64), "bfloat16")
    wanted = expected_mxfp4(x, *given, None, "silu")
    got = single_token(x, *given, "silu", sizes=ONE_TOKEN)
    assert np.linalg.norm(np.asarray(got) - wanted) < 0.001 * np.linalg.norm(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 5])
def test_experts_in_mxfp4_of_other_devices_are_ignored(tokens):
    """Those below 0, and those after the last; and all tokens may have the same expert."""
    x, experts, *rest = draw_mxfp4(tokens, low=-3, high=MXFP4_EXPERTS + 3)
    for chosen in experts, to_jax(np.broadcast_to(np.array([2, MXFP4_EXPERTS]), experts.shape), "int32"):
        got = expert_mlp(x, chosen, *rest, total=10, implementation="gpu", interpret=True)
        assert close(got, expected_mxfp4(x, chosen, *rest, "silu"))


@pytest.mark.parametrize("tokens", [1, 3])
def test_biases_of_experts_in_bfloat16(tokens):
    """They are added to the rounded products, and to the outputs in float32."""
    given = draw(tokens, seed=tokens)
    rng = np.random.default_rng(tokens)
    biases = Biases(*(to_jax(rng.normal(size=len(w)), "bfloat16") for w in given[3:]))
    options = {"activation": "clamped_swiglu"}
    got = expert_mlp(*given, biases, implementation="gpu", interpret=True, **options)
    assert close(got, np.asarray(expert_mlp(*given, biases, implementation="xla", **options)))


def test_parts_do_not_matter(monkeypatch):
    """Some tokens at a time, as many as do not divide their number."""
    given = draw(50)
    options = {"norm": None, "activation": "silu", "total": None, "interpret": True}
    whole = many_pairs.expert_mlp(*given, **options)
    monkeypatch.setattr(many_pairs, "AT_A_TIME", 23)
    np.testing.assert_array_equal(many_pairs.expert_mlp(*given, **options), whole)


def test_float32_is_left_to_xla():
    """The kernels multiply bfloat16 alone."""
    x, experts, weights, *matrices = draw(3)
    wide = [np.asarray(w, np.float32) for w in (x, *matrices)]
    given = (to_jax(wide[0]), experts, weights, *map(to_jax, wide[1:]))
    with pytest.raises(Unsupported, match="not all arrays are bfloat16"):
        expert_mlp(*given, implementation="gpu", interpret=True)
    np.testing.assert_allclose(expert_mlp(*given), expected(*given, "silu"), atol=1e-5)


@pytest.mark.parametrize("size", [1, 8])
def test_tiles_cover_each_pair_once(size):
    """Pairs of experts that another device has, number 5, are in no tile."""
    for seed in range(20):
        random = np.random.default_rng(seed)
        own = random.choice(6, size=97, p=random.dirichlet(np.full(6, 0.4)))
        found = jax.tree.map(np.asarray, tiles(to_jax(own, "int32"), 5, size))
        ordered, seen = np.sort(own), []
        for expert, start, stop in zip(*found, strict=True):
            places = list(range(start, min(start + size, stop)))
            assert all(ordered[place] == expert for place in places)
            seen += places
        assert sorted(seen) == list(range(np.sum(own < 5)))


def chosen(logits, count, normalized, scale):
    """The best experts of each token, first those with the highest weights, and their weights."""
    powers = np.exp(logits - logits.max(1, keepdims=True))
    weights = powers / powers.sum(1, keepdims=True)
    order = np.argsort(-weights, axis=1, kind="stable")[:, :count]
    best = np.take_along_axis(weights, order, 1)
    return order, scale * (best / best.sum(1, keepdims=True) if normalized else best)


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
@pytest.mark.parametrize(
    ("experts", "count", "normalized", "scale"), [(128, 8, True, 1.0), (60, 4, False, 1.5), (6, 6, True, 1.0)]
)
def test_the_best_experts_by_definition(experts, count, normalized, scale, implementation):
    """Equal logits are among them, of which the first expert's wins, and one of them is of no use to anybody."""
    logits = np.random.default_rng(experts).integers(-6, 6, size=(19, experts)).astype(np.float32)
    logits[:, 1] = -np.inf
    given = to_jax(logits, "bfloat16")
    wanted, weights = chosen(logits.astype(np.float64), count, normalized, scale)
    options = {"implementation": implementation, "interpret": implementation != "xla"}
    got, values = best_experts(given, count, normalized=normalized, scale=scale, **options)
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_allclose(values, weights, rtol=0.004)
    assert (np.asarray(values) == np.asarray(to_jax(np.asarray(values), "bfloat16"), np.float32)).all()
