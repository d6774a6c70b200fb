"""Projections of a few rows, by every implementation, against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import Norm, gated_projection, projection
from kvjax.pallas_kernels.op import Unsupported

EPS = 1e-3
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def draw(seed, rows, depth, outputs, dtype):
    """Inputs, a gain, and a matrix for each number of outputs."""
    random = np.random.default_rng(seed)
    x, gain = 3 * random.normal(size=(rows, depth)), random.normal(size=depth)
    matrices = [random.normal(size=(count, depth)) / depth**0.5 for count in outputs]
    return jnp.asarray(x, dtype), Norm(jnp.asarray(gain, dtype), EPS), [jnp.asarray(w, dtype) for w in matrices]


def exact(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def normed(x, norm):
    x = exact(x)
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * exact(norm.gain)


def agree(got, expected, dtype):
    assert got.dtype == dtype
    error = np.linalg.norm(exact(got) - expected) / np.linalg.norm(expected)
    assert error <= TOLERANCE[dtype]


@pytest.fixture(params=["xla", "gpu"])
def by(request):
    """How an implementation is asked for; a Pallas kernel is interpreted."""
    return {"implementation": request.param, "interpret": request.param != "xla"}


# rows, inputs, outputs of each matrix
CASES = [(1, 384, (32, 16, 16)), (3, 256, (48, 16)), (8, 128, (16,)), (16, 640, (32,))]


class TestProjection:
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_is_a_product_with_every_matrix(self, by, case):
        x, _, matrices = draw(0, *case, "bfloat16")
        got = projection(x, *matrices, **by)
        for w, y in zip(matrices, got, strict=True):
            agree(y, exact(x) @ exact(w).T, "bfloat16")

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_norms_its_inputs_first(self, by, case):
        x, norm, matrices = draw(1, *case, "bfloat16")
        got = projection(x, *matrices, norm=norm, **by)
        for w, y in zip(matrices, got, strict=True):
            agree(y, normed(x, norm) @ exact(w).T, "bfloat16")

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_adds_what_is_to_be_added(self, by, case):
        x, norm, (w, *_) = draw(2, *case, "bfloat16")
        residual = jnp.asarray(np.random.default_rng(3).normal(size=(len(x), len(w))), jnp.bfloat16)
        for first in (None, norm):
            (got,) = projection(x, w, norm=first, residual=residual, **by)
            inputs = exact(x) if first is None else normed(x, norm)
            agree(got, exact(residual) + inputs @ exact(w).T, "bfloat16")

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_gate_goes_through_silu(self, by, case):
        x, norm, (gate, *_) = draw(4, *case, "bfloat16")
        up = jnp.flip(gate, axis=0)
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
    for w, y in zip(matrices, projection(x.reshape(4, 5, 10), *matrices, norm=norm), strict=True):
        agree(y.reshape(20, -1), normed(x, norm) @ exact(w).T, "float32")


@pytest.mark.parametrize(
    ("rows", "depth", "outputs", "dtype", "says"),
    [
        (17, 128, 16, "bfloat16", r"inputs are \(17, 128\), not up to 16 rows"),
        (1, 96, 16, "bfloat16", "96 inputs are not a multiple of 128"),
        (1, 128, 24, "bfloat16", "24\\] outputs are not multiples of 16"),
        (1, 128, 16, "float32", "not everything is bfloat16"),
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
    slope = jax.grad(lambda w: projection(x, w, norm=norm)[0].sum())(w)
    np.testing.assert_allclose(slope, np.broadcast_to(normed(x, norm).sum(0), (4, 8)), rtol=1e-5)
