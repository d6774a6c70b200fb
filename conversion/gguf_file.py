"""Opens a GGUF file, which contains metadata, tensors (often quantised) and the tokenizer.

`loading.py` calls `find_gguf` and `open_gguf`. `tokenizer_source.py` calls `open_gguf` for the tokenizer only.
"""

import dataclasses
import functools
import itertools
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import ml_dtypes
import numpy as np
from pydantic import Field

from kvjax.config import (
    AttentionConfig,
    DeltaNetConfig,
    LayerConfig,
    Linear,
    Llama3,
    LongRope,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    RopeScaling,
    Yarn,
)
from kvjax.pallas_kernels import QuantizedMatrix

from .checkpoint import Checkpoint, StoredTensor
from .delta_nets import grouped_order
from .errors import CheckpointError, listed, shortened, told
from .gguf_tokenizer import ends, read_tokenizer
from .hf_config import FAMILIES, Family
from .layout import Layout, hf_layout
from .mapped import mapped
from .quantised import BLOCKS, blocks_shape, from_blocks
from .refused import why
from .schema import Id, Layers, Positive, Size, Strict, checked_under
from .text_files import present

ARCHITECTURES: Mapping[str, gguf.MODEL_ARCH] = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3vl": gguf.MODEL_ARCH.QWEN3VL,
    "qwen2moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen35": gguf.MODEL_ARCH.QWEN35,
    "qwen35moe": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3next": gguf.MODEL_ARCH.QWEN3NEXT,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "mistral3": gguf.MODEL_ARCH.MISTRAL3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "glm4moe": gguf.MODEL_ARCH.GLM4_MOE,
    "gpt-oss": gguf.MODEL_ARCH.GPT_OSS,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}
"""Supported values of `general.architecture`. Files of Mistral models before Mistral Small 3 use "llama".

To add a family, add an entry here and in `hf_config.FAMILIES`. If it splits text in a new way, add that to
`gguf_tokenizer.py`.
"""

FAMILY_OF: Mapping[str, str] = {name: name for name in ARCHITECTURES} | {
    "gemma3": "gemma3_text",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "mistral3": "ministral3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "qwen3vl": "qwen3",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3next": "qwen3_next",
}
"""Families, by `general.architecture`. A "llama" file with experts is of the family "mixtral", an "olmo2" file with a window of
"olmo3"."""

ARCHITECTURE_OF = {family: name for name, family in FAMILY_OF.items()} | {
    "mixtral": "llama",
    "olmo3": "olmo2",
    "qwen3": "qwen3",
}

PERMUTED = frozenset({"granite", "llama", "mistral3", "smollm3"})
"""Architectures whose files reorder the rows of query and key projections, see `_row_order`."""

_TILED = frozenset({"qwen35", "qwen35moe"})
"""Architectures whose files have the value heads of gated delta nets in another order, see `_tiled`."""

_NORMALISES = {
    "qwen2_moe": False,
    "qwen3_moe": True,
    "qwen3_5_moe_text": True,
    "qwen3_next": True,
    "mixtral": True,
    "olmoe": False,
    "gpt_oss": True,
}
"""Whether weights of a token's experts are divided by their sum. Files of these families do not say, and llama.cpp has the same
table.
"""

_LOCAL_THETA = {"gemma3_text": 10000.0}
"""Default of `rope.freq_base_swa`, which is that of full attention in other families. llama.cpp has the same."""

_UNROUNDED = frozenset({"gpt_oss"})
"""Families whose YaRN does not round the bounds of its ramp. Files do not say, and llama.cpp rounds them in every family."""

_EXPERT_TENSORS = {
    "router": "ffn_gate_inp.weight",
    "router_bias": "ffn_gate_inp.bias",
    "gate_experts_bias": "ffn_gate_exps.bias",
    "up_experts_bias": "ffn_up_exps.bias",
    "down_experts_bias": "ffn_down_exps.bias",
    "choice_bias": "exp_probs_b.bias",
    "gate_experts": "ffn_gate_exps.weight",
    "up_experts": "ffn_up_exps.weight",
    "down_experts": "ffn_down_exps.weight",
    "shared.gate": "ffn_gate_shexp.weight",
    "shared.up": "ffn_up_shexp.weight",
    "shared.down": "ffn_down_shexp.weight",
    "shared_gate": "ffn_gate_inp_shexp.weight",
}
"""Tensors of a mixture of experts in a layer, by parameter."""

_DELTA_TENSORS = {
    "q": "attn_qkv.weight",
    "z": "attn_gate.weight",
    "alpha": "ssm_alpha.weight",
    "beta": "ssm_beta.weight",
    "q_conv": "ssm_conv1d.weight",
    "log_decay": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "out_norm": "ssm_norm.weight",
    "o": "ssm_out.weight",
}
"""Tensors of a gated delta net, by their first parameter."""

