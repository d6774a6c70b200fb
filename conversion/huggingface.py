"""Opens a Hugging Face model directory: `config.json`, safetensors (one file or shards) and tokenizer files."""

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
from .delta_nets import ungrouped
from .errors import CheckpointError, listed, told
from .experts import stacked
from .hf_config import OWN_MATRICES, from_hf
from .layout import hf_layout
from .mapped import mapped
from .packed import unpacked
from .quantised import FIELDS, matrices
from .schema import Strict, checked
from .text_files import present, read_json, unique
from .tokenizer import Tokenizer
from .variants import HEAD, prefixed, with_head, without_predictors

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of pickled checkpoints. Unpickling can run code, so they are refused."""

INDEX = "model.safetensors.index.json"

FLOAT_OF: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Supported floating-point types, by their names in safetensors files."""

INT_OF: Mapping[str, str] = {"I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64"}
"""Integer types, which only the arrays of quantised matrices use."""


def open_directory(path: Path) -> Checkpoint:
    """Read the headers of a Hugging Face directory.

    Raises:
        CheckpointError: configuration or weights are missing or damaged, weights are pickled, or a tensor occurs twice.
    """
    return checkpoint_of(path, config=read_config(path), tensors=read_headers(weight_files(path)))


def checkpoint_of(
    path: Path, tensors: Mapping[str, StoredTensor], config: ModelConfig, *, headers_only: bool = False
) -> Checkpoint:
    """Build a checkpoint from a directory's configuration, its tokenizer and some tensors.

    With `headers_only`, the numbers of the tensors cannot be read.
    """
    source = path / "config.json"
    fields = read_json(source)
    tensors = unpacked(
        without_predictors(prefixed(tensors)), fields.get("quantization_config"), source, lambda: hf_layout(config)
    )
    joined = join(tensors, path)
    if (own := checked(_Own, fields, source).matrices) is not None:
        _check_arrays(source, tensors, own)
    config, joined = with_head(config, ungrouped(config, stacked(config, joined)), path, compare=not headers_only)
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
    """The arrays that kvjax wrote for each quantised matrix. Older versions did not list them."""

    matrices: dict[str, list[str]] | None = Field(None, alias=OWN_MATRICES)


def _check_arrays(source: Path, tensors: Mapping[str, StoredTensor], own: Mapping[str, list[str]]) -> None:
    """Raise if a matrix lacks one of its arrays. Without its minima, for example, it would have other values."""
    found = {name: {field for field in FIELDS if f"{name}.{field}" in tensors} for name in {*own, *matrices(tensors)}}
    for name, fields in sorted(found.items()):
        if fields != (wanted := set(own.get(name, ()))):
            raise CheckpointError(
                f"{source}: {name} should have the arrays {listed(wanted, 5) or 'of floats'}, but the weights hold {listed(fields, 5) or 'none'}"
            )


def read_config(path: Path) -> ModelConfig:
    """Read the configuration from a directory's `config.json` and `generation_config.json`."""
    generation = path / "generation_config.json"
    return from_hf(
        read_json(path / "config.json"),
        read_json(generation) if present(generation) else None,
        source=str(path / "config.json"),
    )


def refuse_pickle(path: Path) -> None:
    """Raise for a pickled checkpoint, which is recognised by its suffix and never opened."""
    raise CheckpointError(
        f"{path}: a {path.suffix} checkpoint is a pickle, which can run code when opened; it was not opened. "
        "Use the model's safetensors files, or convert it where you trust it"
    )


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of the model: those in the index, or all of them if there is no index.

    Raises:
        CheckpointError: there are no files, files are missing, or there are two models, one in `model.safetensors` and
            one in the index.
    """
    index, single = path / INDEX, path / "model.safetensors"
    if present(index):
        names = shard_names(index)
        files = [path / name for name in names]
        absent = [file.name for file in files if not present(file)]
        if absent:
            raise CheckpointError(f"{path}: {len(absent)} of {len(files)} shards missing: {listed(absent)}")
        if present(single) and single.name not in names:
            raise CheckpointError(
                f"{path}: there are two models, one in {single.name} and one in the files that {INDEX} lists; remove one of them"
            )
        return files
    files = [single] if present(single) else sorted(filter(present, path.glob("*.safetensors")))
    if not files:
        for pickle in sorted(file for file in path.iterdir() if file.suffix in PICKLES):
            refuse_pickle(pickle)
        raise CheckpointError(f"{path}: no .safetensors file there")
    return files


def shard_names(index: Path) -> list[str]:
    """Names of the files that the index lists.

    Raises:
        CheckpointError: the index is missing, or names files other than safetensors files in the same directory.
    """
    held = checked(_Index, read_json(index), index)
    return sorted(set(held.weight_map.values()))


def _beside(name: str) -> str:
    if not name.endswith(".safetensors") or any(character in name for character in "/\\:\0"):
        raise ValueError("it should name a .safetensors file in the same directory")
    return name


class _Index(Strict):
    """The field of an index that is read: the file of each tensor."""

    weight_map: Annotated[dict[str, Annotated[str, AfterValidator(_beside)]], Field(min_length=1)]


def read_headers(files: list[Path]) -> dict[str, StoredTensor]:
    """Read the headers of the files and return their tensors by name.

    Raises:
        CheckpointError: a file is damaged, or a tensor occurs twice.
    """
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _read_header(file).items():
            if name in found:
                raise CheckpointError(f"{file}: duplicate tensor {name}, also in {found[name].file.name}")
            found[name] = tensor
    return found


def ignored(config: ModelConfig) -> Callable[[str], bool]:
    """Select tensors that some checkpoints contain and no model needs: rotary frequencies, layers that predict several
    tokens at once, and a second copy of a tied head.
    """
    return lambda name: (
        name.endswith("rotary_emb.inv_freq") or name.startswith("mtp.") or (config.tied and name == HEAD)
    )


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        # The library checks that the header matches the file's length, but does not expose where the tensors are.
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
