"""`convert`: write any checkpoint that can be loaded as Orbax or safetensors."""

import contextlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import FLOATS, Checkpoint, expected_shapes
from .errors import CheckpointError
from .hf_config import to_hf
from .huggingface import INDEX
from .layout import hf_layout
from .loading import float_name, open_checkpoint
from .orbax_directory import MARK, write_orbax
from .progress import Meter

SHARD_BYTES = 5 * 10**9
"""Size above which safetensors are cut into shards, as the Hugging Face hub likes them."""

_DTYPE_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def convert(
    source: str | Path | None,
    destination: str | Path,
    *,
    format: str = "orbax",
    dtype: Any = None,
    progress: bool | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model in another format; the destination appears only when it is complete.

    Args:
        source: as for `kvjax.conversion.load`.
        destination: directory to make.
        format: "orbax", or "safetensors" as transformers reads it.
        dtype: type of the written parameters; by default the checkpoint's own (bfloat16 for quantised ones).
        progress: see `kvjax.conversion.load`.
        overwrite: replace a model that is there already.

    Returns:
        The destination.

    Raises:
        CheckpointError: the source is damaged, or the destination exists.
        ValueError: an unknown format or dtype.
    """
    if format not in _WRITERS:
        raise ValueError(f"format={format!r} is not one of {', '.join(_WRITERS)}")
    destination = Path(destination)
    _check_destination(destination, overwrite)
    checkpoint = open_checkpoint(source, progress)
    checkpoint.check()
    wanted = checkpoint.own_dtype if dtype is None else float_name(dtype)
    with _replacing(destination) as scratch:
        _WRITERS[format](scratch, checkpoint, wanted, progress)
    return destination


def _write_orbax(path: Path, checkpoint: Checkpoint, dtype: str, progress: bool | None) -> None:
    with Meter(f"Writing {checkpoint.source.name}", checkpoint.size(FLOATS[dtype]), progress) as meter:

        def parameters() -> Iterator[tuple[str, np.ndarray]]:
            for name, array in checkpoint.read_all(FLOATS[dtype]):
                meter.advance(array.nbytes)
                yield name, array

        write_orbax(path, checkpoint.config, parameters(), dtype, checkpoint.tokenizer())


def _write_safetensors(path: Path, checkpoint: Checkpoint, dtype: str, progress: bool | None) -> None:
    fields = to_hf(checkpoint.config) | {"torch_dtype": dtype}
    (path / "config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")
    tokenizer = checkpoint.tokenizer()
    if tokenizer is not None:
        tokenizer.save(path)
    layout = hf_layout(checkpoint.config)
    shapes = expected_shapes(checkpoint.config, layout)
    sizes = {name: math.prod(shape) * FLOATS[dtype].itemsize for name, shape in shapes.items()}
    shards = _shards(sizes)
    with Meter(f"Writing {checkpoint.source.name}", sum(sizes.values()), progress) as meter:
        for name, tensors in shards.items():
            with (path / name).open("wb") as stream:
                stream.write(_header({tensor: (shapes[tensor], sizes[tensor]) for tensor in tensors}, dtype))
                for tensor in tensors:
                    for parameter in layout[tensor]:
                        stream.write(
                            np.ascontiguousarray(checkpoint.read(parameter, FLOATS[dtype])).view(np.uint8).data
                        )
                    meter.advance(sizes[tensor])
    if len(shards) > 1:
        weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (path / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


_WRITERS: Mapping[str, Callable[[Path, Checkpoint, str, bool | None], None]] = {
    "orbax": _write_orbax,
    "safetensors": _write_safetensors,
}


def _shards(sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """File name → tensors: one file, or as many as keep each within `SHARD_BYTES`."""
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": names for i, names in enumerate(shards, 1)}


def _header(tensors: Mapping[str, tuple[tuple[int, ...], int]], dtype: str) -> bytes:
    """The head of a safetensors file: its length, then shapes and offsets as JSON.

    Written here because the library wants all tensors of a file in memory before it writes the first.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, size) in tensors.items():
        entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text


def _check_destination(destination: Path, overwrite: bool) -> None:
    if not destination.exists():
        return
    if not overwrite:
        raise CheckpointError(f"{destination} exists; give another destination, or allow overwriting it")
    ours = destination.is_dir() and (
        not any(destination.iterdir()) or any((destination / mark).exists() for mark in (MARK, "config.json"))
    )
    if not ours:
        raise CheckpointError(f"{destination} is not a model's directory, so it is not overwritten")


@contextlib.contextmanager
def _replacing(destination: Path) -> Iterator[Path]:
    """An empty directory beside the destination that takes its place on success and disappears on failure."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.") as scratch:
        made = Path(scratch) / "new"
        made.mkdir()
        yield made
        if destination.exists():
            destination.rename(Path(scratch) / "old")
        made.rename(destination)
