"""A Hugging Face model directory: `config.json`, safetensors (one file or shards), tokenizer files."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field
from safetensors import SafetensorError, safe_open

from kvjax.config import ModelConfig

from .checkpoint import FLOATS, Checkpoint, StoredTensor, join
from .errors import CheckpointError, listed, told
from .hf_config import OWN_MATRICES, from_hf
from .layout import hf_layout
from .mapped import mapped
from .packed import unpacked
from .quantised import FIELDS, matrices
from .schema import Strict, checked
from .text_files import present, read_json, unique
from .tokenizer import Tokenizer
from .variants import HEAD, prefixed, with_head

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of checkpoints that unpickling, and so possibly code, would open."""

INDEX = "model.safetensors.index.json"

FLOAT_OF: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Supported types by their names in safetensors files."""

INT_OF: Mapping[str, str] = {"I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64"}
"""Types that arrays of matrices in 8 and 4 bits have besides."""


def open_directory(path: Path) -> Checkpoint:
    """Read the headers of a Hugging Face directory.

    Raises:
        CheckpointError: no or damaged configuration or weights, pickled weights, a tensor twice.
    """
    return checkpoint_of(path, config=read_config(path), tensors=read_headers(weight_files(path)))


def checkpoint_of(
    path: Path, tensors: Mapping[str, StoredTensor], config: ModelConfig, *, headers_only: bool = False
) -> Checkpoint:
    """The checkpoint that a directory's configuration and tokenizer make of some tensors, which `headers_only` says cannot be read."""
    source = path / "config.json"
    fields = read_json(source)
    tensors = unpacked(prefixed(tensors), fields.get("quantization_config"), source, lambda: hf_layout(config))
    joined = join(tensors, path)
    if (own := checked(_Own, fields, source).matrices) is not None:
        _check_arrays(source, tensors, own)
    config, joined = with_head(config, joined, path, compare=not headers_only)
    return Checkpoint(
        source=path,
        format="safetensors",
        config=config,
        tensors=joined,
        layout_of=hf_layout,
        ignored=ignored(config),
        tokenizer=functools.partial(
            Tokenizer.from_directory, path, eos=config.eos, bos=config.bos, vocab_size=config.vocab_size
        ),
    )


class _Own(Strict):
    """The arrays that each matrix in 8 or 4 bits was written with; older versions did not list them."""

    matrices: dict[str, list[str]] | None = Field(None, alias=OWN_MATRICES)


def _check_arrays(source: Path, tensors: Mapping[str, StoredTensor], own: Mapping[str, list[str]]) -> None:
    """Refuse a matrix without one of its arrays: without its minima it would be another matrix."""
    found = {name: {field for field in FIELDS if f"{name}.{field}" in tensors} for name in {*own, *matrices(tensors)}}
    for name, fields in sorted(found.items()):
        if fields != (wanted := set(own.get(name, ()))):
            raise CheckpointError(
                f"{source}: {name} should have the arrays {listed(wanted, 5) or 'of floats'}, but the weights hold {listed(fields, 5) or 'none'}"
            )


def read_config(path: Path) -> ModelConfig:
    """The configuration in a directory's `config.json` and `generation_config.json`."""
    generation = path / "generation_config.json"
    return from_hf(
        read_json(path / "config.json"),
        read_json(generation) if present(generation) else None,
        source=str(path / "config.json"),
    )


def refuse_pickle(path: Path) -> None:
    """Refuse a pickled checkpoint by its name, before anything opens it."""
    raise CheckpointError(
        f"{path}: a {path.suffix} checkpoint is a pickle, which can run code when opened; it was not opened. "
        "Use the model's safetensors files, or convert it where you trust it"
    )


def weight_files(path: Path) -> list[Path]:
    """The safetensors files that make up the model: those the index names, or else all there are."""
    index = path / INDEX
    if present(index):
        files = [path / name for name in shard_names(index)]
        absent = [file.name for file in files if not present(file)]
        if absent:
            raise CheckpointError(f"{path}: {len(absent)} of {len(files)} shards missing: {listed(absent)}")
        return files
    single = path / "model.safetensors"
    files = [single] if present(single) else sorted(filter(present, path.glob("*.safetensors")))
    if not files:
        for pickle in sorted(file for file in path.iterdir() if file.suffix in PICKLES):
            refuse_pickle(pickle)
        raise CheckpointError(f"{path}: no .safetensors file there")
    return files


def shard_names(index: Path) -> list[str]:
    """The files that an index says hold the tensors.

    Raises:
        CheckpointError: no index, or one that names something else than safetensors files beside it.
    """
    held = checked(_Index, read_json(index), index)
    return sorted(set(held.weight_map.values()))


def _beside(name: str) -> str:
    if not name.endswith(".safetensors") or any(character in name for character in "/\\:\0"):
        raise ValueError("it should name a .safetensors file in the same directory")
    return name


class _Index(Strict):
    """What is read of an index: the file that holds each tensor."""

    weight_map: Annotated[dict[str, Annotated[str, AfterValidator(_beside)]], Field(min_length=1)]


def read_headers(files: list[Path]) -> dict[str, StoredTensor]:
    """What tensors the files hold, from their headers.

    Raises:
        CheckpointError: a damaged file, or a tensor that two files (or one file twice) hold.
    """
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _read_header(file).items():
            if name in found:
                raise CheckpointError(f"{file}: duplicate tensor {name}, also in {found[name].file.name}")
            found[name] = tensor
    return found


def ignored(config: ModelConfig) -> Callable[[str], bool]:
    """Tensors that some checkpoints carry and no model needs: rotary frequencies, and a tied head stored again."""
    return lambda name: name.endswith("rotary_emb.inv_freq") or (config.tied and name == HEAD)


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        # The library checks that header and length of the file agree; it does not tell where the tensors are.
        with safe_open(file, framework="numpy"):
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length), object_pairs_hook=unique)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: truncated or not a safetensors file ({told(error)})") from error
    header.pop("__metadata__", None)
    return {name: _stored(file, 8 + length, name, entry) for name, entry in header.items()}


def _stored(file: Path, base: int, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    dtype: str = entry["dtype"]
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    type_name = {**FLOAT_OF, **INT_OF}.get(dtype, dtype)
    stored = FLOATS.get(type_name)

    def read(start: int, out: np.ndarray, column: int = 0) -> None:
        integers = dtype in INT_OF and out.dtype.name == type_name
        if stored is None and not integers:
            raise CheckpointError(f"{file}: tensor {name} is {dtype}; supported are {', '.join(FLOAT_OF)}")
        held = out.dtype if integers else np.dtype(stored)
        if not shape:
            out[...] = mapped(file, held, base + begin, (1,), slice(None))[0]
            return
        rows = slice(start, start + len(out))
        out[...] = mapped(file, held, base + begin, shape, rows, slice(column, column + out.shape[-1]))

    return StoredTensor(shape, type_name, end - begin, file, read)
