"""GGUF files: every supported type and architecture, rope scaling from factor tensors, damage."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from checkpoints import HF_CONFIG, write_gguf

from kvjax.conversion import CheckpointError, describe, from_hf, from_state_dict, load
from kvjax.conversion.gguf_file import QUANTISATIONS
from kvjax.models import ModelConfig, Params
from kvjax.models.rope import Linear, Llama3, LongRope, RopeConfig, Yarn

# Rows of 256 numbers, the block of K-quants.
WIDE = HF_CONFIG | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 40}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "phi3": {"model_type": "phi3", "sliding_window": 20},
    "glm4": {"model_type": "glm4", "head_dim": 8, "attention_bias": True},
}


def without_tokens(config: ModelConfig) -> ModelConfig:
    """Special token ids belong to the tokenizer in a GGUF file."""
    return dataclasses.replace(config, eos=(), bos=None)


def assert_equal(ours: Params, theirs: Params) -> None:
    assert ours.config == theirs.config
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(tmp_path: Path, name: str) -> None:
    config = without_tokens(from_hf(HF_CONFIG | FAMILIES[name]))
    metadata = {"phi3.attention.sliding_window": 20} if name == "phi3" else {}
    values = write_gguf(tmp_path / "m.gguf", config, metadata=metadata)
    assert_equal(load(tmp_path / "m.gguf"), from_state_dict(config, values))


@pytest.mark.parametrize("kind", QUANTISATIONS)
def test_types(tmp_path: Path, kind: str) -> None:
    config = without_tokens(from_hf(WIDE))
    values = write_gguf(tmp_path / "m.gguf", config, kind)
    assert_equal(load(tmp_path / "m.gguf", dtype="float32"), from_state_dict(config, values))
    found = describe(tmp_path / "m.gguf")
    main = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(kind, kind)
    assert found.dtypes[0][0] == main
    assert found.nbytes < (tmp_path / "m.gguf").stat().st_size


def test_long_tensors_are_dequantised_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = without_tokens(from_hf(WIDE))
    values = write_gguf(tmp_path / "m.gguf", config, "Q6_K")
    monkeypatch.setattr("kvjax.conversion.gguf_file._BLOCK", 3 * 256)
    assert_equal(load(tmp_path / "m.gguf"), from_state_dict(config, values))


def test_q4_1_by_hand(tmp_path: Path) -> None:
    """32 numbers: a scale, a minimum, then 16 bytes whose low halves are the first 16 numbers."""
    config = without_tokens(from_hf(HF_CONFIG))
    write_gguf(tmp_path / "m.gguf", config, "Q4_1")
    tensor = next(t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if t.name == "token_embd.weight")
    block = bytes(tensor.data[7])
    scale, minimum = np.frombuffer(block[:4], np.float16).astype(np.float32)
    levels = [byte & 15 for byte in block[4:20]] + [byte >> 4 for byte in block[4:20]]
    expected = np.asarray(levels, np.float32) * scale + minimum
    np.testing.assert_allclose(np.asarray(load(tmp_path / "m.gguf").embed)[7], expected, rtol=1e-6)


def llama3_divisors(config: ModelConfig, factor: float) -> np.ndarray:
    """What llama.cpp's converter writes to `rope_freqs.weight` (the published formula, wavelength by wavelength)."""
    divisors = []
    for pair in range(config.rope.dim // 2):
        wavelength = 2 * np.pi * config.rope.theta ** (2 * pair / config.rope.dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.asarray(divisors, np.float32)


def test_llama3_scaling_is_recognised(tmp_path: Path) -> None:
    config = without_tokens(from_hf(HF_CONFIG | {"rope_theta": 5e5, "head_dim": 32}))
    for factor in (8.0, 32.0):
        file = tmp_path / f"{factor}.gguf"
        divisors = llama3_divisors(config, factor)
        assert len(set(divisors)) > 2, "some wavelengths lie between"
        write_gguf(file, config, extra={"rope_freqs.weight": divisors})
        assert describe(file).config.rope.scaling == Llama3(factor, 1.0, 4.0, 8192)


def test_other_divisors_are_kept_as_they_are(tmp_path: Path) -> None:
    config = without_tokens(from_hf(HF_CONFIG))
    divisors = np.asarray([1.0, 1.5, 3.0, 2.0], np.float32)
    write_gguf(tmp_path / "m.gguf", config, extra={"rope_freqs.weight": divisors})
    rope = describe(tmp_path / "m.gguf").config.rope
    plain = RopeConfig(theta=10000.0, dim=8).resolve(10)
    for length in (10, 100_000):
        scaled = rope.resolve(length)
        np.testing.assert_allclose(scaled.inv_freq, np.asarray(plain.inv_freq) / divisors, rtol=1e-6)
        assert scaled.amplitude == 1.0


@pytest.mark.parametrize(
    ("family", "metadata", "expected"),
    [
        ("llama", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, Linear(4.0)),
        (
            "qwen2",
            {
                "qwen2.rope.scaling.type": "yarn",
                "qwen2.rope.scaling.factor": 4.0,
                "qwen2.rope.scaling.original_context_length": 32,
            },
            Yarn(4.0, 32),
        ),
        (
            "llama",
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.attn_factor": 0.5,
            },
            Yarn(4.0, 32, attention_factor=0.5 * (0.1 * math.log(4.0) + 1.0)),
        ),
        ("llama", {"llama.rope.scale_linear": 8.0}, Linear(8.0)),
        ("llama", {"llama.rope.scaling.type": "none"}, None),
    ],
)
def test_scaling_from_metadata(tmp_path: Path, family: str, metadata: dict[str, Any], expected: Any) -> None:
    config = without_tokens(from_hf(HF_CONFIG | {"model_type": family}))
    write_gguf(tmp_path / "m.gguf", config, metadata=metadata)
    assert describe(tmp_path / "m.gguf").config.rope.scaling == expected


@pytest.mark.parametrize(("original", "factor"), [(32, 4.0), (80, 1.6)])
def test_longrope_from_factor_tensors(tmp_path: Path, original: int, factor: float) -> None:
    config = without_tokens(from_hf(HF_CONFIG | {"model_type": "phi3"}))
    short, long = np.asarray([1, 1.5, 2, 2.5], np.float32), np.asarray([1, 3, 5, 7], np.float32)
    write_gguf(
        tmp_path / "m.gguf",
        config,
        metadata={"phi3.rope.scaling.original_context_length": original, "phi3.rope.scaling.attn_factor": 1.25},
        extra={"rope_factors_short.weight": short, "rope_factors_long.weight": long},
    )
    expected = LongRope(tuple(short.tolist()), tuple(long.tolist()), original, factor=factor, attention_factor=1.25)
    assert describe(tmp_path / "m.gguf").config.rope.scaling == expected


@pytest.mark.parametrize(
    ("kind", "metadata", "extra", "message"),
    [
        ("Q5_0", {}, {}, r"tensor token_embd.weight has type Q5_0; supported are F32, F16, BF16, Q8_0, Q4_0"),
        ("F32", {"llama.expert_count": 8}, {}, r"a mixture of 8 experts; only dense models are supported"),
        ("F32", {"llama.rope.scaling.type": "longrope"}, {}, r"unsupported rope scaling 'longrope'"),
        (
            "F32",
            {},
            {"rope_freqs.weight": np.ones(3, np.float32)},
            r"rope_freqs.weight has 3 factors of type F32, 4 rotated pairs",
        ),
        (
            "F32",
            {},
            {"blk.0.surprise": np.ones(3, np.float32)},
            r"1 tensor that a llama model .* not have: blk.0.surprise",
        ),
        ("F32", {"llama.attention.key_length": 16}, {}, r"has shape \[32, 32\], the configuration asks for \[32, 64\]"),
    ],
)
def test_says_what_it_cannot_read(
    tmp_path: Path, kind: str, metadata: dict[str, Any], extra: dict[str, np.ndarray], message: str
) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, without_tokens(from_hf(HF_CONFIG)), kind, metadata, extra)
    with pytest.raises(CheckpointError, match=message) as raised:
        load(file)
    assert str(file) in str(raised.value)


