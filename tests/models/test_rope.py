"""Rotary embeddings: what every rotation promises, and the frequencies of each context extension."""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rope_oracle

from kvjax.config import NO_ROPE, Linear, Llama3, LongRope, Rope, RopeConfig, Yarn
from kvjax.conversion import from_hf

PLAIN = RopeConfig(theta=1e4, dim=12)
ROPES = {
    "plain": PLAIN.resolve(64),
    "interleaved": dataclasses.replace(PLAIN, interleaved=True).resolve(64),
    "partial": RopeConfig(theta=1e4, dim=6).resolve(64),
    "yarn": dataclasses.replace(PLAIN, scaling=Yarn(factor=4.0, original_max_position=32)).resolve(64),
}


def vectors(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("name", ROPES)
def test_scores_depend_on_distance_alone(name: str) -> None:
    rope, q, k = ROPES[name], vectors(12), vectors(12, seed=1)

    def score(q_pos: int, k_pos: int) -> float:
        return float(rope.rotate(q, jnp.int32(q_pos)) @ rope.rotate(k, jnp.int32(k_pos)))

    assert score(7, 3) == pytest.approx(score(57, 53), abs=1e-4)
    assert abs(score(7, 3) - score(7, 6)) > 1e-2


@pytest.mark.parametrize("name", ROPES)
def test_rotation_scales_length_by_the_amplitude(name: str) -> None:
    rope, x = ROPES[name], vectors(5, 12)
    turned = 2 * len(rope.inv_freq)
    y = rope.rotate(x, jnp.arange(5, dtype=jnp.int32))
    np.testing.assert_allclose(
        jnp.linalg.norm(y[:, :turned], axis=-1),
        rope.amplitude * jnp.linalg.norm(x[:, :turned], axis=-1),
        rtol=1e-5,
    )
    np.testing.assert_array_equal(y[:, turned:], x[:, turned:])
    np.testing.assert_allclose(y[0, :turned], rope.amplitude * x[0, :turned], rtol=1e-6)


def test_interleaved_is_a_permutation_of_channels() -> None:
    x, pos = vectors(3, 12), jnp.array([0, 5, 9], jnp.int32)
    halves = jnp.concatenate([x[:, 0::2], x[:, 1::2]], axis=-1)
    y = ROPES["plain"].rotate(halves, pos)
    again = jnp.stack([y[:, :6], y[:, 6:]], axis=-1).reshape(3, 12)
    np.testing.assert_allclose(ROPES["interleaved"].rotate(x, pos), again, atol=1e-6)


def test_the_table_rotates_alike() -> None:
    x = vectors(2, 3, 8, 12)
    pos = jnp.asarray(np.random.default_rng(0).integers(0, 20, (2, 3, 8)), jnp.int32)
    rope = ROPES["yarn"]
    np.testing.assert_allclose(rope.rotate_by_table(x, pos, 20), rope.rotate(x, pos), atol=1e-6)


def test_low_precision_is_rotated_in_float32() -> None:
    x, pos = vectors(4, 12).astype(jnp.bfloat16), jnp.full((4,), 50, jnp.int32)
    y = ROPES["plain"].rotate(x, pos)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, ROPES["plain"].rotate(x.astype(jnp.float32), pos).astype(jnp.bfloat16))


def test_no_rope_changes_nothing() -> None:
    x = vectors(4, 12)
    np.testing.assert_array_equal(NO_ROPE.rotate(x, jnp.arange(4, dtype=jnp.int32)), x)


def test_plain_frequencies() -> None:
    np.testing.assert_allclose(RopeConfig(theta=100.0, dim=4).resolve(8).inv_freq, [1.0, 0.1], rtol=1e-6)


def test_linear_divides_positions() -> None:
    stretched = dataclasses.replace(PLAIN, scaling=Linear(4.0)).resolve(64)
    x = vectors(12)
    np.testing.assert_allclose(stretched.rotate(x, jnp.int32(20)), PLAIN.resolve(64).rotate(x, jnp.int32(5)), atol=1e-5)


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    config = RopeConfig(theta=5e5, dim=64)
    scaled = dataclasses.replace(config, scaling=Llama3(8.0, 1.0, 4.0, 8192)).resolve(1)
    plain = np.array(config.resolve(1).inv_freq)
    ratio = np.array(scaled.inv_freq) / plain
    wavelength = 2 * math.pi / plain
    np.testing.assert_allclose(ratio[wavelength < 8192 / 4], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[wavelength > 8192], 1 / 8, rtol=1e-6)
    between = ratio[(wavelength > 8192 / 4) & (wavelength < 8192)]
    assert len(between) > 0
    assert ((between > 1 / 8) & (between < 1)).all()


