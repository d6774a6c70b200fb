"""The format-independent view of a checkpoint, and the code that loads parameters from it.

Each format's module reads headers only and returns a `Checkpoint`. `assemble` then loads the parameters, one tensor at
a time.
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
from kvjax.models.params import Params, abstract, float_of, kind_of, name_of, quantized_shape
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
"""Places a parameter on its devices. It is called with the parameter's name, its shapes, and a reader. The reader
`read()` returns all of the parameter; `read(rows, columns)` returns a part, as `Checkpoint.read` does.
"""

_SCANNED = 1 << 16
"""Numbers scanned at a time, so that they stay in a core's cache."""

_ALIGNMENT = 64
"""XLA's alignment of buffers on CPU, in bytes."""

_QUANTISED = 1 << 22
"""Numbers quantised at a time, which bounds the float32 temporaries."""

KINDS = ("float", *FROM_FLOATS, "as stored")
"""How weight matrices can be stored in memory."""


@dataclasses.dataclass(frozen=True)
class Kinds:
    """How weight matrices are stored in memory. Each value is one of `KINDS`.

    Attributes:
        weights: matrices of the layers.
        embedding: embedding and head.
    """

    weights: str = "float"
    embedding: str = "float"

    def of(self, name: str) -> str:
        """The kind of a parameter, by its dotted name."""
        return kind_of(name, self.weights, self.embedding)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, not read yet.

    Attributes:
        shape: shape that the layout expects, [out, in] for projections.
        dtype: name of the stored type: one of `FLOATS`, or a quantisation such as "Q4_1" or "int8".
        nbytes: size in the file, in bytes.
        file: file or directory that contains the tensor.
        read: `read(start, out, column=0)` fills the host array `out` with rows from `start` and, for a matrix, columns
            from `column`. It converts to the type of `out`.
        kept: shapes of the 8-bit or 4-bit matrix that the tensor is, or can become without loss; None for floats.
        keep: `keep(start, stop, columns=None)` returns these rows as a quantised matrix of host arrays. `columns`
            slices the last axis of the codes (`levels`). If the file cannot be read by such a slice, all columns are
            returned.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: Path
    read: Callable[..., None]
    kept: Any = None
    keep: Callable[..., QuantizedMatrix] | None = None

    def held_as(self, kind: str) -> bool:
        """Whether the tensor's stored codes are kept when this kind is requested."""
        return self.kept is not None and kind in ("as stored", self.kept.kind)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers have been read.

    Attributes:
        source: directory or file, for messages.
        format: "safetensors", "gguf" or "orbax".
        config: the model's configuration.
        tensors: tensors in the files, by the format's own names.
        layout_of: returns the expected layout for a configuration.
        ignored: whether a tensor that is not in the layout can be skipped (recomputable buffers).
        tokenizer: reads the tokenizer; returns None if the checkpoint has none.
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
        """Bytes of each stored type, largest first."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))

    def shapes(self, dtype: np.dtype, kinds: Kinds) -> dict[str, Any]:
        """Shapes of all parameters in memory. Parameters that are not quantised have type `dtype`, see `float_of`.

        Raises:
            CheckpointError: a matrix cannot be stored as the requested kind.
        """
        return {name: self._shape(name, dtype, kinds.of(name)) for name in self._places}

    def _shape(self, name: str, dtype: np.dtype, kind: str) -> Any:
        tensor, start, stop = self._places[name]
        stored = self.tensors[tensor]
        if kind != "float" and stored.held_as(kind):
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct((stop - start, *x.shape[1:]), x.dtype), stored.kept)
        floats = jax.ShapeDtypeStruct((stop - start, *stored.shape[1:]), float_of(name, dtype))
        try:
            return quantized_shape(floats, "float" if kind == "as stored" else kind)
        except ValueError as error:
            raise CheckpointError(f"{self.source}: {name}: {error}") from error

    @property
    def own_dtype(self) -> str:
        """Floating-point type of most weights; bfloat16 for quantised weights of a GGUF file."""
        main = next(iter(self.dtypes), "float32")
        if main in FLOATS or self.format == "gguf":
            return main if main in FLOATS else "bfloat16"
        return next((name for name in self.dtypes if name in FLOATS), "bfloat16")

    @functools.cached_property
    def layout(self) -> Layout:
        """Expected tensors. Its size grows with the depth, so `check` validates the number of layers first."""
        return self.layout_of(self.config)

    @functools.cached_property
    def _places(self) -> dict[str, tuple[str, int, int]]:
        """Parameter name → (tensor, first row, end row), in the order of the layout."""
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
        """Read one parameter as a new host array or quantised matrix, which the caller owns.

        Args:
            parameter: dotted name.
            dtype: type of the model, for a result that is not quantised.
            kind: one of `KINDS`.
            rows: range of at least one row; None reads all rows.
            columns: range of the last axis (of the codes, if the matrix is quantised); None reads all columns. All
                columns are returned if the matrix is quantised while it is read, or if the file cannot be read by such
                a slice.
        """
        tensor, start, stop = self._places[parameter]
        stored = self.tensors[tensor]
        if rows is not None:
            start, stop = start + rows.start, start + rows.stop
        try:
            with np.errstate(all="ignore"):  # `assemble` reports non-finite weights once for the whole model
                if stored.keep is not None and stored.held_as(kind):
                    return stored.keep(start, stop, columns)
                if kind in FROM_FLOATS:
                    return _quantised(stored, start, stop, kind)
                inner = stored.shape[1:] if columns is None else (columns.stop - columns.start,)
                out = _aligned((stop - start, *inner), np.dtype(float_of(parameter, dtype)))
                stored.read(start, out, 0 if columns is None else columns.start)
        except CheckpointError:
            raise
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{stored.file}: tensor {tensor} cannot be read ({told(error)})") from error
        return out

    def check(self) -> None:
        """Compare the tensors of the checkpoint with those that its configuration requires.

        Raises:
            CheckpointError: tensors are missing, unexpected or wrongly shaped. Only headers are read.
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
    """Raise `ValueError` unless each is one of `KINDS` or None."""
    for name, kind in (("weights", weights), ("embedding", embedding)):
        if kind is not None and kind not in KINDS:
            raise ValueError(f"{name}={kind!r} is not one of {', '.join(KINDS)}")