_SCALE_OF_WIDE = 62
"""Number of layers of the Gemma 3 model whose attention scale is (D / N) ** -0.5, and not that of its head dim.

Files do not store the scale. llama.cpp decides it by the number of layers, too.
"""

QUANTISATIONS = ("F32", "F16", "BF16", *BLOCKS)
"""Supported tensor types."""

_PLAIN = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

_ELEMENTS_AT_A_TIME = 1 << 18
"""Elements dequantised at a time, so that their float32 temporaries take only a few megabytes."""


def open_gguf(path: Path) -> Checkpoint:
    """Read the headers of a GGUF file, or of all files of a split model, as a `Checkpoint`.

    Tensors are read when the checkpoint is loaded.

    Args:
        path: the file; of a split model, its first file.

    Raises:
        CheckpointError: the file is truncated or damaged, or its architecture, a tensor type or its rope scaling is not
            supported. Also raised if files of a split model are missing or of another model, or if `path` is not the
            first of them.
    """
    metadata, tensors = _read(path)
    files = dict.fromkeys(tensors, path)
    split = checked_under(_Split, metadata, "split.", path)
    for number, file in enumerate(_other_files(path, split), 2):
        more, more_tensors = _read(file)
        part = checked_under(_Split, more, "split.", file)
        if (part.no, part.count) != (number - 1, split.count):
            raise CheckpointError(
                f"{file}: its metadata says file {part.no + 1} of {part.count}, but file {number} of {split.count} was expected. "
                "The files are of different models, or were renamed"
            )
        if twice := tensors.keys() & more_tensors.keys():
            raise CheckpointError(f"{file}: duplicate tensor {min(twice)}, also in {files[min(twice)].name}")
        tensors |= more_tensors
        files |= dict.fromkeys(more_tensors, file)
    if split.count > 1 and split.num_tensors not in (None, len(tensors)):
        raise CheckpointError(
            f"{path}: its {split.count} files hold {len(tensors)} tensors, but split.tensors.count says {split.num_tensors}"
        )
    config = read_config(metadata, tensors, path)
    architecture = metadata["general.architecture"]
    if predictors := _predictors(metadata, path):
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(predictors)}
    return Checkpoint(
        source=path,
        format="gguf",
        config=config,
        tensors={name: _stored(files[name], tensor, config, architecture) for name, tensor in tensors.items()},
        layout_of=gguf_layout,
        ignored=lambda name: name in _ROPE_TENSORS,
        tokenizer=functools.partial(
            read_tokenizer, metadata, eos=config.eos, bos=config.bos, source=path, vocab_size=config.vocab_size
        ),
    )


