"""A GGUF file: metadata, tensors (many of them quantised) and tokenizer in one."""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from kvjax.models.config import ModelConfig
from kvjax.models.rope import Linear, Llama3, LongRope, RopeConfig, RopeScaling, Yarn

from .checkpoint import Checkpoint, StoredTensor
from .errors import CheckpointError
from .gguf_tokenizer import read_tokenizer
from .hf_config import FAMILIES
from .layout import Layout, hf_layout

ARCHITECTURES: Mapping[str, gguf.MODEL_ARCH] = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "glm4": gguf.MODEL_ARCH.GLM4,
}
"""Supported values of `general.architecture`; each is also the name of the family. Mistral files say llama."""

QUANTISATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
"""Supported tensor types."""

_PLAIN = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

_BLOCK = 1 << 18
"""Elements dequantised at a time: their float32 temporaries stay within a few megabytes."""


def open_gguf(path: Path) -> Checkpoint:
    """Read the metadata of a GGUF file.

    Raises:
        CheckpointError: truncated or corrupt file, unknown architecture, unsupported tensor type or rope scaling.
    """
    try:
        reader = _Reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError, OSError) as error:
        raise CheckpointError(f"{path}: truncated, damaged or not a GGUF file ({error})") from error
    held = {tensor.name: tensor for tensor in reader.tensors}
    config = read_config(metadata, held, path)
    orders = _row_orders(config, metadata)
    return Checkpoint(
        source=path,
        format="gguf",
        config=config,
        tensors={name: _stored(path, tensor, orders) for name, tensor in held.items()},
        layout=gguf_layout(config),
        ignored=lambda name: name in _ROPE_TENSORS or (config.tied and name == "output.weight"),
        tokenizer=functools.partial(read_tokenizer, metadata, eos=config.eos, bos=config.bos, source=path),
    )


class _Reader(gguf.GGUFReader):
    """The library's reader over a plain view of its memory map: slicing numpy's `memmap` class costs twice the time."""

    @property
    def data(self) -> np.ndarray:
        return self._view

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._view = np.asarray(mapped)


_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the configuration: they hold a factor for each rotated pair."""


def gguf_layout(config: ModelConfig) -> Layout:
    """The Hugging Face layout under the names that the `gguf` library gives its tensors."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.family], config.num_layers)
    return {
        names.get_name(name, try_suffixes=(".weight", ".bias")) or name: held
        for name, held in hf_layout(config).items()
    }


