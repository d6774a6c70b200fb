"""Small random checkpoints on disk, in every format that kvjax reads."""

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from kvjax.config import MLPConfig, MoEConfig
from kvjax.conversion import CheckpointError, from_hf
from kvjax.conversion.checkpoint import Checkpoint, expected_shapes
from kvjax.conversion.gguf_file import ARCHITECTURE_OF, PERMUTED, gguf_layout
from kvjax.conversion.layout import hf_layout
from kvjax.conversion.loading import open_checkpoint
from kvjax.models import ModelConfig

HF_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""A Llama of about 40 thousand parameters."""

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def default_model() -> Checkpoint:
    """The default model's file, for what needs its shape or its tokenizer and none of its weights, which take seconds to load."""
    try:
        return open_checkpoint(None)
    except (CheckpointError, OSError) as error:
        if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
            raise
        pytest.skip(f"the default model cannot be had here: {error}")


def weights(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors by Hugging Face name, norms about one."""
    rng = np.random.default_rng(seed)
    shapes = expected_shapes(config, hf_layout(config))
    return {name: (rng.normal(0, 0.1, shape) + ("norm" in name)).astype(np.float32) for name, shape in shapes.items()}


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE: two special tokens, 256 bytes, three merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll")]
    texts = ["<s>", "</s>", *alphabet, *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def write_hf(
    path: Path,
    fields: Mapping[str, Any] = HF_CONFIG,
    tensors: Mapping[str, np.ndarray] | None = None,
    files: int = 1,
    tokenizer: bool = False,
) -> dict[str, np.ndarray]:
    """Write a Hugging Face directory of `files` shards; returns its tensors."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    held = dict(weights(from_hf(fields)) if tensors is None else tensors)
    if files == 1:
        save_file(held, path / "model.safetensors")
    else:
        names = [f"model-{i:05}-of-{files:05}.safetensors" for i in range(1, files + 1)]
        for i, name in enumerate(names):
            save_file({tensor: held[tensor] for tensor in list(held)[i::files]}, path / name)
        weight_map = {tensor: names[i % files] for i, tensor in enumerate(held)}
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if tokenizer:
        byte_tokenizer().save(str(path / "tokenizer.json"))
        config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return held


def write_gguf(
    path: Path,
    config: ModelConfig,
    kind: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    seed: int = 0,
    architecture: str | None = None,
    predictors: int = 0,
) -> dict[str, np.ndarray]:
    """Write a GGUF file as llama.cpp's converter does; returns its tensors as Hugging Face names and values.

    Args:
        path: the file.
        config: the model; matrices are stored as `kind`, vectors as float32.
        kind: a tensor type. K-quants and IQ4 hold random blocks, since the `gguf` library does not quantise to them.
        metadata: more fields, under their full names.
        extra: more tensors, float32.
        seed: of the weights.
        architecture: `general.architecture`, which the family decides by default.
        predictors: number of layers after the model's, whose tensors are among `extra`.
    """
    family = config.family
    writer = gguf.GGUFWriter(path, architecture or ARCHITECTURE_OF[family])
    writer.add_block_count(config.num_layers + predictors)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    moes = [kind.mlp for kind in config.kinds if isinstance(kind.mlp, MoEConfig)]
    dense = [kind.mlp for kind in config.kinds if isinstance(kind.mlp, MLPConfig)]
    writer.add_feed_forward_length((dense or moes)[0].width)
    for moe in moes:
        writer.add_expert_count(moe.experts)
        writer.add_expert_used_count(moe.per_token)
        writer.add_expert_feed_forward_length(moe.width)
        if moe.shared:
            writer.add_expert_shared_feed_forward_length(moe.shared)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.layers[0].mixer.rope.dim)
    full = config.layers[config.compressed[0]].mixer
    writer.add_rope_freq_base(full.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    values = weights(config, seed)
    by_parameters = {held: name for name, held in gguf_layout(config).items()}
    rng = np.random.default_rng(seed + 1)
    for name, held in hf_layout(config).items():
        stored, value = by_parameters[held], values[name]
        if ARCHITECTURE_OF[family] in PERMUTED and held[0].endswith((".q", ".k", ".q_bias", ".k_bias")):
            heads = config.num_heads if held[0].split(".")[-1].startswith("q") else config.num_kv_heads
            stored_value = interleave(value, heads)
        else:
            stored_value = value + np.float32(config.norm_offset or 0.0) if stored.endswith("norm.weight") else value
        qtype = gguf.GGMLQuantizationType[kind if value.ndim == 2 else "F32"]
        if qtype.name in _HALVES:
            data = _random_blocks(rng, qtype, stored_value.shape)
        else:
            data = gguf.quants.quantize(stored_value, qtype)
        rounded = gguf.quants.dequantize(data, qtype).reshape(value.shape)
        if stored_value is value:
            values[name] = rounded
        elif stored.endswith("norm.weight"):
            values[name] = rounded - np.float32(config.norm_offset or 0.0)
        else:
            values[name] = deinterleave(rounded, heads)
        experts = moes[0].experts if held[0].endswith(("_experts", "_experts_bias")) else 0
        writer.add_tensor(stored, data.reshape(experts, -1, *data.shape[1:]) if experts else data, raw_dtype=qtype)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order of query and key rows in Llama's GGUF files (llama.cpp's `permute`)."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def deinterleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `interleave`."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


_HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Where a block has float16 numbers, of the types that the `gguf` library does not quantise to."""


def _random_blocks(rng: np.random.Generator, qtype: gguf.GGMLQuantizationType, shape: tuple[int, ...]) -> np.ndarray:
    data = rng.integers(0, 256, gguf.quants.quant_shape_to_byte_shape(shape, qtype), dtype=np.uint8)
    # The scales of a block are float16: random bytes could be infinities, so the exponents are kept small.
    size = gguf.GGML_QUANT_SIZES[qtype][1]
    blocks = data.reshape(-1, size)
    for low in _HALVES[qtype.name]:
        blocks[:, low + 1] = 0x24
    return data