def kinds_of(checkpoint: Checkpoint, weights: str | None, embedding: str | None) -> Kinds:
    """Resolve the arguments of `load` to kinds, with defaults that depend on the format."""
    if weights is None:
        weights = "float" if checkpoint.format == "gguf" else "as stored"
    if embedding is None:
        embedding = "as stored" if weights == "as stored" else "float"
    return Kinds(weights, embedding)


def expected_shapes(config: ModelConfig, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the layout. Its rows are those of its parameters, stacked."""
    shapes = parameter_shapes(config)
    return {tensor: (sum(shapes[name][0] for name in held), *shapes[held[0]][1:]) for tensor, held in layout.items()}


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter, by its dotted name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(abstract(config))
    return {name_of(path): leaf.shape for path, leaf in leaves}


def join(tensors: Mapping[str, StoredTensor], file: Path) -> dict[str, StoredTensor]:
    """Combine the arrays of each 8-bit or 4-bit matrix (see `quantised.parts`) into one tensor.

    Raises:
        CheckpointError: the arrays of a matrix do not fit each other.
    """
    left = dict(tensors)
    for name, arrays in matrices(tensors).items():
        for field in arrays:
            del left[f"{name}.{field}"]
        if name in left:
            raise CheckpointError(f"{file}: tensor {name} is there twice, as floats and quantised")
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
        read_dequantised(keep, start, out, column)

    return StoredTensor(
        kept.shape, kept.kind, sum(array.nbytes for array in arrays.values()), arrays["levels"].file, read, kept, keep
    )


def read_dequantised(keep: Callable[[int, int], QuantizedMatrix], start: int, out: np.ndarray, column: int) -> None:
    """Fill `out` with rows of a quantised matrix, a few at a time. Arguments as for `StoredTensor`."""
    step = max(1, _QUANTISED // out.shape[1])
    for begin in range(0, len(out), step):
        end = min(begin + step, len(out))
        rows = dequantised(keep(start + begin, start + end), out.dtype)
        out[begin:end] = rows[:, column : column + out.shape[1]]


def _quantised(stored: StoredTensor, start: int, stop: int, kind: str) -> QuantizedMatrix:
    """Quantise a matrix of floats, a few rows at a time."""
    step = max(1, _QUANTISED // stored.shape[1])
    pieces = []
    for begin in range(start, stop, step):
        rows = np.empty((min(step, stop - begin), stored.shape[1]), np.float32)
        stored.read(begin, rows)
        pieces.append(FROM_FLOATS[kind](rows))
    return pieces[0] if len(pieces) == 1 else jax.tree.map(lambda *each: np.concatenate(each), *pieces)


def nbytes_of(shapes: Any) -> int:
    """Total bytes of the arrays in a pytree of shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def assemble(
    checkpoint: Checkpoint,
    dtype: str,
    put: Put | None = None,
    progress: bool | None = None,
    kinds: Kinds | None = None,
) -> Params:
    """Load the parameters of a checkpoint, one tensor at a time.

    Host memory holds at most one tensor in addition to what is already on the device. A warning reports NaN or infinite
    weights at the end. Such a model computes only NaN, but a few such weights may be worth inspecting.

    Args:
        checkpoint: a checkpoint that one of the formats opened.
        dtype: type of the parameters, one of `FLOATS`.
        put: places a parameter on its devices; None uses JAX's default device.
        progress: see `kvjax.conversion.load`.
        kinds: how matrices are stored in memory; floats by default.

    Raises:
        CheckpointError: as `Checkpoint.check`, or a file is truncated or cannot be decoded.
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
            # Waiting keeps only one tensor in flight.
            arrays[name] = jax.block_until_ready(jax.device_put(whole()) if put is None else put(name, shape, whole))
            meter.advance(nbytes_of(shape))
    if lost:
        warnings.warn(
            f"{checkpoint.source}: {sum(lost.values())} weights are NaN or infinite in {wanted}, the first of them in {next(iter(lost))}; "
            "the model's outputs will be NaN. The file is damaged, or its numbers exceed this type",
            stacklevel=2,
        )
    return unflatten(checkpoint.config, arrays, tokenizer)


def count_not_finite(array: np.ndarray) -> int:
    """Count NaN and infinite numbers.

    Reads the bits, a few pages at a time. It takes 0.1 s for 500 MB in memory, an eighth of the time of `np.isfinite`.
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
    """Allocate an uninitialised array that JAX on CPU can use without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


def unflatten(config: ModelConfig, arrays: Mapping[str, Any], tokenizer: Any = None) -> Params:
    """Build the parameters from arrays by dotted name."""
    shapes = abstract(config, tokenizer=tokenizer)
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[name_of(path)], shapes)


def _count(names: set[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
