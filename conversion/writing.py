"""`convert` and `save`: write a checkpoint, or parameters in memory, as Orbax or safetensors."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax._util import files
from kvjax._util.user_files import expanded
from kvjax.models.params import Params
from kvjax.pallas_kernels import QuantizedMatrix

from .checkpoint import FLOATS, Checkpoint, Kinds, check_kinds, kinds_of, nbytes_of
from .delta_nets import as_stored, is_regrouped, stored_shape
from .errors import CheckpointError, listed
from .experts import expert_name, experts_of, merge, merged
from .hf_config import OWN_MATRICES, OWN_METHOD, to_hf
from .huggingface import INDEX
from .layout import hf_layout
from .loading import float_name, open_checkpoint
from .orbax_directory import MARK, write_orbax
from .progress import Meter
from .quantised import parts
from .state_dict import checkpoint_of
from .tokenizer_source import TokenizerSource

SHARD_BYTES = 5 * 10**9
"""Size above which safetensors are split into shards, in bytes, as is usual on the Hugging Face hub."""

_DTYPE_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "uint8": "U8"}

_MODEL_FILES = (
    *(MARK, "params", "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    "chat_template.*",
)
"""Files that overwriting may delete. A directory with any other file is not overwritten."""


def convert(
    source: str | Path | None,
    destination: str | Path,
    *,
    format: str = "orbax",
    dtype: Any = None,
    weights: str | None = None,
    embedding: str | None = None,
    tokenizer: TokenizerSource | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    progress: bool | None = None,
    overwrite: bool = False,
) -> Path:
    """Convert a model to another format, one tensor at a time. The destination appears only when it is complete.

    Args:
        source: as for `kvjax.conversion.load`.
        destination: directory to create.
        format: "orbax", or "safetensors", which transformers can read.
        dtype: type of the written parameters; by default the checkpoint's own (bfloat16 for quantised checkpoints).
        weights, embedding: as for `kvjax.conversion.load`. Only kvjax can read matrices in 8 or 4 bits, also as
            safetensors.
        tokenizer: as for `kvjax.conversion.load`.
        revision, token: as for `kvjax.conversion.load`.
        progress: as for `kvjax.conversion.load`.
        overwrite: whether to replace an existing model. A directory with other files is never replaced.

    Returns:
        The destination.

    Raises:
        CheckpointError: the source is damaged, or the destination exists or appears while writing.
        ValueError: `format`, `dtype`, `weights` or `embedding` is not supported.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     source = kvjax.save(params, f"{folder}/model", format="safetensors")
        ...     path = kvjax.conversion.convert(source, f"{folder}/small", weights="int8")
        ...     kvjax.pallas_kernels.is_quantized(kvjax.load(path).layers[0].attn.q)
        True
    """
    check_kinds(weights, embedding)
    destination = expanded(destination)
    check = _checks(destination, format, overwrite)
    checkpoint = open_checkpoint(source, progress, revision=revision, token=token, tokenizer=tokenizer)
    kinds = kinds_of(checkpoint, weights, embedding)
    return _write(checkpoint, destination, format, dtype, progress, check, kinds)


def save(
    params: Params,
    path: str | Path,
    *,
    format: str = "orbax",
    dtype: Any = None,
    progress: bool | None = None,
    overwrite: bool = False,
) -> Path:
    """Write parameters with their configuration and tokenizer. `kvjax.load` reads them, and transformers reads the safetensors.

    Args:
        params: parameters from `kvjax.load` or `kvjax.models.init`, possibly trained further.
        path: directory to create. It appears only when it is complete.
        format: "orbax" or "safetensors".
        dtype: type of the written parameters; by default their own.
        progress: as for `kvjax.conversion.load`.
        overwrite: as for `kvjax.conversion.convert`.

    Returns:
        The path.

    Raises:
        CheckpointError: the path exists, or the parameters do not have the shapes of their configuration.
        TypeError: `params` are not parameters, or are shapes only.
        ValueError: `format` or `dtype` is not supported.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = kvjax.save(params, f"{folder}/model", format="safetensors")
        ...     kvjax.load(path).config == params.config
        True
    """
    path = expanded(path)
    check = _checks(path, format, overwrite)
    kinds = Kinds("as stored", "as stored")
    return _write(checkpoint_of(params), path, format, dtype, progress, check, kinds)


def _write(
    checkpoint: Checkpoint,
    destination: Path,
    format: str,
    dtype: Any,
    progress: bool | None,
    check: Callable[[Path], None] | None,
    kinds: Kinds,
) -> Path:
    checkpoint.check()
    wanted = checkpoint.own_dtype if dtype is None else float_name(dtype)
    held = _Held(checkpoint, FLOATS[wanted], kinds)
    try:
        with (
            files.directory(destination, check) as folder,
            Meter(f"Writing {destination.name}", nbytes_of(held.shapes), progress) as meter,
        ):
            _WRITERS[format](folder, held, wanted, meter)
    except FileExistsError as error:
        raise CheckpointError(f"{destination}: {error.strerror}") from error
    return destination


class _Held:
    """Parameters of a checkpoint as arrays to write. A quantised matrix has several.

    Attributes:
        checkpoint: source of the parameters.
        shapes: shapes of every parameter.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: np.dtype, kinds: Kinds) -> None:
        self.checkpoint, self._dtype, self._kinds = checkpoint, dtype, kinds
        self.shapes = checkpoint.shapes(dtype, kinds)
        self._latest: tuple[str, Any] = "", None

    def read(self, parameter: str, part: str) -> np.ndarray:
        """Read an array of a parameter. `part` is the suffix of its name after the parameter's name.

        The last parameter is cached for its other arrays, or for its other experts.
        """
        if self._latest[0] != parameter:
            self._latest = "", None  # freed before the next is read
            held = self.checkpoint.read(parameter, self._dtype, self._kinds.of(parameter))
            if not isinstance(self.shapes[parameter], QuantizedMatrix) and not parameter.endswith("_experts"):
                return parts("", held)[part]
            self._latest = parameter, held
        return parts("", self._latest[1])[part]


