"""Projections of a few rows, by every implementation, against float64 NumPy."""

from functools import partial

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from kernels.lowering import on

from kvjax.conversion.quantised import BLOCKS, from_blocks, to_int4, to_int8
from kvjax.pallas_kernels import Norm, gated_projection, projection
from kvjax.pallas_kernels.op import Unsupported
from kvjax.pallas_kernels.projection import pallas_triton

EPS = 1e-3
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def draw(seed, rows, depth, outputs, dtype):
    """Inputs, a gain, and a matrix for each number of outputs."""
    random = np.random.default_rng(seed)
    x, gain = 3 * random.normal(size=(rows, depth)), random.normal(size=depth)
    matrices = [random.normal(size=(count, depth)) / depth**0.5 for count in outputs]
    return to_jax(x, dtype), Norm(to_jax(gain, dtype), EPS), [to_jax(w, dtype) for w in matrices]


def exact(x):
    return np.asarray(x, np.float64)


def normed(x, norm):
    x = exact(x)
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * (exact(norm.gain) + (norm.offset or 0))


def agree(got, expected, dtype):
    assert got.dtype == dtype
    error = np.linalg.norm(exact(got) - expected) / np.linalg.norm(expected)
    assert error <= TOLERANCE[dtype]


@pytest.fixture(params=["xla", "gpu"])
def by(request):
    """How an implementation is asked for; a Pallas kernel is interpreted."""
    return {"implementation": request.param, "interpret": request.param != "xla"}


# rows, inputs, outputs of each matrix
CASES = [
    (1, 384, (32, 16, 16)),
    (3, 256, (48, 16)),
    (8, 128, (16,)),
    (16, 640, (32,)),
    (1, 320, (32, 16)),
    (3, 320, (16,)),
]


class TestProjection:
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_is_a_product_with_every_matrix(self, by, case):
        x, _, matrices = draw(0, *case, "bfloat16")
        got = projection(x, *matrices, **by)
        for w, y in zip(matrices, got, strict=True):
            agree(y, exact(x) @ exact(w).T, "bfloat16")

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_adds_biases(self, by, case):
        """To those products that have one, and before the residual."""
        x, norm, matrices = draw(1, *case, "bfloat16")
        random = np.random.default_rng(2)
        biases = [to_jax(random.normal(size=len(w)), "bfloat16") for w in matrices]
        for given in biases, [None, *biases[1:]], [*biases[:-1], None]:
            got = projection(x, *matrices, norm=norm, biases=given, **by)
            for w, b, y in zip(matrices, given, got, strict=True):
                agree(y, normed(x, norm) @ exact(w).T + (0 if b is None else exact(b)), "bfloat16")
        residual = to_jax(random.normal(size=(len(x), len(matrices[0]))), "bfloat16")
        (got,) = projection(x, matrices[0], biases=biases[:1], residual=residual, **by)
        agree(got, exact(x) @ exact(matrices[0]).T + exact(biases[0]) + exact(residual), "bfloat16")

    @pytest.mark.parametrize("case", CASES, ids=str)
    @pytest.mark.parametrize("offset", [None, 2.0])
    def test_norms_its_inputs_first(self, by, case, offset):
        x, norm, matrices = draw(1, *case, "bfloat16")
        norm = norm._replace(offset=offset)
        got = projection(x, *matrices, norm=norm, **by)
        for w, y in zip(matrices, got, strict=True):
            agree(y, normed(x, norm) @ exact(w).T, "bfloat16")

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_adds_what_is_to_be_added(self, by, case):
        x, norm, (w, *_) = draw(2, *case, "bfloat16")
        residual = to_jax(np.random.default_rng(3).normal(size=(len(x), len(w))), jnp.bfloat16)
        for first in (None, norm):
            (got,) = projection(x, w, norm=first, residual=residual, **by)
            inputs = exact(x) if first is None else normed(x, norm)
            agree(got, exact(residual) + inputs @ exact(w).T, "bfloat16")

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_gate_goes_through_silu(self, by, case):
        x, norm, (gate, *_) = draw(4, *case, "bfloat16")
        up = to_jax(np.asarray(gate)[::-1])
        for first in (None, norm):
            inputs = exact(x) if first is None else normed(x, norm)
            a, b = inputs @ exact(gate).T, inputs @ exact(up).T
            agree(gated_projection(x, gate, up, norm=first, **by), a / (1 + np.exp(-a)) * b, "bfloat16")

    def test_products_may_be_wider_than_inputs(self, by):
        x, norm, (w,) = draw(5, 1, 256, (32,), "bfloat16")
        (got,) = projection(x, w, norm=norm, dtype=jnp.float32, **by)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, normed(x, norm) @ exact(w).T, atol=2e-2)


def test_xla_serves_any_shape_and_type():
    x, norm, matrices = draw(6, 20, 10, (7, 3), "float32")
    for w, y in zip(matrices, projection(to_jax(np.asarray(x).reshape(4, 5, 10)), *matrices, norm=norm), strict=True):
        agree(np.asarray(y).reshape(20, -1), normed(x, norm) @ exact(w).T, "float32")


