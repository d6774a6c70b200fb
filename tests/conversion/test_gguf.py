"""GGUF files: every supported type and architecture, rope scaling from factor tensors, damage."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from checkpoints import HF_CONFIG, write_gguf

from kvjax.config import Linear, Llama3, LongRope, RopeConfig, Yarn
from kvjax.conversion import CheckpointError, describe, from_hf, from_state_dict, load
from kvjax.conversion.gguf_file import QUANTISATIONS, open_gguf
from kvjax.models import ModelConfig, Params

# Rows of 256 numbers, the block of K-quants.
WIDE = HF_CONFIG | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 40}

GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_local_base_freq": 5000.0,
    "final_logit_softcapping": 30.0,
}
OLMO3: dict[str, Any] = {
    "model_type": "olmo3",
    "num_hidden_layers": 4,
    "sliding_window": 16,
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}
GRANITE: dict[str, Any] = {
    "model_type": "granite",
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 16.0,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GLM4_MOE = {
    "model_type": "glm4_moe",
    "head_dim": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "n_group": 3,
    "topk_group": 2,
    "use_qk_norm": True,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "head_dim": 16,
    "sliding_window": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "phi3": {"model_type": "phi3", "sliding_window": 20},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4, "attention_bias": True},
    "granite": GRANITE,
    "mistral3": {"model_type": "ministral3", "head_dim": 8},
    "glm4": {"model_type": "glm4", "head_dim": 8, "attention_bias": True},
    "glm4moe": GLM4_MOE,
    "gpt-oss": GPT_OSS,
    "qwen3moe": {"model_type": "qwen3_moe", "head_dim": 16, **EXPERTS, "norm_topk_prob": True},
    "qwen3moe-mixed": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        **EXPERTS,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "qwen2moe": {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 64},
    "olmoe": {"model_type": "olmoe", "num_experts": 5, "num_experts_per_tok": 2},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": OLMO3,
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 3},
    "gemma3": GEMMA3,
    "gemma3-every": {key: value for key, value in GEMMA3.items() if key != "layer_types"}
    | {"num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
}
METADATA: dict[str, dict[str, Any]] = {
    "gpt-oss": {
        "gpt-oss.attention.sliding_window": 16,
        "gpt-oss.rope.scaling.type": "yarn",
        "gpt-oss.rope.scaling.factor": 4.0,
        "gpt-oss.rope.scaling.original_context_length": 32,
    },
    "phi3": {"phi3.attention.sliding_window": 20},
    "mistral3": {
        "mistral3.attention.temperature_scale": 0.1,
        "mistral3.rope.scaling.type": "yarn",
        "mistral3.rope.scaling.factor": 16.0,
        "mistral3.rope.scaling.original_context_length": 16384,
        "mistral3.rope.scaling.yarn_log_multiplier": 1.0,
    },
    "glm4moe": {
        "glm4moe.expert_shared_count": 2,
        "glm4moe.expert_weights_scale": 2.5,
        "glm4moe.expert_weights_norm": True,
        "glm4moe.expert_gating_func": 2,
        "glm4moe.expert_group_count": 3,
        "glm4moe.expert_group_used_count": 2,
    },
    "granite": {
        "granite.embedding_scale": 12.0,
        "granite.attention.scale": 0.015625,
        "granite.residual_scale": 0.22,
        "granite.logit_scale": 16.0,
    },
    "olmo3": {
        "olmo2.attention.sliding_window": 16,
        "olmo2.rope.scaling.type": "yarn",
        "olmo2.rope.scaling.factor": 4.0,
        "olmo2.rope.scaling.original_context_length": 32,
    },
    "gemma3": {
        "gemma3.attention.sliding_window": 16,
        "gemma3.attention.sliding_window_pattern": [True, False],
        "gemma3.rope.freq_base_swa": 5000.0,
        "gemma3.final_logit_softcapping": 30.0,
    },
    "gemma3-every": {
        "gemma3.attention.sliding_window": 16,
        "gemma3.rope.freq_base_swa": 5000.0,
        "gemma3.final_logit_softcapping": 30.0,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    },
}
"""Beyond what `write_gguf` writes of every model."""


def without_tokens(config: ModelConfig) -> ModelConfig:
    """Special token ids belong to the tokenizer in a GGUF file."""
    return dataclasses.replace(config, eos=(), bos=None)


def assert_equal(ours: Params, theirs: Params) -> None:
    assert ours.config == theirs.config
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(tmp_path: Path, name: str) -> None:
    config = without_tokens(from_hf(HF_CONFIG | FAMILIES[name]))
    values = write_gguf(tmp_path / "m.gguf", config, metadata=METADATA.get(name))
    assert_equal(load(tmp_path / "m.gguf"), from_state_dict(config, values))


def test_layers_that_predict_further_tokens_are_no_part_of_the_model(tmp_path: Path) -> None:
    """GLM-4.5's files store one after the model's layers."""
    config = without_tokens(from_hf(HF_CONFIG | GLM4_MOE))
    further = {f"blk.2.{name}.weight": np.ones((32, 64), np.float32) for name in ("nextn.eh_proj", "ffn_down")}
    metadata = METADATA["glm4moe"] | {"glm4moe.nextn_predict_layers": 1}
    values = write_gguf(tmp_path / "m.gguf", config, metadata=metadata, extra=further, predictors=1)
    assert_equal(load(tmp_path / "m.gguf"), from_state_dict(config, values))


def test_qwen3_vl_is_a_qwen3(tmp_path: Path) -> None:
    config = without_tokens(from_hf(HF_CONFIG | FAMILIES["qwen3"]))
    values = write_gguf(tmp_path / "m.gguf", config, architecture="qwen3vl")
    assert_equal(load(tmp_path / "m.gguf"), from_state_dict(config, values))


def test_gemma_3_without_its_optional_fields(tmp_path: Path) -> None:
    """Files of the first converters store neither pattern nor local base. That of 62 layers has another scale."""
    fields = {key: value for key, value in (HF_CONFIG | GEMMA3).items() if key not in ("layer_types", "sliding_window")}
    for layers, scalar in ((6, 8), (62, 32 / 4)):
        config = without_tokens(from_hf(fields | {"num_hidden_layers": layers, "head_dim": 8 if layers == 6 else 16}))
        write_gguf(tmp_path / "m.gguf", config, metadata={"gemma3.attention.sliding_window": 512})
        found = open_gguf(tmp_path / "m.gguf").config
        assert found.windows == tuple(None if i % 6 == 5 else 512 for i in range(layers))
        local, full = found.kinds
        assert (local.mixer.rope.theta, full.mixer.rope.theta) == (10000.0, 10000.0)
        assert local.mixer.logit_scale == full.mixer.logit_scale == scalar**-0.5
    config = dataclasses.replace(config, layers=config.layers[:2])
    write_gguf(tmp_path / "m.gguf", config, metadata={"gemma3.attention.sliding_window_pattern": [True]})
    with pytest.raises(CheckpointError, match="sliding_window_pattern has 1 entries for 2 layers"):
        open_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("texts", "named", "expected"),
    [
        (["<|endoftext|>", "<|end|>", "x"], {"eos_token_id": 0}, (0, 1)),
        (["x", "</s>", "<|end|>", "<|im_end|>"], {"eos_token_id": 3}, (3, 1, 2)),
        (["<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_text|>"], {}, (0, 1, 2, 3)),
        (["x", "y", "<|END|>", "end"], {"eos_token_id": 1, "eot_token_id": 2, "eom_token_id": 1}, (1, 2)),
        (["x"] * 300 + ["<|end|>"], {"eos_token_id": 4}, (4,)),  # beyond the model's vocabulary
        ([], {"eos_token_id": 4}, (4,)),
    ],
)
def test_end_tokens(tmp_path: Path, texts: list[str], named: dict[str, int], expected: tuple[int, ...]) -> None:
    """Those that the metadata names, then those whose text ends an answer: some files name an end that chats do not use."""
    metadata: dict[str, Any] = {f"tokenizer.ggml.{name}": token for name, token in named.items()}
    config = dataclasses.replace(without_tokens(from_hf(HF_CONFIG)), family="phi3")
    write_gguf(tmp_path / "m.gguf", config, metadata=metadata | ({"tokenizer.ggml.tokens": texts} if texts else {}))
    assert open_gguf(tmp_path / "m.gguf").config.eos == expected


@pytest.mark.parametrize(("token_type", "expected"), [(1, (0, 1)), (3, (0, 1)), (4, (0,))])
def test_a_user_defined_tag_is_no_end_token(tmp_path: Path, token_type: int, expected: tuple[int, ...]) -> None:
    """`</s>` ends answers of Llama, and strikes text out in Gemma's vocabulary."""
    tokens = {"tokens": ["<eos>", "</s>", "x"], "token_type": [3, token_type, 1], "eos_token_id": 0}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in tokens.items()}
    write_gguf(tmp_path / "m.gguf", without_tokens(from_hf(HF_CONFIG)), metadata=metadata)
    assert open_gguf(tmp_path / "m.gguf").config.eos == expected


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
    monkeypatch.setattr("kvjax.conversion.gguf_file._ELEMENTS_AT_A_TIME", 3 * 256)
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
        ("TQ2_0", {}, {}, r"tensor token_embd.weight has type TQ2_0; supported are F32, F16, BF16, Q8_0, Q4_0"),
        ("F32", {"llama.expert_count": 8}, {}, r"a mixture of 8 experts, but no layer has a ffn_gate_inp.weight"),
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
    wide = {} if kind == "F32" else {"hidden_size": 256, "intermediate_size": 256}
    write_gguf(file, without_tokens(from_hf(HF_CONFIG | wide)), kind, metadata, extra)
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


