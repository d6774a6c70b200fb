"""Kernels that read and write 8-bit floats in place, compiled for a Hopper GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import DeferredRope, Factors, Float8Codes, Float8Factor, decode_attention, write_slots
from kvjax.pallas_kernels.device import hopper


@pytest.fixture(autouse=True)
def needs_a_hopper_gpu():
    if not hopper():
        pytest.skip("the kernels need a Hopper GPU")


@pytest.mark.parametrize(("batch", "slots"), [(1, 4096), (8, 32768)])
def test_the_kernel_is_attention_over_the_numbers(batch, slots):
    """Compiled, at the heads of Llama-3.1-8B with ragged rows: as attention in float32 over the same numbers."""
    kv_heads, group, dim = 8, 4, 128
    keys = jax.random.split(jax.random.key(0), 5)
    q = jax.random.normal(keys[0], (batch, kv_heads * group, dim), jnp.bfloat16)
    k, v = ((60 * jax.random.normal(key, (batch, kv_heads, slots, dim))).astype(jnp.float8_e4m3fn) for key in keys[1:3])
    factors = Factors(*(jax.random.uniform(key, (batch, kv_heads, slots), minval=0.5) / 60 for key in keys[3:]))
    lengths = jnp.linspace(slots // 3, slots, batch).astype(jnp.int32)[:, None, None]
    weight = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32) < lengths, factors.k.shape).astype(jnp.float32)

    def attend(implementation):
        options = {"scale": dim**-0.5, "factors": factors, "implementation": implementation}
        return jax.jit(lambda: decode_attention(q, k, v, weight, **options).out)()

    want = jax.jit(
        lambda: (
            decode_attention(
                q.astype(jnp.float32),
                *(x.astype(jnp.float32) * factor[..., None] for x, factor in zip((k, v), factors, strict=True)),
                weight,
                scale=dim**-0.5,
                implementation="xla",
            ).out
        )
    )()
    np.testing.assert_allclose(attend("gpu").astype(jnp.float32), want, atol=2e-2)
    np.testing.assert_allclose(attend("xla").astype(jnp.float32), want, atol=2e-2)


def test_vectors_are_coded_as_xla_does():
    """Written by the kernel, with rotated keys. A quotient may be rounded differently, so a few codes may be neighbours."""
    batch, kv_heads, slots, dim = 4, 8, 256, 128
    keys = jax.random.split(jax.random.key(0), 3)
    k, v = (3 * jax.random.normal(key, (batch, kv_heads, dim), jnp.bfloat16) for key in keys[:2])
    angle = jnp.linspace(0, 50, batch)[:, None] * jnp.logspace(0, -4, dim // 2)
    key = DeferredRope(k, jnp.cos(angle), jnp.sin(angle))
    slot = jax.random.randint(keys[2], (batch, kv_heads), 0, slots + 8)

    def written(implementation):
        arrays = [
            jnp.zeros((batch, kv_heads, slots, dim), jnp.float8_e4m3fn),
            jnp.zeros((batch, kv_heads, slots)),
        ] * 2
        values = [kind(x) for x in (key, v) for kind in (Float8Codes, Float8Factor)]
        return jax.jit(lambda: write_slots(arrays, slot, values, implementation=implementation))()

    for i, (got, want) in enumerate(zip(written("gpu"), written("xla"), strict=True)):
        got, want = (np.asarray(x.astype(jnp.float32)) for x in (got, want))
        rotated = i < 2  # rotated keys may be rounded to a neighbour in bfloat16, the largest number among them
        if i % 2:
            np.testing.assert_allclose(got, want, rtol=1e-2 if rotated else 1e-6)
            continue
        np.testing.assert_allclose(got, want, rtol=1 / 7, atol=2**-8)
        assert np.count_nonzero(got != want) < (0.1 if rotated else 0.01) * np.count_nonzero(want)