def _predictors(metadata: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """Prefixes of the tensors of the last layers that predict tokens after the next one. They are no part of the model."""
    fields = checked_under(_Metadata, metadata, f"{metadata['general.architecture']}.", path)
    return tuple(f"blk.{i}." for i in range(fields.num_layers, fields.block_count))


def find_gguf(directory: Path) -> Path | None:
    """Find the GGUF model in a directory: its only GGUF file, or the first file of a split model. None if there is no
    GGUF file.

    Raises:
        CheckpointError: there are several models.
    """
    found = [file for file in sorted(directory.glob("*.gguf")) if _number(file) in (None, 1)]
    if len(found) > 1:
        raise CheckpointError(
            f"{directory}: {len(found)} GGUF models are there: {listed(file.name for file in found)}; give the path of one of them"
        )
    return next(iter(found), None)


_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Names that llama.cpp gives to the files of a split model."""


class _Split(Strict):
    """The fields under `split.` that are read. `no` counts files from 0."""

    no: int = Field(0, ge=0, lt=2**16)
    count: int = Field(0, ge=0, lt=2**16)
    num_tensors: int | None = Field(None, alias="tensors.count")


def _number(path: Path) -> int | None:
    """Number of a split model's file in its name, counted from 1 (unlike `_Split.no`); None for any other name."""
    match = _SPLIT_NAME.fullmatch(path.name)
    return None if match is None else int(match[2])


def _other_files(path: Path, split: _Split) -> list[Path]:
    """The other files of a split model, given its first file. Empty if the model is not split.

    Raises:
        CheckpointError: `path` is not the first file or is not named as one, or other files are missing.
    """
    if split.count < 2:
        return []
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != split.count:
        raise CheckpointError(
            f"{path}: this is one of {split.count} files of a split model, so its name should end with -00001-of-{split.count:05}.gguf"
        )
    if match[2] != f"{split.no + 1:05}":
        raise CheckpointError(
            f"{path}: its name says file {int(match[2])} of {split.count}, but its metadata says file {split.no + 1}. "
            f"Rename the files by their metadata."
        )
    first, *others = (path.with_name(f"{match[1]}-{i:05}-of-{match[3]}.gguf") for i in range(1, split.count + 1))
    if path != first:
        raise CheckpointError(
            f"{path}: this is not the first of {split.count} files of a split model; give {first.name}"
        )
    absent = [file.name for file in others if not present(file)]
    if absent:
        raise CheckpointError(f"{path}: {len(absent)} of {split.count} files of the model missing: {listed(absent)}")
    return others


def _read(path: Path) -> tuple[dict[str, Any], dict[str, gguf.ReaderTensor]]:
    """Read metadata and tensors of one file."""
    present(path)
    try:
        with np.errstate(all="raise"):  # sizes that overflow raise
            reader = _Reader(path)
            metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, LookupError, ArithmeticError, MemoryError, RecursionError, TypeError, OSError) as error:
        raise CheckpointError(f"{path}: truncated, damaged or not a GGUF file ({told(error)})") from error
    if reader.byte_order == "S":
        raise CheckpointError(f"{path}: written in the other byte order, which is not supported")
    _check_offsets(path, reader)
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _check_offsets(path: Path, reader: gguf.GGUFReader) -> None:
    """Raise unless tensors follow one another, each at the next aligned byte, up to the end of the file.

    A changed type, shape or offset is then an error instead of wrong weights. llama.cpp checks the same, except for the
    end.
    """
    start, alignment = int(reader.data_offset), int(reader.alignment)
    expected = 0
    for tensor in reader.tensors:
        if not len(tensor.shape) or 0 in tensor.shape:
            raise CheckpointError(
                f"{path}: tensor {tensor.name} has shape {tensor.shape.tolist()}, which has no elements"
            )
        offset = int(tensor.data_offset) - start
        if offset != expected:
            raise CheckpointError(
                f"{path}: tensor {tensor.name} has offset {offset}, but the tensors before it end at {expected} by their types and shapes; "
                "the file is damaged"
            )
        expected = -(-(offset + int(tensor.n_bytes)) // alignment) * alignment
    if reader.tensors and (left := len(reader.data) - start - expected) > 0:
        raise CheckpointError(
            f"{path}: {left} bytes follow tensor {reader.tensors[-1].name}, which is the last by its type and shape; the file is damaged"
        )


class _Reader(gguf.GGUFReader):
    """The library's reader, with checks that the lengths in a file stay within the file.

    It reads a plain view of the memory map, because slicing numpy's `memmap` class takes twice as long.

    It overrides private methods of `gguf`, `_get` and `_get_field_parts`. Check it after an upgrade of `gguf`.
    """

    @property
    def data(self) -> np.ndarray:
        return self._view

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._view = np.asarray(mapped)

    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> np.ndarray:
        if offset + int(count) * np.dtype(dtype).itemsize > len(self._view):
            raise ValueError(f"{count} × {np.dtype(dtype).name} at byte {offset} are beyond the file's end")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: Any, raw_type: Any) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type == gguf.GGUFValueType.ARRAY:
            kind, count = self._get(orig_offs, np.uint32)[0], int(self._get(orig_offs + 4, np.uint64)[0])
            if kind == gguf.GGUFValueType.ARRAY:
                raise ValueError(f"an array of arrays at byte {orig_offs} is not supported")
            if count > min(_MOST_ELEMENTS, len(self._view)):
                raise ValueError(
                    f"an array at byte {orig_offs} has {count} elements by its header, which is more than the file can contain"
                )
            if count and kind == gguf.GGUFValueType.STRING and self.byte_order == "I":
                size, texts = self._strings(orig_offs + 12, count)
                return size + 12, texts, list(range(count)), [gguf.GGUFValueType(raw_type), gguf.GGUFValueType.STRING]
            if count and self.byte_order == "I" and (number := self.gguf_scalar_to_np.get(gguf.GGUFValueType(kind))):
                numbers = self._get(orig_offs + 12, number, count)
                return numbers.nbytes + 12, [numbers], [0], [gguf.GGUFValueType(x) for x in (raw_type, kind)]
        return super()._get_field_parts(orig_offs, raw_type)

    def _strings(self, start: Any, count: int) -> tuple[int, list[np.ndarray]]:
        """Read an array of strings; returns its size in bytes and the strings.

        Vocabularies have a hundred thousand strings, and the library takes 20 µs for each.
        """
        texts, at, end, view = [], int(start), len(self._view), memoryview(self._view)  # pyright: ignore[reportArgumentType]
        for _ in range(count):
            begin = at + 8
            if begin > end:
                raise ValueError(f"1 × uint64 at byte {at} is beyond the file's end")
            at = begin + _LENGTH.unpack_from(view, at)[0]
            if at > end:
                raise ValueError(f"{at - begin} × uint8 at byte {begin} are beyond the file's end")
            texts.append(self._view[begin:at])
        return at - int(start), texts


_MOST_ELEMENTS = 1 << 22
"""Limit on the elements of a metadata array, 16 times the largest vocabularies."""

_LENGTH = struct.Struct("=Q")
"""Length of a string, stored before it."""


