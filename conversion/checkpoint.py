"""What every checkpoint format looks like to the loader, and the loader itself.

A format's module opens its files, reads headers only, and describes what it found as a `Checkpoint`. `assemble` then fills
the parameters one tensor at a time.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from kvjax.config import ModelConfig
from kvjax.models.params import Params, abstract, kind_of, name_of, quantized_shape
from kvjax.pallas_kernels import QuantizedMatrix

from .errors import CheckpointError, listed, told
from .layout import Layout
from .progress import Meter
from .quantised import FROM_FLOATS, assembled, dequantised, matrices

FLOATS: Mapping[str, Any] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Floating-point types that parameters may have."""

Put = Callable[[str, Any, Callable[..., Any]], Any]
"""Puts a parameter where it belongs, by its name, its shapes, and what reads it: `read()` all of it, `read(rows, columns)` a part as
`Checkpoint.read` does."""

_SCANNED = 1 << 16
"""Numbers looked at together: they stay in a core's cache."""

_ALIGNMENT = 64
"""Bytes; XLA's alignment of buffers on CPU."""

_QUANTISED = 1 << 22
"""Numbers of floats from which a part of a matrix in 8 or 4 bits is made at a time."""

KINDS = ("float", *FROM_FLOATS, "as stored")
"""How matrices of weights may be held."""