def read_config(metadata: Mapping[str, Any], tensors: Mapping[str, gguf.ReaderTensor], path: Path) -> ModelConfig:
    """The configuration that metadata and the presence of tensors imply.

    Raises:
        CheckpointError: see `open_gguf`.
    """
    family_name = metadata.get("general.architecture")
    if not isinstance(family_name, str) or family_name not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: unknown general.architecture {family_name!r}; supported are {', '.join(ARCHITECTURES)}"
        )
    family = FAMILIES[family_name]

    def number(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{family_name}.{key}", default)
        if value is None:
            raise CheckpointError(f"{path}: metadata {family_name}.{key} is missing")
        return value

    if number("expert_count", 0):
        raise CheckpointError(f"{path}: a mixture of {number('expert_count')} experts; only dense models are supported")
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{path}: 1 tensor missing: token_embd.weight")
    num_heads, width, num_layers = number("attention.head_count"), number("embedding_length"), number("block_count")
    head_dim = number("attention.key_length", width // num_heads)
    dim = number("rope.dimension_count", head_dim)
    window = number("attention.sliding_window", 0) if family.windows == "all" else 0
    eos = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    try:
        return ModelConfig(
            family=family_name,
            vocab_size=int(tensors["token_embd.weight"].shape[1]),
            hidden_size=width,
            intermediate_size=number("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=number("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_position=number("context_length"),
            rope=RopeConfig(
                theta=_decimal(number("rope.freq_base", 10000.0)),
                dim=dim,
                interleaved=family.interleaved,
                scaling=_scaling(metadata, family_name, tensors, dim, path),
            ),
            norm_eps=_decimal(number("attention.layer_norm_rms_epsilon")),
            tied="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_down.bias" in tensors,
            qk_norm=family.qk_norm,
            sandwich_norms=family.sandwich_norms,
            windows=(window or None,) * num_layers,
            eos=tuple(dict.fromkeys(token for token in eos if token is not None)),
            bos=metadata.get("tokenizer.ggml.bos_token_id"),
        )
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _scaling(
    metadata: Mapping[str, Any], family: str, tensors: Mapping[str, gguf.ReaderTensor], dim: int, path: Path
) -> RopeScaling | None:
    def number(key: str, default: Any = None) -> Any:
        return metadata.get(f"{family}.rope.scaling.{key}", default)

    def channels(name: str) -> tuple[float, ...]:
        factors = np.asarray(tensors[name].data, np.float32).ravel()
        if len(factors) != dim // 2:
            raise CheckpointError(
                f"{path}: tensor {name} has {len(factors)} factors, {dim // 2} rotated pairs were expected"
            )
        return tuple(float(factor) for factor in factors)

    window = metadata.get(f"{family}.context_length", 0)
    original = number("original_context_length", window)
    if "rope_freqs.weight" in tensors:
        return _llama3(channels("rope_freqs.weight"), metadata.get(f"{family}.rope.freq_base", 10000.0), window)
    if "rope_factors_long.weight" in tensors:
        return LongRope(
            short_factor=channels("rope_factors_short.weight"),
            long_factor=channels("rope_factors_long.weight"),
            original_max_position=original,
            factor=window / original,
            attention_factor=number("attn_factor"),
        )
    old_linear = metadata.get(f"{family}.rope.scale_linear")  # before scaling had types
    factor = float(number("factor", old_linear or 1.0))
    match kind := number("type", "linear" if old_linear else "none"):
        case "none":
            return None
        case "linear":
            return Linear(factor)
        case "yarn":
            attention_factor = number("attn_factor")  # on top of YaRN's own
            return Yarn(
                factor=factor,
                original_max_position=original,
                attention_factor=attention_factor and attention_factor * (0.1 * math.log(factor) + 1.0),
                beta_fast=float(number("yarn_beta_fast", 32.0)),
                beta_slow=float(number("yarn_beta_slow", 1.0)),
            )
    raise CheckpointError(
        f"{path}: unsupported rope scaling {kind!r}; supported are none, linear, yarn and factor tensors"
    )


def _llama3(factors: tuple[float, ...], theta: float, window: int) -> RopeScaling:
    """Name the scaling behind per-channel divisors, which is all that a file says of Llama 3's.

    Meta's own constants are recognised; anything else is kept as it stands, as divisors for every length.
    """
    scaling = Llama3(max(factors), low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    plain = np.asarray(RopeConfig(theta, 2 * len(factors)).resolve(1).inv_freq, np.float32)
    scaled, _ = scaling.scale(plain, theta, window)
    if np.allclose(plain / np.asarray(factors, np.float32), scaled, rtol=1e-5, atol=0):
        return scaling
    return LongRope(factors, factors, original_max_position=window, factor=1.0, attention_factor=1.0)


def _row_orders(config: ModelConfig, metadata: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """For projections whose rows are permuted: which stored row holds each of ours.

    Llama files interleave the two halves of every query and key head, for a rotation of neighbouring channels.
    """
    if metadata["general.architecture"] != "llama":
        return {}

    def order(heads: int) -> np.ndarray:
        rows = np.arange(heads * config.head_dim)
        return rows.reshape(heads, config.head_dim // 2, 2).swapaxes(1, 2).ravel()

    orders = {"attn_q": order(config.num_heads), "attn_k": order(config.num_kv_heads)}
    return {
        f"blk.{i}.{name}.{kind}": rows
        for i in range(config.num_layers)
        for name, rows in orders.items()
        for kind in ("weight", "bias")
    }


def _stored(path: Path, tensor: gguf.ReaderTensor, orders: Mapping[str, np.ndarray]) -> StoredTensor:
    kind = tensor.tensor_type
    if kind.name not in QUANTISATIONS:
        raise CheckpointError(
            f"{path}: tensor {tensor.name} has type {kind.name}; supported are {', '.join(QUANTISATIONS)}"
        )
    shape = tuple(int(size) for size in reversed(tensor.shape))
    order, offset, nbytes = orders.get(tensor.name), int(tensor.data_offset), int(tensor.n_bytes)
    row = nbytes // shape[0]

    def decode(rows: np.ndarray) -> np.ndarray:
        if kind.name in _PLAIN:
            return rows.view(_PLAIN[kind.name])
        # What `gguf.quants.dequantize` calls for every 16 rows, here for all: a third of the time.
        return getattr(gguf.quants, kind.name).dequantize_rows(rows)

    def read(start: int, out: np.ndarray) -> None:
        # A map for this tensor alone: its pages leave memory with it.
        stored = np.memmap(path, np.uint8, mode="r", offset=offset, shape=(shape[0], row))
        step = max(1, _BLOCK // math.prod(shape[1:]))
        for begin in range(0, len(out), step):
            end = min(begin + step, len(out))
            rows = slice(start + begin, start + end) if order is None else order[start + begin : start + end]
            out[begin:end] = decode(np.asarray(stored[rows])).reshape(end - begin, *shape[1:])

    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return StoredTensor(shape, names.get(kind.name, kind.name), nbytes, path, read)


def _decimal(value: float) -> float:
    """The shortest decimal that the stored float32 stands for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