_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the configuration: a factor for each rotated pair."""


def gguf_layout(config: ModelConfig) -> Layout:
    """The Hugging Face layout, with the `gguf` library's tensor names."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[ARCHITECTURE_OF[config.family]], config.num_layers)

    def name_of(name: str, parameters: tuple[str, ...]) -> str:
        if ".linear_attn." in name:
            _, layer, _, own = parameters[0].split(".")
            grouped = own == "beta" and len(parameters) == 2
            return f"blk.{layer}.{'ssm_ba.weight' if grouped else _DELTA_TENSORS[own]}"
        if name.endswith(".sinks"):
            name += ".weight"
        layer, _, own = parameters[0].partition(".mlp.")
        if own in _EXPERT_TENSORS:
            return f"blk.{layer.removeprefix('layers.')}.{_EXPERT_TENSORS[own]}"
        return names.get_name(name, try_suffixes=(".weight", ".bias")) or name

    layout: dict[str, tuple[str, ...]] = {}
    for name, parameters in hf_layout(config).items():
        # Files have the gate apart.
        parts = (parameters[:3], parameters[3:]) if name.endswith("in_proj_qkvz.weight") else (parameters,)
        layout |= {name_of(name, each): each for each in parts}
    return layout


def _block(name: str) -> int:
    """Number of the layer that a tensor belongs to; -1 for other tensors."""
    match = re.match(r"blk\.(\d{1,9})\.", name)
    return -1 if match is None else int(match[1])


class _Metadata(Strict):
    """The metadata fields that are read, under the name of the architecture."""

    expert_count: int = Field(0, ge=0, lt=2**16)
    experts_used: Size | None = Field(None, alias="expert_used_count")
    expert_width: Size | None = Field(None, alias="expert_feed_forward_length")
    shared_width: Size | None = Field(None, alias="expert_shared_feed_forward_length")
    shared_count: int = Field(0, alias="expert_shared_count", ge=0, lt=2**16)
    experts_scale: Positive = Field(1.0, alias="expert_weights_scale")
    experts_normalized: bool = Field(False, alias="expert_weights_norm")
    expert_groups: Size = Field(1, alias="expert_group_count")
    expert_groups_used: Size = Field(1, alias="expert_group_used_count")
    gating: int | None = Field(None, alias="expert_gating_func")
    embedding_length: Size
    block_count: Layers
    predictors: int = Field(0, alias="nextn_predict_layers", ge=0)
    feed_forward_length: Size | None = None
    context_length: Size
    attention_every: Size | None = Field(None, alias="full_attention_interval")
    recurrent: list[bool] | None = Field(None, alias="attention.recurrent_layers")
    delta_conv: Size | None = Field(None, alias="ssm.conv_kernel")
    delta_key_dim: Size | None = Field(None, alias="ssm.state_size")
    delta_key_heads: Size | None = Field(None, alias="ssm.group_count")
    delta_value_heads: Size | None = Field(None, alias="ssm.time_step_rank")
    delta_value_width: Size | None = Field(None, alias="ssm.inner_size")
    num_heads: Size = Field(alias="attention.head_count")
    num_kv_heads: Size | None = Field(None, alias="attention.head_count_kv")
    head_dim: Size | None = Field(None, alias="attention.key_length")
    norm_eps: Positive = Field(alias="attention.layer_norm_rms_epsilon")
    window: int = Field(0, alias="attention.sliding_window", ge=0, lt=2**31)
    window_pattern: Size | list[bool] | None = Field(None, alias="attention.sliding_window_pattern")
    local_theta: Positive | None = Field(None, alias="rope.freq_base_swa")
    logit_cap: Positive | None = Field(None, alias="final_logit_softcapping")
    embed_scale: Positive = Field(1.0, alias="embedding_scale")
    attention_scale: Positive | None = Field(None, alias="attention.scale")
    residual_scale: Positive = 1.0
    logit_scale: Positive = 1.0
    finetuned: bool = Field(True, alias="rope.scaling.finetuned")
    rope_dim: Size | None = Field(None, alias="rope.dimension_count")
    theta: Positive = Field(10000.0, alias="rope.freq_base")
    scaling: str | None = Field(None, alias="rope.scaling.type")
    factor: Positive | None = Field(None, alias="rope.scaling.factor")
    scale_linear: Positive | None = Field(None, alias="rope.scale_linear")  # from files before scaling types existed
    original_window: Size | None = Field(None, alias="rope.scaling.original_context_length")
    attn_factor: Positive | None = Field(None, alias="rope.scaling.attn_factor")
    log_multiplier: float = Field(0.0, alias="rope.scaling.yarn_log_multiplier", ge=0)
    query_growth: float = Field(0.0, alias="attention.temperature_scale", ge=0)
    beta_fast: Positive = Field(32.0, alias="rope.scaling.yarn_beta_fast")
    beta_slow: Positive = Field(1.0, alias="rope.scaling.yarn_beta_slow")

    @property
    def num_layers(self) -> int:
        """Number of layers without those at the end that predict tokens after the next one."""
        return max(self.block_count - self.predictors, 1)