@dataclasses.dataclass(frozen=True)
class Kinds:
    """How matrices of weights are to be held, each one of `KINDS`.

    Attributes:
        weights: those of the layers.
        embedding: embedding and head.
    """

    weights: str = "float"
    embedding: str = "float"

    def of(self, name: str) -> str:
        """That of a parameter."""
        return kind_of(name, self.weights, self.embedding)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, not read yet.

    Attributes:
        shape: as the layout expects it, [out, in] for projections.
        dtype: name of the stored type: one of `FLOATS`, or a quantisation such as "Q4_1" or "int8".
        nbytes: bytes in the file.
        file: where it is.
        read: `read(start, out, column=0)` fills a host array with as many rows as it has, from row `start`, converting to its type; of a
            matrix with as many columns as it has, from `column`.
        kept: shapes of the matrix in 8 or 4 bits that this is, or can become without loss; None for floats.
        keep: `keep(start, stop, columns=None)` gives the matrix of these rows, of host arrays; of a slice of its levels' last axis alone, if that
            can be read by itself, else of all.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: Path
    read: Callable[..., None]
    kept: Any = None
    keep: Callable[..., QuantizedMatrix] | None = None

    def held_as(self, kind: str) -> bool:
        """Whether it is kept where this kind is asked for."""
        return self.kept is not None and kind in ("as stored", self.kept.kind)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on disk, headers read.

    Attributes:
        source: directory or file, for messages.
        format: "safetensors", "gguf" or "orbax".
        config: the model.
        tensors: what the files hold, by the format's own names.
        layout_of: what they should hold, given the configuration.
        ignored: whether a tensor that the layout does not know is harmless (recomputable buffers).
        tokenizer: reads the tokenizer; None where the checkpoint has none.
    """

    source: Path
    format: str
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    layout_of: Callable[[ModelConfig], Layout]
    ignored: Callable[[str], bool]
    tokenizer: Callable[[], Any]

    @property
    def dtypes(self) -> dict[str, int]:
        """Bytes held in each stored type, largest first."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))

    def shapes(self, dtype: np.dtype, kinds: Kinds) -> dict[str, Any]:
        """Shapes of all parameters as they are to be held, `dtype` where they are floats.

        Raises:
            CheckpointError: a matrix cannot be held so.
        """
        return {name: self._shape(name, dtype, kinds.of(name)) for name in self._places}

    def _shape(self, name: str, dtype: np.dtype, kind: str) -> Any:
        tensor, start, stop = self._places[name]
        stored = self.tensors[tensor]
        if kind != "float" and stored.held_as(kind):
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct((stop - start, *x.shape[1:]), x.dtype), stored.kept)
        floats = jax.ShapeDtypeStruct((stop - start, *stored.shape[1:]), dtype)
        try:
            return quantized_shape(floats, "float" if kind == "as stored" else kind)
        except ValueError as error:
            raise CheckpointError(f"{self.source}: {name}: {error}") from error

    @property
    def own_dtype(self) -> str:
        """The floating-point type that most of the weights have; bfloat16 for a GGUF file's quantised ones."""
        main = next(iter(self.dtypes), "float32")
        if main in FLOATS or self.format == "gguf":
            return main if main in FLOATS else "bfloat16"
        return next((name for name in self.dtypes if name in FLOATS), "bfloat16")

    @functools.cached_property
    def layout(self) -> Layout:
        """What the files should hold; as long as the model is deep, so `check` looks at the depth first."""
        return self.layout_of(self.config)

    @functools.cached_property
    def _places(self) -> dict[str, tuple[str, int, int]]:
        """Parameter → tensor and rows that hold it, in the order of the layout."""
        shapes = parameter_shapes(self.config)
        places = {}
        for tensor, held in self.layout.items():
            start = 0
            for name in held:
                places[name] = (tensor, start, start := start + shapes[name][0])
        return places

    @property
    def parameters(self) -> Iterable[str]:
        """Names of all parameters, in the order of the layout."""
        return self._places

    def read(
        self,
        parameter: str,
        dtype: np.dtype,
        kind: str = "float",
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> np.ndarray | QuantizedMatrix:
        """One parameter as a new host array, the caller's own, or as a matrix of such.

        Args:
            parameter: its name.
            dtype: type of floats.
            kind: how a matrix is held, of `KINDS`.
            rows: some rows alone, of which there is one at least.
            columns: of a matrix some columns of its last axis alone, that of the levels where it is in 8 or 4 bits. Where it is to be made of floats, or
                the file does not have these by themselves, there are all.
        """
        tensor, start, stop = self._places[parameter]
        stored = self.tensors[tensor]
        if rows is not None:
            start, stop = start + rows.start, start + rows.stop
        try:
            with np.errstate(all="ignore"):  # what is not finite is told by `assemble`, for the whole model at once
                if stored.keep is not None and stored.held_as(kind):
                    return stored.keep(start, stop, columns)
                if kind in FROM_FLOATS:
                    return _quantised(stored, start, stop, kind)
                inner = stored.shape[1:] if columns is None else (columns.stop - columns.start,)
                out = _aligned((stop - start, *inner), dtype)
                stored.read(start, out, 0 if columns is None else columns.start)
        except CheckpointError:
            raise
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{stored.file}: tensor {tensor} cannot be read ({told(error)})") from error
        return out

    def check(self) -> None:
        """Compare what is there with what should be.

        Raises:
            CheckpointError: missing, unexpected or wrongly shaped tensors, all of them from headers alone.
        """
        if self.config.num_layers > len(self.tensors):
            raise CheckpointError(
                f"{self.source}: the configuration asks for {self.config.num_layers} layers, "
                f"but there are only {len(self.tensors)} tensors"
            )
        expected = expected_shapes(self.config, self.layout)
        missing = expected.keys() - self.tensors.keys()
        if missing:
            raise CheckpointError(f"{self.source}: {_count(missing)} missing: {listed(missing)}")
        unexpected = {name for name in self.tensors if name not in expected and not self.ignored(name)}
        if unexpected:
            raise CheckpointError(
                f"{self.source}: {_count(unexpected)} that a {self.config.family} model of this configuration "
                f"does not have: {listed(unexpected)}"
            )
        for name, shape in expected.items():
            if self.tensors[name].shape != shape:
                raise CheckpointError(
                    f"{self.tensors[name].file}: tensor {name} has shape {list(self.tensors[name].shape)}, "
                    f"the configuration asks for {list(shape)}"
                )


def check_kinds(weights: Any, embedding: Any) -> None:
    """Raise `ValueError` unless these are kinds of matrices, or None."""
    for name, kind in (("weights", weights), ("embedding", embedding)):
        if kind is not None and kind not in KINDS:
            raise ValueError(f"{name}={kind!r} is not one of {', '.join(KINDS)}")


def kinds_of(checkpoint: Checkpoint, weights: str | None, embedding: str | None) -> Kinds:
    """How matrices are held, as `load` is asked."""
    if weights is None:
        weights = "float" if checkpoint.format == "gguf" else "as stored"
    if embedding is None:
        embedding = "as stored" if weights == "as stored" else "float"
    return Kinds(weights, embedding)


def expected_shapes(config: ModelConfig, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the layout: the rows of its parameters added up."""
    shapes = parameter_shapes(config)
    return {tensor: (sum(shapes[name][0] for name in held), *shapes[held[0]][1:]) for tensor, held in layout.items()}


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by its dotted name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(abstract(config))
    return {name_of(path): leaf.shape for path, leaf in leaves}


def join(tensors: Mapping[str, StoredTensor], file: Path) -> dict[str, StoredTensor]:
    """Tensors of which those that are the arrays of one matrix in 8 or 4 bits (see `quantised.parts`) are one.

    Raises:
        CheckpointError: arrays of a matrix do not fit each other.
    """
    left = dict(tensors)
    for name, arrays in matrices(tensors).items():
        for field in arrays:
            del left[f"{name}.{field}"]
        if name in left:
            raise CheckpointError(f"{file}: tensor {name} is there twice, as floats and in levels")
        left[name] = _joined(name, arrays, file)
    return left


def _joined(name: str, arrays: Mapping[str, StoredTensor], file: Path) -> StoredTensor:
    try:
        types = {field: np.dtype(FLOATS.get(array.dtype, array.dtype)) for field, array in arrays.items()}
        kept = assembled({field: jax.ShapeDtypeStruct(array.shape, types[field]) for field, array in arrays.items()})
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: tensor {name}: {told(error)}") from error

    def keep(start: int, stop: int, columns: slice | None = None) -> QuantizedMatrix:
        of, held = kept.levels.shape[-1], {}
        wide = {field: array.shape[-1] for field, array in arrays.items() if len(array.shape) > 1}
        if columns is None or any(end * size % of for size in wide.values() for end in (columns.start, columns.stop)):
            columns = slice(0, of)
        for field, array in arrays.items():
            first, last = (end * wide.get(field, 0) // of for end in (columns.start, columns.stop))
            inner = (*array.shape[1:-1], last - first) if field in wide else ()
            held[field] = _aligned((stop - start, *inner), types[field])
            array.read(start, held[field], first)
        return assembled(held)

    def read(start: int, out: np.ndarray, column: int = 0) -> None:
        _dequantise(keep, start, out, column)

    return StoredTensor(
        kept.shape, kept.kind, sum(array.nbytes for array in arrays.values()), arrays["levels"].file, read, kept, keep
    )


def _dequantise(keep: Callable[[int, int], QuantizedMatrix], start: int, out: np.ndarray, column: int) -> None:
    step = max(1, _QUANTISED // out.shape[1])
    for begin in range(0, len(out), step):
        end = min(begin + step, len(out))
        rows = dequantised(keep(start + begin, start + end), out.dtype)
        out[begin:end] = rows[:, column : column + out.shape[1]]


def _quantised(stored: StoredTensor, start: int, stop: int, kind: str) -> QuantizedMatrix:
    """A matrix of floats in 8 or 4 bits, a few rows at a time."""
    step = max(1, _QUANTISED // stored.shape[1])
    pieces = []
    for begin in range(start, stop, step):
        rows = np.empty((min(step, stop - begin), stored.shape[1]), np.float32)
        stored.read(begin, rows)
        pieces.append(FROM_FLOATS[kind](rows))
    return pieces[0] if len(pieces) == 1 else jax.tree.map(lambda *each: np.concatenate(each), *pieces)


def nbytes_of(shapes: Any) -> int:
    """Bytes of arrays of these shapes, in any pytree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def assemble(
    checkpoint: Checkpoint,
    dtype: str,
    put: Put | None = None,
    progress: bool | None = None,
    kinds: Kinds | None = None,
) -> Params:
    """Fill the parameters from a checkpoint, one tensor after another.

    Host memory never holds more than one tensor beside what is already on the device.

    Args:
        checkpoint: headers read by one of the formats.
        dtype: type of the parameters, one of `FLOATS`.
        put: what puts a parameter on its device; by default on JAX's own.
        progress: see `kvjax.conversion.load`.
        kinds: how matrices are held; floats by default.

    Warns at the end of weights that are NaN or infinite: such a model computes nothing but NaN, yet a few of them may be worth a
    look.

    Raises:
        CheckpointError: as `Checkpoint.check`, or a file that ends early or does not decode.
    """
    checkpoint.check()
    wanted, kinds = FLOATS[dtype], kinds or Kinds()
    tokenizer = checkpoint.tokenizer()
    arrays: dict[str, Any] = {}
    shapes = checkpoint.shapes(wanted, kinds)
    lost: dict[str, int] = {}

    def read(name: str, rows: slice | None = None, columns: slice | None = None) -> np.ndarray | QuantizedMatrix:
        array = checkpoint.read(name, wanted, kinds.of(name), rows, columns)
        floats = [leaf for leaf in jax.tree.leaves(array) if leaf.dtype.name in FLOATS]
        if count := sum(map(count_not_finite, floats)):
            lost[name] = lost.get(name, 0) + count
        return array

    with Meter(f"Loading {checkpoint.source.name}", nbytes_of(shapes), progress) as meter:
        for name, shape in shapes.items():
            whole = functools.partial(read, name)
            # Waiting keeps one tensor in flight.
            arrays[name] = jax.block_until_ready(jax.device_put(whole()) if put is None else put(name, shape, whole))
            meter.advance(nbytes_of(shape))
    if lost:
        warnings.warn(
            f"{checkpoint.source}: {sum(lost.values())} weights are NaN or infinite in {wanted}, the first of them in {next(iter(lost))}; "
            "what the model computes will be NaN. The file is damaged, or its numbers exceed this type",
            stacklevel=2,
        )
    return unflatten(checkpoint.config, arrays, tokenizer)


def count_not_finite(array: np.ndarray) -> int:
    """How many numbers are NaN or infinite.

    Looks at the bits, a few pages at a time: 0.1 s for 500 MB that are in memory, an eighth of what `np.isfinite` takes.
    """
    bits = array.reshape(-1).view(f"u{array.itemsize}")
    exponent = np.array(np.inf, array.dtype).view(bits.dtype)
    count = 0
    for start in range(0, len(bits), _SCANNED):
        masked = bits[start : start + _SCANNED] & exponent
        if masked.max() == exponent:
            count += int(np.count_nonzero(masked == exponent))
    return count


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that JAX on CPU takes over as it stands instead of copying it."""
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


def unflatten(config: ModelConfig, arrays: Mapping[str, Any], tokenizer: Any = None) -> Params:
    """Parameters from their dotted names."""
    shapes = abstract(config, tokenizer=tokenizer)
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[name_of(path)], shapes)


def _count(names: set[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