def _write_orbax(path: Path, held: _Held, dtype: str, meter: Meter) -> None:
    def read(parameter: str, part: str) -> np.ndarray:
        array = held.read(parameter, part)
        meter.advance(array.nbytes)
        return array

    parameters = {
        name + part: partial(read, name, part) for name, shape in held.shapes.items() for part in parts("", shape)
    }
    write_orbax(path, held.checkpoint.config, parameters, dtype, held.checkpoint.tokenizer())


def _write_safetensors(path: Path, held: _Held, dtype: str, meter: Meter) -> None:
    config = held.checkpoint.config
    layout = hf_layout(config)
    tensors: dict[str, tuple[str, str, slice]] = {}
    together: dict[str, tuple[str, ...]] = {}  # of experts that are merged
    shapes: dict[str, jax.ShapeDtypeStruct] = {}
    for of, parameters in layout.items():
        for part in parts("", held.shapes[parameters[0]]):
            whole, count = _stacked(of, part, [held.shapes[p] for p in parameters]), experts_of(config, of)
            size = whole.shape[0] // max(count, 1)
            if not part and (found := merged(config, of)) is not None:
                name, together[name] = found
                tensors[name] = of, part, slice(None)
                wide = (len(together[name]) * size, *whole.shape[1:])
                shapes[name] = jax.ShapeDtypeStruct((max(count, 1), *reversed(wide)), whole.dtype)
                continue
            for i in range(max(count, 1)):
                name = (expert_name(of, i) if count else of) + part
                tensors[name] = of, part, slice(i * size, (i + 1) * size)
                shape = stored_shape(config, of, (size, *whole.shape[1:]))
                shapes[name] = jax.ShapeDtypeStruct(shape, whole.dtype)
    fields = to_hf(config) | {"torch_dtype": dtype}
    arrays: dict[str, list[str]] = {}
    for name, (_, part, _) in tensors.items():
        if part:
            arrays.setdefault(name.removesuffix(part), []).append(part.removeprefix("."))
    if arrays:
        fields |= {"quantization_config": {"quant_method": OWN_METHOD}, OWN_MATRICES: arrays}
    (path / "config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")
    tokenizer = held.checkpoint.tokenizer()
    if tokenizer is not None:
        tokenizer.save(path)
    sizes = {name: nbytes_of(shape) for name, shape in shapes.items()}
    shards = _shards(sizes)
    for name, names in shards.items():
        with (path / name).open("wb") as stream:
            stream.write(_header({tensor: shapes[tensor] for tensor in names}))
            for tensor in names:
                of, part, rows = tensors[tensor]
                if tensor in together:
                    whole = merge(shapes[tensor].shape[0], [held.read(layout[x][0], part) for x in together[tensor]])
                    stream.write(whole.view(np.uint8).data)
                    meter.advance(whole.nbytes)
                    continue
                arrays_of = (held.read(parameter, part) for parameter in layout[of])
                if is_regrouped(config, of):
                    arrays_of = [as_stored(config, of, np.concatenate(list(arrays_of)))]
                for array in arrays_of:
                    array = np.ascontiguousarray(array[rows] if experts_of(config, of) else array)
                    stream.write(array.view(np.uint8).data)
                    meter.advance(array.nbytes)
            stream.flush()
            os.fsync(stream.fileno())
    if len(shards) > 1:
        weight_map = {tensor: name for name, names in shards.items() for tensor in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (path / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _stacked(name: str, part: str, held: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """Shape of a tensor in which this part of several parameters is stacked.

    Raises:
        CheckpointError: the parts differ in more than rows.
    """
    shapes: list[Any] = [parts("", each).get(part) for each in held]
    if len({each and (each.shape[1:], each.dtype) for each in shapes}) > 1:
        raise CheckpointError(
            f"{name}: the parameters in this tensor are quantised in several ways; write orbax instead"
        )
    return jax.ShapeDtypeStruct((sum(each.shape[0] for each in shapes), *shapes[0].shape[1:]), shapes[0].dtype)


_WRITERS: Mapping[str, Callable[[Path, _Held, str, Meter], None]] = {
    "orbax": _write_orbax,
    "safetensors": _write_safetensors,
}


def _shards(sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """File name → tensors. There is one file, or as many as keep each within `SHARD_BYTES`."""
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


def _header(tensors: Mapping[str, jax.ShapeDtypeStruct]) -> bytes:
    """Header of a safetensors file: its length, then shapes and offsets as JSON.

    The library is not used, as it needs all tensors of a file in memory before it writes the first.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors.items():
        end = offset + nbytes_of(shape)
        entries[name] = {
            "dtype": _DTYPE_NAMES[np.dtype(shape.dtype).name],
            "shape": shape.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # aligns tensors to eight bytes
    return len(text).to_bytes(8, "little") + text


def _checks(destination: str | Path, format: str, overwrite: bool) -> Callable[[Path], None] | None:
    """Validate the destination before the work begins. Returns the check for `files.directory` to repeat at the end."""
    if format not in _WRITERS:
        raise ValueError(f"format={format!r} is not one of {', '.join(_WRITERS)}")
    files.recover(destination)
    check = partial(_check_replaceable, destination) if overwrite else None
    place = Path(os.path.realpath(destination))
    if os.path.lexists(place):
        if check is None:
            raise CheckpointError(f"{destination} exists; give another destination, or allow overwriting it")
        check(place)
    return check


def _check_replaceable(destination: str | Path, found: Path) -> None:
    """Raise unless the path is an empty directory, or contains a model and nothing else."""
    names = {entry.name for entry in found.iterdir()} if found.is_dir() else {found.name}
    if names and not (found.is_dir() and names & {MARK, "config.json"}):
        raise CheckpointError(f"{destination} is not a model's directory, so it is not overwritten")
    others = {name for name in names if not any(fnmatch(name, pattern) for pattern in _MODEL_FILES)}
    if others:
        raise CheckpointError(
            f"{destination} holds more than a model, so it is not overwritten: {listed(others)}; "
            "move that away, or give another destination"
        )