@pytest.mark.parametrize(
    ("rows", "depth", "outputs", "dtype", "says"),
    [
        (17, 128, 16, "bfloat16", r"inputs have shape \(17, 128\), not \[B, D\] with up to 16 rows"),
        (1, 96, 16, "bfloat16", "96 inputs are not a multiple of 64"),
        (1, 128, 24, "bfloat16", "24\\] outputs are not multiples of 16"),
        (1, 128, 16, "float32", "not all arrays are bfloat16"),
    ],
)
def test_who_cannot_serve_says_why(rows, depth, outputs, dtype, says):
    x, _, (w,) = draw(7, rows, depth, (outputs,), dtype)
    with pytest.raises(Unsupported, match=says):
        projection(x, w, implementation="gpu", interpret=True)
    with pytest.raises(Unsupported, match=says):
        gated_projection(x, w, w, implementation="gpu", interpret=True)


def test_auto_is_xla_on_a_cpu():
    x, norm, (w,) = draw(8, 1, 128, (16,), "bfloat16")
    (got,), (xla,) = (projection(x, w, norm=norm, implementation=who) for who in ("auto", "xla"))
    np.testing.assert_array_equal(got, xla)
    with pytest.raises(Unsupported, match="this program is for cpu"):
        projection(x, w, norm=norm, implementation="gpu")


def test_gradients_pass_through():
    """Fine-tuning goes through the same blocks."""
    x, norm, (w,) = draw(9, 2, 8, (4,), "float32")
    slope = jax.jit(jax.grad(lambda w: projection(x, w, norm=norm)[0].sum()))(w)
    np.testing.assert_allclose(slope, np.broadcast_to(normed(x, norm).sum(0), (4, 8)), rtol=1e-5)


def quantised(kind, w):
    w = exact(w).astype(np.float32)
    if kind in BLOCKS:
        size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        random = np.random.default_rng(7)
        blocks = random.integers(0, 256, (len(w), w.shape[1] // size[0], size[1]), np.uint8)
        for place in {"Q3_K": (108,), "Q4_K": (0, 2), "Q6_K": (208,), "Q4_0": (0,)}[
            kind
        ]:  # factors of such blocks, no NaN among them
            factors = random.normal(scale=0.001, size=blocks.shape[:2]).astype(np.float16)
            blocks[..., place : place + 2] = factors[..., None].view(np.uint8)
        held = from_blocks(kind, blocks.reshape(len(w), -1))
    else:
        held = to_int8(w) if kind == "int8" else to_int4(w)
    return jax.tree.map(to_jax, held)


def floats(held):
    return exact(dequantized(held))


dequantized = jax.jit(lambda held: held.dequantized(jnp.float32))


class TestQuantized:
    @pytest.mark.parametrize("kind", ["int8", "int4", "Q4_0", "Q3_K", "Q4_K", "Q6_K"])
    @pytest.mark.parametrize("case", [(1, 1024, (32, 16)), (3, 1536, (16,))], ids=str)
    def test_products_are_those_of_the_numbers(self, by, case, kind):
        x, norm, matrices = draw(5, *case, "bfloat16")
        held = [quantised(kind, w) for w in matrices]
        numbers = [floats(w) for w in held]
        for first in (None, norm):
            inputs = exact(x) if first is None else normed(x, norm)
            for w, y in zip(numbers, projection(x, *held, norm=first, **by), strict=True):
                agree(y, inputs @ w.T, "bfloat16")
        residual = to_jax(np.random.default_rng(3).normal(size=(len(x), len(numbers[0]))), jnp.bfloat16)
        (got,) = projection(x, held[0], residual=residual, **by)
        agree(got, exact(residual) + exact(x) @ numbers[0].T, "bfloat16")
        up = jax.tree.map(lambda a: to_jax(np.asarray(a)[::-1]), held[0])
        a, b = normed(x, norm) @ numbers[0].T, normed(x, norm) @ numbers[0][::-1].T
        agree(gated_projection(x, held[0], up, norm=norm, **by), a / (1 + np.exp(-a)) * b, "bfloat16")

    @pytest.mark.parametrize("kind", ["int8", "int4", "Q4_0", "Q3_K", "Q4_K", "Q6_K"])
    def test_one_row_is_multiplied_in_registers(self, kind):
        x, norm, matrices = draw(8, 1, 1024, (32, 16), "bfloat16")
        held = [quantised(kind, w) for w in matrices]
        options = {"norm": norm, "residual": None, "dtype": x.dtype}
        options["sizes"] = {"outputs": 16, "inputs": 64, "warps": 4, "stages": 1, "units": 0}
        work = jax.jit(partial(pallas_triton.projection, **options, interpret=True))
        for w, y in zip(held, work(x, held), strict=True):
            agree(y, normed(x, norm) @ floats(w).T, "bfloat16")
        with on():
            traced = jax.jit(partial(pallas_triton.projection, **options)).trace(x, held)
            assert "prmt.b32" in traced.lower(lowering_platforms=("cuda",)).as_text()

    def test_kinds_may_differ(self, by):
        x, norm, matrices = draw(6, 2, 512, (32, 16, 16), "bfloat16")
        held = [quantised(kind, w) for kind, w in zip(("int4", "int4", "int8"), matrices, strict=True)]
        for w, y in zip(held, projection(x, *held, norm=norm, **by), strict=True):
            agree(y, normed(x, norm) @ floats(w).T, "bfloat16")

    def test_says_what_kernels_do_not_multiply(self):
        x, _, (w, *_) = draw(6, 1, 256, (32,), "bfloat16")
        with pytest.raises(Unsupported, match="8 groups are not a multiple of 16"):
            projection(x, quantised("int4", w), implementation="gpu", interpret=True)
        with pytest.raises(Unsupported, match="others are not"):
            projection(x, w, quantised("int8", w), implementation="gpu", interpret=True)