def tensor_infos(file: Path) -> dict[str, tuple[int, gguf.ReaderTensor]]:
    """Where in the file a tensor's type is, with its offset behind it, by its name."""
    tensors = gguf.GGUFReader(file).tensors
    return {t.name: (t.field.offset + sum(part.nbytes for part in t.field.parts[:4]), t) for t in tensors}


DAMAGES: dict[str, Callable[[int, gguf.ReaderTensor], tuple[int, bytes]]] = {
    "an offset is one block later": lambda at, t: (at + 4, (int(t.field.parts[5][0]) + 32).to_bytes(8, "little")),
    "an offset is that of the first": lambda at, t: (at + 4, bytes(8)),
    "a type is half as wide": lambda at, t: (at, gguf.GGMLQuantizationType.F16.to_bytes(4, "little")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_tensors_lie_one_after_the_other(tmp_path: Path, damage: str) -> None:
    """As llama.cpp expects them to; and the last one ends where the file does."""
    file = tmp_path / "m.gguf"
    write_gguf(file, without_tokens(from_hf(HF_CONFIG)))
    content, infos = file.read_bytes(), tensor_infos(file)
    describe(file)
    names = list(infos)
    for name in (names[1], names[len(names) // 2], names[-1]):
        at, new = DAMAGES[damage](*infos[name])
        file.write_bytes(content[:at] + new + content[at + len(new) :])
        with pytest.raises(CheckpointError, match=r"m.gguf: (tensor .* has offset|\d+ bytes follow tensor|.*damaged)"):
            describe(file)


def test_what_the_offsets_should_be_is_told(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, without_tokens(from_hf(HF_CONFIG)))
    content, (at, tensor) = file.read_bytes(), tensor_infos(file)["blk.0.attn_q.weight"]
    expected = int(tensor.field.parts[5][0])
    file.write_bytes(content[: at + 4] + (expected - 32).to_bytes(8, "little") + content[at + 12 :])
    with pytest.raises(
        CheckpointError, match=rf"blk.0.attn_q.weight has offset {expected - 32}, .* end at {expected} by their types"
    ):
        load(file)
    file.write_bytes(content + bytes(32))
    with pytest.raises(CheckpointError, match=r"32 bytes follow tensor blk.1.\S+, which is the last"):
        load(file)


def split(path: Path, count: int, config: ModelConfig, more: int = 0, **options: Any) -> list[Path]:
    """A model in so many files, as llama.cpp's `gguf-split` writes them: all metadata in the first. `more` tensors are counted than there are."""
    write_gguf(path / "whole.gguf", config, **options)
    whole = gguf.GGUFReader(path / "whole.gguf")
    files = [path / f"m-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
    for number, file in enumerate(files):
        writer = gguf.GGUFWriter(file, config.family)
        for key, field in whole.fields.items():
            if not number and not key.startswith("GGUF.") and key != "general.architecture":
                kinds = [gguf.GGUFValueType(kind) for kind in field.types]
                writer.add_key_value(key, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(whole.tensors) + more)
        for tensor in whole.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    (path / "whole.gguf").rename(path.with_suffix(".gguf"))
    return files


def test_split_models(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    config = without_tokens(from_hf(WIDE))
    files = split(folder, 3, config, kind="Q4_1", metadata={"tokenizer.ggml.eos_token_id": 5})
    expected = load(folder.with_suffix(".gguf"))
    assert_equal(load(files[0]), expected)
    assert_equal(load(folder), expected)
    assert describe(folder).nbytes == describe(folder.with_suffix(".gguf")).nbytes
    with pytest.raises(
        CheckpointError, match=r"00002-of-00003.gguf: this is not the first of 3 .* give m-00001-of-00003.gguf"
    ):
        load(files[1])
    renamed = files[0].rename(folder / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"renamed.gguf: .* its name should end with -00001-of-00003.gguf"):
        load(renamed)
    renamed.rename(files[0])
    swapped = files[0].rename(folder / "swapped.gguf")
    files[1].rename(files[0])
    swapped.rename(files[1])
    for file, name, own in ((files[0], 1, 2), (files[1], 2, 1), (folder, 1, 2)):
        with pytest.raises(CheckpointError, match=rf"its name says file {name} of 3, but its metadata says file {own}"):
            load(file)
    swapped = files[1].rename(folder / "swapped.gguf")
    files[0].rename(files[1])
    swapped.rename(files[0])
    last = files[2].read_bytes()
    files[2].write_bytes(files[1].read_bytes())
    with pytest.raises(CheckpointError, match=r"00003.*its metadata says file 2 of 3, but file 3 of 3 was expected"):
        load(files[0])
    at = last.index(b"output_norm.weight") if b"output_norm.weight" in last else last.index(b"blk.0.")
    files[2].write_bytes(last[: at + 4] + b"!" + last[at + 5 :])
    with pytest.raises(CheckpointError, match="missing"):
        load(files[0])
    files[2].unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 files of the model missing: m-00003-of-00003.gguf"):
        load(files[0])


def test_split_models_that_do_not_fit(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    config = without_tokens(from_hf(HF_CONFIG))
    with pytest.raises(CheckpointError, match=r"its 2 files hold 21 tensors, but split.tensors.count says 22"):
        load(split(folder, 2, config, more=1)[0])
    files = split(folder, 2, config)
    whole = gguf.GGUFReader(files[1])
    writer = gguf.GGUFWriter(files[1], "llama")
    writer.add_uint16("split.no", 1)
    writer.add_uint16("split.count", 2)
    data = {tensor.name: np.array(tensor.data) for tensor in whole.tensors}
    first = gguf.GGUFReader(files[0]).tensors[0]
    for name, value in {first.name: np.array(first.data), **data}.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=rf"duplicate tensor {first.name}, also in m-00001-of-00002.gguf"):
        load(files[0])


def test_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("this is a text file, whatever its name says")
    with pytest.raises(CheckpointError, match=r"m.gguf: truncated, damaged or not a GGUF file"):
        load(tmp_path / "m.gguf")


def test_a_directory_with_one_gguf(tmp_path: Path) -> None:
    config = without_tokens(from_hf(HF_CONFIG))
    write_gguf(tmp_path / "m.gguf", config)
    assert load(tmp_path).config == config
    write_gguf(tmp_path / "other.gguf", config)
    with pytest.raises(CheckpointError, match=r"2 GGUF models are there: m.gguf, other.gguf; give the path of one"):
        load(tmp_path)