def test_longrope_changes_beyond_the_original_window() -> None:
    scaling = LongRope((1.0,) * 6, (3.0,) * 6, original_max_position=32, factor=4.0)
    config = dataclasses.replace(PLAIN, scaling=scaling)
    assert config.resolve(32).inv_freq == PLAIN.resolve(32).inv_freq
    np.testing.assert_allclose(np.array(config.resolve(33).inv_freq) * 3, PLAIN.resolve(32).inv_freq, rtol=1e-6)
    assert config.resolve(32).amplitude == config.resolve(33).amplitude == math.sqrt(1 + math.log(4) / math.log(32))


def test_resolved_ropes_compare_and_hash_by_value() -> None:
    assert PLAIN.resolve(8) == RopeConfig(theta=1e4, dim=12).resolve(99)
    assert len({PLAIN.resolve(8), PLAIN.resolve(9), Rope(())}) == 2


GOLDENS = json.loads(rope_oracle.GOLDENS.read_text())["cases"]


@pytest.mark.parametrize("name", rope_oracle.CASES)
def test_every_kind_equals_what_transformers_gave(name: str) -> None:
    """Frequencies to 2 units in the last place, the factor on cosine and sine, and a vector turned to the last position."""
    case, golden = rope_oracle.CASES[name], GOLDENS[name]
    rope = from_hf(rope_oracle.fields(case)).rope.resolve(case["length"])
    ours, theirs = (np.array(x, np.float32) for x in (rope.inv_freq, golden["inv_freq"]))
    np.testing.assert_array_max_ulp(ours, theirs, maxulp=2)
    assert rope.amplitude == pytest.approx(golden["amplitude"], rel=1e-12)
    turned = rope.rotate(jnp.asarray(rope_oracle.VECTOR), jnp.int32(case["length"] - 1))
    np.testing.assert_allclose(turned, golden["turned"], atol=5e-4)


@pytest.mark.oracle
@pytest.mark.parametrize("name", rope_oracle.CASES)
def test_transformers_still_gives_that(name: str) -> None:
    pytest.importorskip("transformers")
    theirs, golden = rope_oracle.theirs(rope_oracle.CASES[name]), GOLDENS[name]
    for field in ("inv_freq", "amplitude", "turned"):
        np.testing.assert_allclose(theirs[field], golden[field], rtol=1e-6, atol=1e-6)


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn betas": {
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn attention": {"factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 0.7},
    "yarn mscale": {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7},
    "longrope": {
        "short_factor": [1.0 + 0.01 * i for i in range(32)],
        "long_factor": [1.0 + 1.5 * i for i in range(32)],
        "original_max_position_embeddings": 4096,
        "factor": 32.0,
    },
}


@pytest.mark.oracle
@pytest.mark.parametrize("length", [4096, 4097])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_transformers(name: str, length: int) -> None:
    transformers = pytest.importorskip("transformers")
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    kind = name.split()[0]
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": kind, "rope_theta": 5e5, **SCALINGS[name]},
    )
    inv_freq, amplitude = functions[kind](config, device="cpu", seq_len=length)
    rope = from_hf(config.to_dict()).rope.resolve(length)
    np.testing.assert_array_max_ulp(np.array(rope.inv_freq, np.float32), inv_freq.numpy(), maxulp=1)
    assert rope.amplitude == pytest.approx(amplitude, rel=1e-12)


@pytest.mark.oracle
@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e6, 5e6])
def test_plain_frequencies_equal_transformers(theta: float) -> None:
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    inv_freq = modeling.LlamaRotaryEmbedding(config).inv_freq.numpy()
    np.testing.assert_array_max_ulp(np.array(RopeConfig(theta, 64).resolve(1).inv_freq, np.float32), inv_freq, maxulp=1)