class _Tokens(Strict):
    """The special tokens among the tokenizer's fields."""

    bos: Id | None = Field(None, alias="bos_token_id")
    eos: Id | None = Field(None, alias="eos_token_id")
    eot: Id | None = Field(None, alias="eot_token_id")
    eom: Id | None = Field(None, alias="eom_token_id")


def read_config(metadata: Mapping[str, Any], tensors: Mapping[str, gguf.ReaderTensor], path: Path) -> ModelConfig:
    """Derive the configuration from the metadata and from which tensors exist.

    Raises:
        CheckpointError: see `open_gguf`.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: unknown general.architecture {shortened(name)}; supported are {', '.join(ARCHITECTURES)}{why(name)}"
        )
    fields = checked_under(_Metadata, metadata, f"{name}.", path)
    tokens = checked_under(_Tokens, metadata, "tokenizer.ggml.", path)
    family_name = "mixtral" if name == "llama" and fields.expert_count else FAMILY_OF[name]
    if name == "olmo2" and fields.window:
        family_name = "olmo3"
    family = FAMILIES[family_name]
    if fields.expert_count and family.experts is None:
        raise CheckpointError(
            f"{path}: a mixture of {fields.expert_count} experts of architecture {name} is not supported"
        )
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path}: tensor missing, or not a matrix: token_embd.weight")
    vocab_size = int(embedding.shape[1])
    if family.multipliers and not fields.finetuned:
        raise CheckpointError(
            f"{path}: rope.scaling.finetuned is false, which means no rotary embedding; a {family_name} model needs one"
        )

    def multiplier(value: float) -> float:
        return _decimal(value) if family.multipliers else 1.0

    named = (token for token in (tokens.eos, tokens.eot, tokens.eom) if token is not None)
    texts, types = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    typed = itertools.zip_longest(texts if isinstance(texts, list) else (), types if isinstance(types, list) else ())
    eos = (*named, *(i for i, token in enumerate(itertools.islice(typed, vocab_size)) if ends(*token)))
    try:
        return ModelConfig(
            family=family_name,
            vocab_size=vocab_size,
            hidden_size=fields.embedding_length,
            layers=_layers(fields, family_name, tensors, path),
            max_position=fields.context_length,
            norm_eps=_decimal(fields.norm_eps),
            norm_offset=family.norm_offset,
            tied="output.weight" not in tensors,
            embed_scale=fields.embedding_length**0.5 if family.scales_embedding else multiplier(fields.embed_scale),
            residual_scale=multiplier(fields.residual_scale),
            logit_divisor=multiplier(fields.logit_scale),
            logit_cap=None if fields.logit_cap is None else _decimal(fields.logit_cap),
            eos=tuple(dict.fromkeys(eos)),
            bos=tokens.bos,
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _layers(
    fields: _Metadata, family_name: str, tensors: Mapping[str, gguf.ReaderTensor], path: Path
) -> tuple[LayerConfig, ...]:
    """Derive the layers."""
    family = FAMILIES[family_name]
    recurrent = _recurrent(fields, family, path)
    dense = fields.feed_forward_length or fields.expert_width
    if dense is None:
        raise CheckpointError(f"{path}: neither feed_forward_length nor expert_feed_forward_length is there")
    head_dim = fields.head_dim or fields.embedding_length // fields.num_heads
    dim = fields.rope_dim or head_dim
    rope = RopeConfig(
        theta=_decimal(fields.theta),
        dim=dim,
        interleaved=family.interleaved,
        scaling=_scaling(fields, tensors, dim, path),
    )
    if isinstance(rope.scaling, Yarn) and family_name in _UNROUNDED:
        rope = dataclasses.replace(rope, scaling=dataclasses.replace(rope.scaling, truncate=False))
    mixer = AttentionConfig(
        num_heads=fields.num_heads,
        num_kv_heads=fields.num_kv_heads or fields.num_heads,
        head_dim=head_dim,
        rope=rope,
        qkv_bias=f"blk.{recurrent.index(False)}.attn_q.bias" in tensors,
        output_bias=f"blk.{recurrent.index(False)}.attn_output.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors if family.qk_norm is None else family.qk_norm,
        joint_qk_norm=family.joint_qk_norm,
        gated=family.gated,
        sinks=family.sinks,
    )
    if family.query_scalar is not None and fields.num_layers == _SCALE_OF_WIDE:
        mixer = dataclasses.replace(mixer, scale=(fields.embedding_length / fields.num_heads) ** -0.5)
    if family.grows_queries and fields.query_growth:
        period = fields.original_window or fields.context_length
        mixer = dataclasses.replace(mixer, query_growth=_decimal(fields.query_growth), query_period=period)
    if family.multipliers and fields.attention_scale is not None:
        mixer = dataclasses.replace(mixer, scale=_decimal(fields.attention_scale))
    mlp = MLPConfig(dense, "blk.0.ffn_down.bias" in tensors, family.activation)
    local = rope
    if family.local_theta is not None:  # scaling is for full attention only
        theta = fields.local_theta or _LOCAL_THETA.get(family_name, fields.theta)
        local = dataclasses.replace(rope, theta=_decimal(theta), scaling=None)

    moe = None
    if fields.expert_count:
        width = fields.expert_width or dense
        moe = MoEConfig(
            experts=fields.expert_count,
            per_token=fields.experts_used or 1,
            width=width,
            normalized=_NORMALISES.get(family_name, fields.experts_normalized),
            shared=fields.shared_width or dense if family.shared_experts else None,
            shared_gate=family.shared_experts,
            activation=family.activation,
            bias="blk.0.ffn_gate_inp.bias" in tensors,
        )
        if family.sigmoid_router:
            if fields.gating not in (None, gguf.ExpertGatingFuncType.SIGMOID):
                raise CheckpointError(f"{path}: expert_gating_func is {fields.gating}; supported is 2, a sigmoid")
            moe = dataclasses.replace(
                moe,
                shared=fields.shared_count * width or None,
                router="sigmoid",
                groups=fields.expert_groups,
                groups_per_token=fields.expert_groups_used,
                output_scale=_decimal(fields.experts_scale),
            )

    if moe is not None and not any(name.endswith("ffn_gate_inp.weight") for name in tensors):
        raise CheckpointError(
            f"{path}: a mixture of {fields.expert_count} experts, but no layer has a ffn_gate_inp.weight"
        )

    delta = _delta_net(fields, path) if any(recurrent) else mixer

    def layer(i: int, window: int | None) -> LayerConfig:
        own = dataclasses.replace(mixer, window=window, rope=rope if window is None else local)
        made = LayerConfig(
            delta if recurrent[i] else own,
            moe if moe and f"blk.{i}.ffn_gate_inp.weight" in tensors else mlp,
            family.norms,
        )
        return made.unrotated if family.unrotated_every and (i + 1) % family.unrotated_every == 0 else made

    return tuple(layer(i, window) for i, window in enumerate(_windows(fields, family, path)))


def _recurrent(fields: _Metadata, family: Family, path: Path) -> list[bool]:
    """Whether each layer is recurrent."""
    count = fields.num_layers
    if family.recurrent_other_than is None:
        return [False] * count
    every = fields.attention_every or family.recurrent_other_than
    found = [(i + 1) % every != 0 for i in range(count)] if fields.recurrent is None else fields.recurrent[:count]
    if len(found) != count or all(found):
        raise CheckpointError(
            f"{path}: attention.recurrent_layers and full_attention_interval should leave attention to some of {count} layers"
        )
    return found


def _delta_net(fields: _Metadata, path: Path) -> DeltaNetConfig:
    """The mixer of recurrent layers."""
    sizes = fields.delta_key_heads, fields.delta_value_heads, fields.delta_key_dim, fields.delta_value_width
    if None in sizes or (fields.delta_value_width or 0) % (fields.delta_value_heads or 1):
        raise CheckpointError(
            f"{path}: ssm.group_count, ssm.time_step_rank, ssm.state_size and ssm.inner_size are {', '.join(map(str, sizes))}; "
            "they should be numbers, and the second should divide the last"
        )
    key_heads, value_heads, key_dim, value_width = (size or 1 for size in sizes)
    return DeltaNetConfig(key_heads, value_heads, key_dim, value_width // value_heads, fields.delta_conv or 4)


def _windows(fields: _Metadata, family: Family, path: Path) -> list[int | None]:
    """Window of each layer."""
    window, pattern = fields.window or None, fields.window_pattern
    if family.windows == "all":
        return [window] * fields.num_layers
    if family.windows != "pattern":
        return [None] * fields.num_layers
    if isinstance(pattern, list):
        if len(pattern) != fields.num_layers:
            raise CheckpointError(
                f"{path}: attention.sliding_window_pattern has {len(pattern)} entries for {fields.num_layers} layers; it "
                "should have one for each"
            )
        return [window if has_window else None for has_window in pattern]
    return [window if (i + 1) % (pattern or family.window_every) else None for i in range(fields.num_layers)]


def _scaling(fields: _Metadata, tensors: Mapping[str, gguf.ReaderTensor], dim: int, path: Path) -> RopeScaling | None:
    """Return the rope scaling of factor tensors if there are any, else that of the metadata."""

    def channels(name: str) -> tuple[float, ...]:
        if name not in tensors:
            raise CheckpointError(f"{path}: 1 tensor missing: {name}")
        if tensors[name].tensor_type.name != "F32" or tensors[name].n_elements != dim // 2:
            raise CheckpointError(
                f"{path}: tensor {name} has {tensors[name].n_elements} factors of type {tensors[name].tensor_type.name}, "
                f"{dim // 2} rotated pairs in F32 were expected"
            )
        return tuple(float(factor) for factor in np.asarray(tensors[name].data, np.float32).ravel())

    original = fields.original_window or fields.context_length
    if "rope_freqs.weight" in tensors:
        return _llama3(channels("rope_freqs.weight"), fields.theta, fields.context_length)
    if "rope_factors_long.weight" in tensors:
        return LongRope(
            short_factor=channels("rope_factors_short.weight"),
            long_factor=channels("rope_factors_long.weight"),
            original_max_position=original,
            factor=fields.context_length / original,
            attention_factor=fields.attn_factor,
        )
    factor = fields.factor or fields.scale_linear or 1.0
    match kind := fields.scaling or ("linear" if fields.scale_linear else "none"):
        case "none":
            return None
        case "linear":
            return Linear(factor)
        case "yarn":
            attention_factor = None
            if fields.attn_factor or fields.log_multiplier:
                # The file's factor multiplies YaRN's own, which a logarithm's multiplier divides.
                log = 0.1 * math.log(factor)
                attention_factor = (fields.attn_factor or 1.0) * (log + 1.0) / (fields.log_multiplier * log + 1.0)
            return Yarn(
                factor=factor,
                original_max_position=original,
                attention_factor=attention_factor,
                beta_fast=fields.beta_fast,
                beta_slow=fields.beta_slow,
            )
        case _:
            raise CheckpointError(
                f"{path}: unsupported rope scaling {kind!r}; supported are none, linear, yarn and factor tensors"
            )


def _llama3(factors: tuple[float, ...], theta: float, window: int) -> RopeScaling:
    """Recover Llama 3's scaling from per-channel divisors, which are all that a file stores.

    Meta's constants are recognised. Any other divisors are used unchanged, for every length.
    """
    scaling = Llama3(max(factors), low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    plain = np.asarray(RopeConfig(theta, 2 * len(factors)).resolve(1).inv_freq, np.float32)
    scaled, _ = scaling.scale(plain, theta, window)
    if np.allclose(plain / np.asarray(factors, np.float32), scaled, rtol=1e-5, atol=0):
        return scaling
    return LongRope(factors, factors, original_max_position=window, factor=1.0, attention_factor=1.0)


def _row_order(name: str, config: ModelConfig, architecture: str) -> np.ndarray | None:
    """Permutation of a tensor's rows from the file's order to kvjax's; None if the order is the same.

    Llama files interleave the two halves of every query and key head, so that rotated pairs are neighbours.
    """
    if (mixer := _mixer(name, config)) is not None:
        return _delta_rows(name.split(".", 2)[2], mixer, architecture)
    if architecture not in PERMUTED:
        return None
    if ".attn_q." in name:
        heads = config.num_heads
    elif ".attn_k." in name:
        heads = config.num_kv_heads
    else:
        return None
    rows = np.arange(heads * config.head_dim)
    return rows.reshape(heads, config.head_dim // 2, 2).swapaxes(1, 2).ravel()


def _mixer(name: str, config: ModelConfig) -> DeltaNetConfig | None:
    """The gated delta net of the layer that a tensor belongs to, if there is one."""
    layer = _block(name)
    mixer = config.layers[layer].mixer if 0 <= layer < config.num_layers else None
    return mixer if isinstance(mixer, DeltaNetConfig) else None


def _delta_rows(name: str, mixer: DeltaNetConfig, architecture: str) -> np.ndarray | None:
    """`_row_order` of a gated delta net's tensors, by their names in a layer."""
    if name == "ssm_ba.weight":
        return grouped_order(mixer, "in_proj_ba")
    if architecture not in _TILED or mixer.key_heads == mixer.value_heads:
        return None
    match name.partition(".")[0]:
        case "ssm_alpha" | "ssm_beta" | "ssm_a" | "ssm_dt":
            return _tiled(mixer, 1)
        case "attn_gate":
            return _tiled(mixer, mixer.value_dim)
        case "attn_qkv" | "ssm_conv1d":  # queries and keys are in order
            keys = 2 * mixer.key_width
            return np.concatenate([np.arange(keys), keys + _tiled(mixer, mixer.value_dim)])
        case _:
            return None


