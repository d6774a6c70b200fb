"""The gated delta rule, by every implementation, against its recurrence in NumPy, token by token and in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax

from kvjax.pallas_kernels import delta_rule
from kvjax.pallas_kernels.delta_rule import reference
from kvjax.pallas_kernels.op import Unsupported

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Of norms of errors, relative."""


def draw(size, dtype, rows=2, key_heads=2, heads=4, key_dim=16, value_dim=32):
    """Unit keys that resemble one another, and memories that are not empty. The last token of the last row is padding."""
    random = np.random.default_rng(size)
    q, k = (random.normal(size=(rows, size, key_heads, key_dim)) + offset for offset in (0.0, 0.5))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = random.normal(size=(rows, size, heads, value_dim))
    log_decay, rate = -0.1 * random.exponential(size=v.shape[:3]), random.uniform(size=v.shape[:3])
    log_decay[-1, -1], rate[-1, -1] = 0.0, 0.0
    memory = random.normal(size=(rows, heads, key_dim, value_dim))
    return tuple(to_jax(x) if x is not v else to_jax(x, dtype) for x in (q, k, v, log_decay, rate, memory))


def recurrence(q, k, v, log_decay, rate, memory):
    """Outputs and memories of all rows and heads."""
    q, k, v, log_decay, rate, memory = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, rate, memory))
    q, k = (np.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    out = np.zeros(v.shape)
    for t in range(q.shape[1]):
        memory = memory * np.exp(log_decay[:, t])[..., None, None]
        missing = v[:, t] - np.einsum("bmxy,bmx->bmy", memory, k[:, t])
        memory = memory + k[:, t, ..., None] * (rate[:, t, ..., None] * missing)[..., None, :]
        out[:, t] = np.einsum("bmxy,bmx->bmy", memory, q[:, t])
    return out, memory


@pytest.mark.parametrize("size", [150, 1, 64, 65])
@pytest.mark.parametrize(
    ("implementation", "dtype"), [("xla", "float32"), ("xla", "bfloat16"), ("gpu", "bfloat16"), ("gpu", "float16")]
)
def test_tokens_follow_the_recurrence(implementation, dtype, size):
    """Of one chunk and of several, the last of which is not full."""
    given = draw(size, dtype)
    got = delta_rule(*given, implementation=implementation, interpret=implementation != "xla")
    assert got[0].dtype == given[2].dtype
    assert got[1].dtype == jnp.float32
    for one, expected in zip(got, recurrence(*given), strict=True):
        error = np.linalg.norm(np.asarray(one, np.float64) - expected) / np.linalg.norm(expected)
        assert error < TOLERANCE.get(dtype, 2e-3)


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
def test_padding_and_other_rows_change_nothing(implementation):
    """Bit for bit, as long as the padded length is the same."""
    *given, memory = draw(70, "bfloat16")
    run = partial(delta_rule, implementation=implementation, interpret=implementation != "xla")
    _, after = run(*given, memory)
    q, k, v, log_decay, rate = given
    token = (jnp.arange(70) < 69)[None, :, None, None]
    other = [jnp.where(token, x, jnp.ones((), x.dtype)).at[0].set(2.0) for x in (q, k, v)]
    _, again = run(*other, log_decay.at[0].set(-1.0), rate.at[0].set(0.3), memory)
    np.testing.assert_array_equal(after[1], again[1])


@pytest.mark.parametrize(
    ("change", "says"),
    [({"dtype": "float32"}, "values are float32"), ({"key_dim": 24}, "head dim 24 is not a power of two")],
)
def test_what_the_kernels_do_not_support(change, says):
    given = draw(3, **{"dtype": "bfloat16", **change})
    with pytest.raises(Unsupported, match=says):
        delta_rule(*given, implementation="gpu", interpret=True)


@pytest.mark.parametrize("size", [1, 2, 7, 64])
@pytest.mark.parametrize("draw", [np.ones, np.random.default_rng(0).random], ids=["equal keys", "random"])
def test_inverse_of_a_triangular_system(size, draw):
    """Also for equal keys, where powers of the matrix are as large as 1e18."""
    lower = np.tril(draw((3, size, size)), -1)
    got = reference._inverse(jnp.asarray(lower, jnp.float32), partial(jnp.einsum, precision="highest"))
    np.testing.assert_allclose(got, np.linalg.inv(lower + np.eye(size)), atol=1e-5)


def test_gradients_are_those_of_the_reference():
    """Where a kernel computes the values, since it has none of its own."""
    given = draw(5, "bfloat16", rows=1, heads=2)

    def total(implementation, *args):
        out, memory = delta_rule(*args, implementation=implementation, interpret=implementation != "xla")
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(memory)

    got, expected = (jax.grad(partial(total, name), argnums=(0, 3, 5))(*given) for name in ("gpu", "xla"))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
