"""What every checkpoint format looks like to the loader, and the loader itself.

A format's module opens its files, reads headers only, and describes what it found as a `Checkpoint`. `assemble` then fills
the parameters one tensor at a time.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from kvjax.models.config import ModelConfig
from kvjax.models.params import Params, abstract, name_of

from .errors import CheckpointError, listed, told
from .layout import Layout
from .progress import Meter

FLOATS: Mapping[str, Any] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Floating-point types that parameters may have."""

Put = Callable[[str, np.ndarray], jax.Array]
"""Puts the parameter of a name where it belongs."""

_SCANNED = 1 << 16
"""Numbers looked at together: they stay in a core's cache."""

_ALIGNMENT = 64
"""Bytes; XLA's alignment of buffers on CPU."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, not read yet.

    Attributes:
        shape: as the layout expects it, [out, in] for projections.
        dtype: name of the stored type: one of `FLOATS`, or a quantisation such as "Q4_1".
        nbytes: bytes in the file.
        file: where it is.
        read: `read(start, out)` fills a host array with as many rows as it has, from row `start`, converting to its type.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: Path
    read: Callable[[int, np.ndarray], None]


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

    def size(self, dtype: np.dtype) -> int:
        """Bytes of all parameters in a type."""
        return sum(math.prod(shape) for shape in parameter_shapes(self.config).values()) * dtype.itemsize

    @property
    def own_dtype(self) -> str:
        """The floating-point type that most of the weights have; bfloat16 for quantised ones."""
        main = next(iter(self.dtypes), "float32")
        return main if main in FLOATS else "bfloat16"

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

    def read(self, parameter: str, dtype: np.dtype) -> np.ndarray:
        """One parameter as a new host array, the caller's own."""
        tensor, start, stop = self._places[parameter]
        stored = self.tensors[tensor]
        out = _aligned((stop - start, *stored.shape[1:]), dtype)
        try:
            with np.errstate(all="ignore"):  # what is not finite is told by `read_all`, for the whole model at once
                stored.read(start, out)
        except CheckpointError:
            raise
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{stored.file}: tensor {tensor} cannot be read ({told(error)})") from error
        return out

    def read_all(self, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
        """Every parameter with its name, one at a time.

        Warns at the end of weights that are NaN or infinite: such a model computes nothing but NaN, yet a few of them may be
        worth a look.
        """
        lost, first = 0, ""
        for name in self._places:
            array = self.read(name, dtype)
            if count := count_not_finite(array):
                lost, first = lost + count, first or name
            yield name, array
            del array  # before the next one is read
        if lost:
            warnings.warn(
                f"{self.source}: {lost} weights are NaN or infinite in {dtype}, the first of them in {first}; "
                "what the model computes will be NaN. The file is damaged, or its numbers exceed this type",
                stacklevel=2,
            )

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


def expected_shapes(config: ModelConfig, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the layout: the rows of its parameters added up."""
    shapes = parameter_shapes(config)
    return {tensor: (sum(shapes[name][0] for name in held), *shapes[held[0]][1:]) for tensor, held in layout.items()}


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by its dotted name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(abstract(config))
    return {name_of(path): leaf.shape for path, leaf in leaves}


def assemble(checkpoint: Checkpoint, dtype: str, put: Put | None = None, progress: bool | None = None) -> Params:
    """Fill the parameters from a checkpoint, one tensor after another.

    Host memory never holds more than one tensor beside what is already on the device.

    Args:
        checkpoint: headers read by one of the formats.
        dtype: type of the parameters, one of `FLOATS`.
        put: what puts a parameter of a name on its device; by default on JAX's own.
        progress: see `kvjax.conversion.load`.

    Raises:
        CheckpointError: as `Checkpoint.check`, or a file that ends early or does not decode.
    """
    checkpoint.check()
    wanted = FLOATS[dtype]
    tokenizer = checkpoint.tokenizer()
    arrays: dict[str, jax.Array] = {}
    with Meter(f"Loading {checkpoint.source.name}", checkpoint.size(wanted), progress) as meter:
        for name, array in checkpoint.read_all(wanted):
            # Waiting keeps one tensor in flight.
            arrays[name] = (jax.device_put(array) if put is None else put(name, array)).block_until_ready()
            meter.advance(array.nbytes)
            del array
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