def _tiled(mixer: DeltaNetConfig, size: int) -> np.ndarray:
    """Permutation of the rows of value heads, `size` of each, from the file's order to kvjax's.

    Files have the first value head of each key head, then the second of each, and so on.
    """
    rows = np.arange(mixer.value_heads * size).reshape(-1, mixer.key_heads, size)
    return rows.swapaxes(0, 1).ravel()


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    """Shape that the layout expects. Matrices and biases of experts are one below the other."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    if len(shape) == 3:
        return shape[0] * shape[1], shape[2]
    return (math.prod(shape),) if tensor.name.endswith("_exps.bias") else shape


def _stored(path: Path, tensor: gguf.ReaderTensor, config: ModelConfig, architecture: str) -> StoredTensor:
    """Describe one tensor as a `StoredTensor`; see its attributes `read` and `keep`.

    Args:
        path: file that contains the tensor.
        tensor: the tensor's header.
        config: the model's configuration.
        architecture: the file's architecture, which decides on the order of rows (`_row_order`).

    Raises:
        CheckpointError: the tensor's type is not supported.
    """
    kind = tensor.tensor_type
    if kind.name not in QUANTISATIONS:
        raise CheckpointError(
            f"{path}: tensor {tensor.name} has type {kind.name}; supported are {', '.join(QUANTISATIONS)}"
        )
    shape = _shape(tensor)
    offset, nbytes = int(tensor.data_offset), int(tensor.n_bytes)
    bytes_shape = shape[0], nbytes // shape[0]
    elements_per_block, bytes_per_block = (
        (1, _PLAIN[kind.name].itemsize) if kind.name in _PLAIN else gguf.GGML_QUANT_SIZES[kind]
    )

    # Files store the gain of a norm with its offset.
    is_gain = tensor.name.endswith("norm.weight") and not tensor.name.endswith("ssm_norm.weight")
    subtracted = config.norm_offset if is_gain else None
    order, column_order = _row_order(tensor.name, config, architecture), None
    mixer = _mixer(tensor.name, config)
    if mixer is not None and tensor.name.endswith("ssm_out.weight") and architecture in _TILED:
        column_order = _tiled(mixer, mixer.value_dim) if mixer.key_heads != mixer.value_heads else None

    def decode(rows: np.ndarray) -> np.ndarray:
        if kind.name in _PLAIN:
            return rows.view(_PLAIN[kind.name])
        # `gguf.quants.dequantize` calls this for every 16 rows. One call for all rows takes a third of the time.
        return getattr(gguf.quants, kind.name).dequantize_rows(rows)

    def read(start: int, out: np.ndarray, column: int = 0) -> None:
        """Fill whole rows of `out`. Columns start at any element, and whole blocks are read."""
        if column_order is not None:
            wanted, whole = column_order[column : column + out.shape[1]], np.empty((len(out), shape[1]), out.dtype)
            fill(start, whole)
            out[...] = whole[:, wanted]
            return
        if tensor.name.endswith(".ssm_a"):  # stored as the negative decay
            wide = np.empty(out.shape, np.float32)
            fill(start, wide)
            out[...] = np.log(-wide)
            return
        fill(start, out, column)

    def fill(start: int, out: np.ndarray, column: int = 0) -> None:
        """`read`, with the file's columns and numbers."""
        step = max(1, _ELEMENTS_AT_A_TIME // math.prod(shape[1:]))
        width = math.prod(out.shape[1:])
        first, last = column // elements_per_block, -(-(column + width) // elements_per_block)  # blocks
        part = slice(first * bytes_per_block, last * bytes_per_block)
        before = column - first * elements_per_block  # elements of the first block to skip
        for begin in range(0, len(out), step):
            end = min(begin + step, len(out))
            rows = slice(start + begin, start + end) if order is None else order[start + begin : start + end]
            decoded = decode(np.ascontiguousarray(mapped(path, np.uint8, offset, bytes_shape, rows, part)))
            if subtracted:
                decoded = decoded - np.float32(subtracted)
            out[begin:end] = decoded.reshape(end - begin, -1)[:, before : before + width].reshape(out[begin:end].shape)

    def keep(start: int, stop: int, columns: slice | None = None) -> QuantizedMatrix:
        """Return rows as a quantised matrix.

        `columns` slices groups, not elements. If the slice is not on block bounds, all columns are returned.
        """
        groups_per_block = blocks_shape(kind.name, *shape).levels.shape[-1] * elements_per_block // shape[1]
        part = slice(None)
        if columns is not None and not (columns.start % groups_per_block or columns.stop % groups_per_block):
            first, last = columns.start // groups_per_block, columns.stop // groups_per_block  # blocks
            part = slice(first * bytes_per_block, last * bytes_per_block)
        step = max(1, _ELEMENTS_AT_A_TIME // math.prod(shape[1:]))
        pieces = []
        for begin in range(start, stop, step):
            rows = slice(begin, min(begin + step, stop))
            rows = rows if order is None else order[rows]
            pieces.append(
                from_blocks(kind.name, np.ascontiguousarray(mapped(path, np.uint8, offset, bytes_shape, rows, part)))
            )
        return jax.tree.map(lambda *each: np.concatenate(each), *pieces)

    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    plain = StoredTensor(shape, names.get(kind.name, kind.name), nbytes, path, read)
    # Reordered columns would have parts of several blocks, so such a matrix is dequantised.
    if kind.name not in BLOCKS or len(shape) != 2 or column_order is not None:
        return plain
    return dataclasses.replace(plain, kept=blocks_shape(kind.name, *shape), keep=keep)


def _decimal(value: float) -> float:
    """Shortest decimal that rounds to the stored float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
