"""The nearest key against float64, whoever computes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from jax.experimental.pallas import mosaic_gpu
from kernels.interpreter import gpu_races_found, races_found

from kvjax.pallas_kernels import nearest
from kvjax.pallas_kernels.hopper import nearest as hopper_nearest
from kvjax.pallas_kernels.op import Unsupported

IMPLEMENTATIONS = ["xla", "tpu", "gpu"]


def compute(implementation, *args):
    work = functools.partial(nearest, implementation=implementation, interpret=implementation != "xla")
    out = jax.device_get(jax.jit(work)(*args))
    assert implementation != "tpu" or not races_found()
    return out


def draw(seed, dtype, groups, queries, keys, dim, grid=False):
    """Queries, keys and biases; on a grid so coarse that many scores are equal, and exact in any order of summing."""
    random = np.random.default_rng(seed)
    x, y, bias = (random.normal(size=shape) for shape in ((groups, queries, dim), (groups, keys, dim), (groups, keys)))
    if grid:
        x, y, bias = (np.round(2 * part) / 2 for part in (x * (random.random(x.shape) < 0.05), y, bias))
    return to_jax(x, dtype), to_jax(y, dtype), to_jax(bias, jnp.float32)


def check(out, x, y, bias=None, exact=False):
    """The best score, from the first key that has it; where scores are not exact, from one as good up to rounding."""
    out, x, y = jax.device_get(out), np.asarray(x, np.float64), np.asarray(y, np.float64)
    bias = None if bias is None else np.asarray(bias, np.float64)
    forbidden = np.zeros(y.shape[:-1], bool) if bias is None else bias == -np.inf
    for group in np.ndindex(x.shape[:-2]):
        scores = x[group] @ np.where(forbidden[group][:, None], 0, y[group]).T
        if bias is not None:
            scores += bias[group]
        best, index = scores.max(axis=-1), out.place[group]
        if forbidden[group].all():
            assert set(index.tolist()) == {0}
            assert set(out.score[group].tolist()) == {-np.inf}
            continue
        chosen = np.take_along_axis(scores, index[:, None], axis=-1)[:, 0]
        np.testing.assert_allclose(out.score[group], best, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(chosen, best, rtol=1e-5, atol=1e-5)
        if exact:
            assert index.tolist() == scores.argmax(axis=-1).tolist()


def forbid(y, bias, allowed):
    """Keys with NaN, and biases, where they may not be chosen."""
    y, bias = np.array(y), np.array(bias)
    y[~allowed], bias[~allowed] = np.nan, -np.inf
    return to_jax(y), to_jax(bias)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestNearest:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize(("queries", "keys", "dim"), [(40, 70, 64), (150, 5, 128), (1, 300, 64)])
    def test_scores_and_places(self, implementation, queries, keys, dim, dtype):
        """Blocks that are not full; fewer keys than a block; one query."""
        x, y, bias = draw(queries, dtype, 3, queries, keys, dim)
        bias = bias if queries == 40 else None
        check(compute(implementation, x, y, bias), x, y, bias)

    def test_the_first_of_equals(self, implementation):
        """In groups along two axes."""
        x, y, bias = (
            to_jax(np.asarray(part).reshape(2, 3, *part.shape[1:]))
            for part in draw(1, "float32", 6, 60, 140, 64, grid=True)
        )
        check(compute(implementation, x, y, bias), x, y, bias, exact=True)

    def test_what_is_forbidden_is_not_even_seen(self, implementation):
        """NaN in keys that may not be chosen: some of a group, most of them, all but the last, all."""
        x, y, bias = draw(3, "bfloat16", 4, 24, 140, 64)
        open_ = np.random.default_rng(3).random((4, 140)) < np.asarray([0.5, 0.05, 0, 0])[:, None]
        open_[2, -1] = True
        y, bias = forbid(y, bias, open_)
        check(compute(implementation, x, y, bias), x, y, bias)


def test_rounding_does_not_decide_in_xla():
    """Keys that are there twice, the second time a little longer or shorter: the first are taken. Kernels add alike in any batch."""
    x, y, _ = draw(2, "float32", 2, 60, 70, 64)
    longer = 1 + 1e-6 * np.random.default_rng(0).standard_normal((2, 70, 1)).astype(np.float32)
    twice = to_jax(np.concatenate([y, np.asarray(y) * longer], axis=1))
    check(nearest(x, twice, implementation="xla"), x, y, exact=True)


def test_auto_is_xla_on_a_cpu():
    x, y, bias = draw(5, "float32", 2, 24, 40, 48)
    auto, xla = (compute(implementation, x, y, bias) for implementation in ("auto", "xla"))
    assert all((a == b).all() for a, b in zip(auto, xla, strict=True))


@pytest.mark.parametrize(
    ("dtypes", "dim", "implementation", "reason"),
    [
        (("float32", "float32"), 48, "gpu", "head dim 48 is not a power of two"),
        (("float32", "bfloat16"), 64, "gpu", "queries are float32 and keys bfloat16"),
        (("float32", "bfloat16"), 64, "tpu", "queries are float32 and keys bfloat16"),
    ],
)
def test_refusals(dtypes, dim, implementation, reason):
    x, y = (to_jax(np.zeros((1, 16, dim)), dtype) for dtype in dtypes)
    with pytest.raises(Unsupported, match=reason):
        nearest(x, y, implementation=implementation, interpret=True)


@pytest.mark.parametrize("implementation", ["gpu", "tpu"])
def test_not_on_this_device(implementation):
    x = to_jax(np.zeros((1, 16, 64)), jnp.float32)
    with pytest.raises(Unsupported, match=f"for cpu, not for a {implementation}"):
        nearest(x, x, implementation=implementation)


@pytest.mark.skipif(
    not hasattr(mosaic_gpu, "force_gpu_interpret_mode"), reason="this JAX does not interpret Mosaic GPU"
)
@pytest.mark.parametrize("biased", [False, True])
def test_hopper(biased):
    """Its body, interpreted: several blocks of queries and of keys, more of them than are under way at once; NaN where forbidden."""
    x, y, bias = draw(6, "bfloat16", 2, 128, 256, 64)
    allowed = np.random.default_rng(6).random((2, 256)) < np.asarray([0.7, 0])[:, None]
    if biased:
        y, bias = forbid(y, bias, allowed)
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    interpreted = mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams(detect_races=True))
    with interpreted, jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        given = (x, y, bias) if biased else (x, y)
        out = jax.block_until_ready(hopper_nearest.nearest(*given, sizes={"queries": 64, "keys": 64, "stages": 2}))
    assert not gpu_races_found()
    check(out, *given)


def test_hopper_serves(monkeypatch):
    """What is measured to be faster than the Triton kernel, and without that all that it can."""
    x = to_jax(np.zeros((1, 128, 64)), jnp.bfloat16)
    assert hopper_nearest.unsupported_reason(x, x) == "this program is not for a Hopper GPU"
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        assert hopper_nearest.unsupported_reason(x, x) == "the Triton kernel was measured to be as fast"
        tuned = to_jax(np.zeros((512, 1024, 128), jnp.bfloat16))
        assert hopper_nearest.unsupported_reason(tuned, tuned) is None
        monkeypatch.setattr(hopper_nearest, "triton_unsupported", lambda: "there is none")
        assert hopper_nearest.unsupported_reason(x, x) is None
        assert str(hopper_nearest.unsupported_reason(to_jax(np.asarray(x)[:, :100]), x)).startswith(
            "100 queries and 128 keys are not whole blocks"
        )
        narrow = to_jax(np.asarray(x)[..., :32])
        assert str(hopper_nearest.unsupported_reason(narrow, narrow)).startswith("head dim 32")
        assert str(hopper_nearest.unsupported_reason(to_jax(x, jnp.float32), x)).startswith("queries are float32")