def test_missing_and_duplicate_tensors(tmp_path: Path) -> None:
    config = without_tokens(from_hf(HF_CONFIG))
    file = tmp_path / "m.gguf"
    content = b""

    def patched(old: bytes, new: bytes) -> Path:
        assert content.count(old) == 1
        file.write_bytes(content.replace(old, new))
        return file

    write_gguf(file, config)
    content = file.read_bytes()
    with pytest.raises(CheckpointError, match=r"1 tensor missing: blk.1.ffn_up.weight"):
        load(patched(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"))
    with pytest.raises(CheckpointError, match=r"duplicated tensor with name blk.0.ffn_up.weight"):
        load(patched(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"))
    with pytest.raises(CheckpointError, match=r"unknown general.architecture 'lloma'; supported are llama, qwen2"):
        load(
            patched(
                b"general.architecture\x08\0\0\0\5\0\0\0\0\0\0\0llama",
                b"general.architecture\x08\0\0\0\5\0\0\0\0\0\0\0lloma",
            )
        )


@pytest.mark.parametrize("keep", [0, 3, 20, 200, 0.5, -1])
def test_truncated(tmp_path: Path, keep: float) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, without_tokens(from_hf(HF_CONFIG)))
    content = file.read_bytes()
    size = int(len(content) * keep) if isinstance(keep, float) else keep
    file.write_bytes(content[:size] if size >= 0 else content[:-64])
    with pytest.raises(CheckpointError, match=r"m.gguf: truncated, damaged or not a GGUF file"):
        load(file)


def test_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("this is a text file, whatever its name says")
    with pytest.raises(CheckpointError, match=r"m.gguf: truncated, damaged or not a GGUF file"):
        load(tmp_path / "m.gguf")


def test_a_directory_with_one_gguf(tmp_path: Path) -> None:
    config = without_tokens(from_hf(HF_CONFIG))
    write_gguf(tmp_path / "m.gguf", config)
    assert load(tmp_path).config == config
