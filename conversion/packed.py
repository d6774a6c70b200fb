"""Reads 8-bit and 4-bit matrices that GPTQ, AWQ and compressed-tensors packed, without loss, into kvjax's own arrays.

All three store unsigned codes of 4 or 8 bits, several per int32, lowest bits first. Each group of neighbouring inputs
has a scale and optionally a zero point: `(code - zero) * scale`. They differ in their axes:

| | codes | zeros | source |
| --- | --- | --- | --- |
| GPTQ | [I / 8, O], along inputs | [G, O / 8], one less in version 1 | AutoGPTQ 0.7.1, `qlinear_cuda_old.py` |
| AWQ | [I, O / 8], along outputs in the order 0 2 4 6 1 3 5 7 | [G, O / 8], in that order | AutoAWQ 0.2.9, `packing_utils.py` |
| compressed-tensors | [O, I / 8], along inputs; or int8 [O, I] | [O / 8, G], or int8 [O, G] | compressed-tensors 0.12.2, `pack_quantized.py` |

Here O is outputs, I inputs and G groups; with codes of 8 bits, 4 replaces 8. Reordered groups (GPTQ's `desc_act`,
`actorder: group`) are dequantised to floats, as their inputs are not neighbours. Settings for activations are ignored:
activations remain floats.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import jax
import numpy as np
from pydantic import Field, model_validator

from kvjax.pallas_kernels import QuantizedMatrix

from .checkpoint import FLOATS, StoredTensor
from .errors import CheckpointError, shortened
from .hf_config import PACKED
from .quantised import dequantised, from_codes
from .schema import Strict, checked

_AWQ_ORDER = 0, 4, 1, 5, 2, 6, 3, 7
"""Position in a word of each AWQ output."""

WORDS, BYTES, ORDERS = ("int32",), ("int8",), ("int32", "int64")
"""Stored types: of codes packed in words, of codes with a byte each, and of the inputs' group indices."""

_ROWS_AT_ONCE = 1 << 22
"""Numbers dequantised at a time."""


_GroupSize = Annotated[int, Field(ge=-1, lt=2**31)]
"""Inputs that share a scale; -1 means all of them."""


class _Gptq(Strict):
    bits: Literal[4, 8]
    group_size: _GroupSize = 128
    sym: bool = True
    desc_act: bool = False
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"
    dynamic: dict[str, Any] | None = None


class _Awq(Strict):
    bits: Literal[4]
    group_size: _GroupSize = 128
    zero_point: Literal[True] = True
    version: str = "gemm"


class _Args(Strict):
    num_bits: Literal[4, 8]
    type: Literal["int"] = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group"] | None = None
    group_size: _GroupSize | None = None
    actorder: Literal["group", "dynamic", "weight", "static"] | bool | None = None

    @model_validator(mode="after")
    def _one_strategy(self) -> Self:
        size, grouped = self.group_size, self.grouped
        if size is not None and (size == 0 or (size > 0) is not grouped):
            raise ValueError("it should have a group_size above 0 if its strategy is 'group', and otherwise none or -1")
        if self.ordered and not grouped:
            raise ValueError("it should have no actorder unless its strategy is 'group'")
        return self

    @property
    def scope(self) -> str:
        """What shares a scale: the strategy, or the scope that `group_size` implies if there is no strategy."""
        return self.strategy or ("tensor" if self.group_size is None else "channel" if self.group_size < 0 else "group")

    @property
    def grouped(self) -> bool:
        return self.scope == "group"

    @property
    def ordered(self) -> bool:
        """Whether groups consist of inputs that are not neighbours."""
        return self.actorder in ("group", "dynamic", True)


class _Group(Strict):
    weights: _Args


class _CompressedTensors(Strict):
    format: Literal["pack-quantized", "int-quantized", "naive-quantized"]
    config_groups: dict[str, _Group]
    sparsity_config: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class _Codes:
    """One packed matrix, unpacked on demand.

    Attributes:
        shape: outputs and inputs.
        groups: number of groups, G.
        codes: `codes(start, stop)` returns the codes of these outputs, [rows, I].
        zeros: returns the zero points, [rows, G]; None if they are the middle of the codes' range.
        scales: returns the scales, [rows, G].
        order: returns the group of each input, [I]; None if groups are neighbouring inputs.
    """

    shape: tuple[int, int]
    groups: int
    codes: Callable[[int, int], np.ndarray]
    zeros: Callable[[int, int], np.ndarray] | None
    scales: Callable[[int, int], np.ndarray]
    order: Callable[[], np.ndarray] | None = None


def unpacked(
    tensors: Mapping[str, StoredTensor],
    quantization: Mapping[str, Any] | None,
    source: Path,
    known: Callable[[], Collection[str]],
) -> dict[str, StoredTensor]:
    """Combine the arrays of each packed matrix into one tensor, under the name of the unquantised weight.

    Args:
        tensors: tensors of the checkpoint, by name.
        quantization: `quantization_config` of the configuration.
        source: the configuration's file, for messages.
        known: returns the names of the model's unquantised tensors. It identifies biases that the model does not have,
            which AutoGPTQ wrote as zeros.

    Raises:
        CheckpointError: the packing is not supported, or arrays do not fit each other.
    """
    method = None if quantization is None else quantization.get("quant_method")
    if quantization is None or method not in PACKED:
        return dict(tensors)
    if method == "gptq":
        biases = {name for name in tensors if name.endswith("_proj.bias")}
        needless = biases.difference(known()) if biases else biases
        held = {(f"{name}.needless" if name in needless else name): tensor for name, tensor in tensors.items()}
        arrays = "qzeros", "scales", "g_idx", "bias.needless"
        return _joined(held, "qweight", arrays, _gptq(quantization, source))
    if method == "awq":
        return _joined(tensors, "qweight", ("qzeros", "scales"), _awq(quantization, source))
    return _compressed_tensors(tensors, quantization, source)


_Layout = tuple[int, Callable[[Mapping[str, StoredTensor]], _Codes]]
"""Bits of a code, and a function from a matrix's arrays (by the last parts of their names) to its codes."""


def _gptq(quantization: Mapping[str, Any], source: Path) -> _Layout:
    held = checked(_Gptq, quantization, source, "quantization_config.")
    if held.dynamic:
        raise CheckpointError(f"{source}: GPTQ with settings for single matrices (dynamic) is not supported")
    each = 32 // held.bits
    one_less = held.checkpoint_format == "gptq"

    def layout(arrays: Mapping[str, StoredTensor]) -> _Codes:
        words, scales = _of(arrays, "qweight", WORDS, 2), _of(arrays, "scales", FLOATS, 2)
        inputs, outputs = words.shape[0] * each, words.shape[1]
        groups = _groups(words, inputs, held.group_size)
        _fit(scales, (groups, outputs))
        stored = _of(arrays, "qzeros", WORDS, 2)
        _fit(stored, (groups, outputs // each))

        def codes(start: int, stop: int) -> np.ndarray:
            split = _split(_columns(words, start, stop), held.bits)  # [I / each, rows, each]
            return split.swapaxes(0, 1).reshape(stop - start, inputs)

        def zeros(start: int, stop: int) -> np.ndarray:
            found = _split(_whole(stored), held.bits).reshape(groups, -1)[:, start:stop].T
            return (found + one_less) & np.uint8(2**held.bits - 1)

        order = _order(arrays, "g_idx")

        def scale(start: int, stop: int) -> np.ndarray:
            if order and not held.desc_act and not np.array_equal(order(), np.arange(inputs) // (inputs // groups)):
                raise CheckpointError(
                    f"{words.file}: {source.name} says that groups are of neighbouring inputs (desc_act), but g_idx has another order"
                )
            if "bias.needless" in arrays and _whole(arrays["bias.needless"]).any():
                raise CheckpointError(
                    f"{words.file}: the file has biases other than zero, but the configuration has none"
                )
            if held.sym and (zeros(start, stop) != 2 ** (held.bits - 1)).any():
                raise CheckpointError(
                    f"{stored.file}: {source.name} says that codes are symmetric (sym), but the zero points are not"
                )
            return _columns(scales, start, stop).T

        if order is None and held.desc_act:
            raise CheckpointError(f"{words.file}: desc_act needs the order of inputs (g_idx), which is missing")
        kept = order if held.desc_act else None
        return _Codes((outputs, inputs), groups, codes, None if held.sym else zeros, scale, kept)

    return held.bits, layout


def _awq(quantization: Mapping[str, Any], source: Path) -> _Layout:
    held = checked(_Awq, quantization, source, "quantization_config.")
    if held.version.lower() != "gemm":
        raise CheckpointError(f"{source}: AWQ of version {shortened(held.version)} is not supported; gemm is")

    def layout(arrays: Mapping[str, StoredTensor]) -> _Codes:
        words, scales = _of(arrays, "qweight", WORDS, 2), _of(arrays, "scales", FLOATS, 2)
        inputs, outputs = words.shape[0], words.shape[1] * 8
        groups = _groups(words, inputs, held.group_size)
        _fit(scales, (groups, outputs))
        stored = _of(arrays, "qzeros", WORDS, 2)
        _fit(stored, (groups, outputs // 8))

        def along_outputs(tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
            first = start // 8
            split = _split(_columns(tensor, first, -(-stop // 8)), 4)[..., _AWQ_ORDER]
            return split.reshape(len(split), -1)[:, start - 8 * first : stop - 8 * first].T

        return _Codes(
            (outputs, inputs),
            groups,
            lambda start, stop: along_outputs(words, start, stop),
            lambda start, stop: along_outputs(stored, start, stop),
            lambda start, stop: _columns(scales, start, stop).T,
        )

    return 4, layout


def _compressed_tensors(
    tensors: Mapping[str, StoredTensor], quantization: Mapping[str, Any], source: Path
) -> dict[str, StoredTensor]:
    held = checked(_CompressedTensors, quantization, source, "quantization_config.")
    schemes = [group.weights for group in held.config_groups.values()]
    if not schemes or any(scheme != schemes[0] for scheme in schemes):
        raise CheckpointError(
            f"{source}: {len(schemes)} ways to quantise weights (config_groups); exactly one is supported"
        )
    if (held.sparsity_config or {}).get("format", "dense") != "dense":
        raise CheckpointError(f"{source}: sparse weights (sparsity_config) are not supported")
    args = schemes[0]
    packed = held.format == "pack-quantized"
    each = 32 // args.num_bits if packed else 1
    if not packed and args.num_bits != 8:
        raise CheckpointError(f"{source}: {args.num_bits} bits as {held.format} are not supported; 8 are")

    def unsigned(tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
        array = _rows(tensor, start, stop)
        return _split(array, args.num_bits).reshape(len(array), -1) if packed else array.view(np.uint8) ^ np.uint8(128)

    def layout(arrays: Mapping[str, StoredTensor]) -> _Codes:
        words = _of(arrays, "weight_packed", WORDS, 2) if packed else _of(arrays, "weight", BYTES, 2)
        scales = _of(arrays, "weight_scale", FLOATS)
        outputs, inputs = words.shape[0], words.shape[1] * each
        one = args.scope == "tensor"
        size = args.group_size or -1
        if args.grouped and args.group_size is None and len(scales.shape) == 2:
            size = -(-inputs // max(1, scales.shape[1]))  # no other size gives this number of scales
        groups = _groups(words, inputs, size)
        _fit(scales, (scales.shape if scales.shape in ((), (1,)) else (1,)) if one else (outputs, groups))

        def zeros(start: int, stop: int) -> np.ndarray:
            stored = arrays["weight_zero_point"]
            if one:
                return np.full((stop - start, 1), unsigned(stored, 0, 1).reshape(-1)[0])
            if not packed:
                return unsigned(stored, start, stop)
            return _split(_whole(stored).T, args.num_bits).reshape(groups, -1)[:, start:stop].T

        def scale(start: int, stop: int) -> np.ndarray:
            if args.symmetric and "weight_zero_point" in arrays:
                _check_symmetric(arrays["weight_zero_point"], outputs, args.num_bits, source)
            if "weight_shape" in arrays and (shape := _whole(arrays["weight_shape"]).tolist()) != [outputs, inputs]:
                raise CheckpointError(
                    f"{words.file}: weight_shape is {shape}, but weight_packed holds {[outputs, inputs]}"
                )
            if one:
                return np.broadcast_to(_whole(scales).reshape(1, 1), (stop - start, 1))
            return _rows(scales, start, stop)

        if "weight_shape" in arrays:
            _fit(_of(arrays, "weight_shape", ORDERS, 1), (2,))
        if args.symmetric:
            if "weight_zero_point" in arrays:
                _of(arrays, "weight_zero_point", (*WORDS, *BYTES))
        else:
            rows = -(-outputs // each) if packed else outputs
            zero = _of(arrays, "weight_zero_point", WORDS if packed else BYTES)
            if one and packed:
                raise CheckpointError(f"{zero.file}: a single zero point for a whole packed matrix is not supported")
            _fit(zero, (zero.shape if zero.shape in ((), (1,)) else (1,)) if one else (rows, groups))
        order = _order(arrays, "weight_g_idx")
        if order is None and args.ordered:
            raise CheckpointError(
                f"{words.file}: actorder {args.actorder!r} needs the groups of inputs (weight_g_idx), which are missing"
            )
        codes = lambda start, stop: unsigned(words, start, stop)  # noqa: E731
        return _Codes((outputs, inputs), groups, codes, None if args.symmetric else zeros, scale, order)

    rest = "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale", "input_zero_point"
    return _joined(tensors, "weight_packed" if packed else "weight", rest, (args.num_bits, layout))


def _joined(
    tensors: Mapping[str, StoredTensor], main: str, rest: Sequence[str], how: _Layout
) -> dict[str, StoredTensor]:
    """Replace the arrays of each packed matrix by one tensor. Its arrays end in `main` and `rest`, and include scales."""
    bits, layout = how
    left = dict(tensors)
    for name in tensors:
        base, _, last = name.rpartition(".")
        arrays = {end: tensors[f"{base}.{end}"] for end in (main, *rest) if f"{base}.{end}" in tensors}
        if last != main or not arrays.keys() & {"scales", "weight_scale"}:
            continue
        for end in arrays:
            del left[f"{base}.{end}"]
        if f"{base}.weight" in left:
            raise CheckpointError(f"{tensors[name].file}: {base}.weight is there twice, as floats and packed")
        left[f"{base}.weight"] = _matrix(f"{base}.weight", layout(arrays), bits, arrays)
    return left


def _matrix(name: str, held: _Codes, bits: int, arrays: Mapping[str, StoredTensor]) -> StoredTensor:
    """One packed matrix as a tensor, like those of `checkpoint.join`."""
    outputs, inputs = held.shape
    file = next(iter(arrays.values())).file
    scales = arrays.get("scales") or arrays["weight_scale"]
    if bits == 4 and inputs // held.groups % 2:
        raise CheckpointError(
            f"{file}: {name} has groups of {inputs // held.groups} inputs; with 4 bits, the number has to be even"
        )

    def keep(start: int, stop: int, columns: slice | None = None) -> QuantizedMatrix:
        zeros = None if held.zeros is None else held.zeros(start, stop)
        return from_codes(bits, held.codes(start, stop), held.scales(start, stop), zeros)

    def read(start: int, out: np.ndarray, column: int = 0) -> None:
        if out.shape[1] < inputs:
            rows = np.empty((len(out), inputs), out.dtype)
            read(start, rows)
            out[...] = rows[:, column : column + out.shape[1]]
            return
        stop = start + len(out)
        if held.order is None:
            matrix = keep(start, stop)
            step = max(1, _ROWS_AT_ONCE // inputs)
            for at in range(0, len(out), step):
                part = slice(at, at + step)
                out[part] = dequantised(jax.tree.map(lambda array, part=part: array[part], matrix), out.dtype)
            return
        groups = held.order()
        if groups.shape != (inputs,) or groups.min() < 0 or groups.max() >= held.groups:
            raise CheckpointError(
                f"{file}: {name}: the group indices of its inputs should be {inputs} numbers from 0 to {held.groups - 1}"
            )
        each, counts = inputs // held.groups, np.bincount(groups, minlength=held.groups)
        if len(wrong := np.flatnonzero(counts != each)):
            raise CheckpointError(
                f"{file}: {name}: group {wrong[0]} has {counts[wrong[0]]} inputs by the group indices; each of the "
                f"{held.groups} groups should have {each}"
            )
        zeros = np.float32(1 << bits - 1) if held.zeros is None else held.zeros(start, stop)[:, groups]
        scale = held.scales(start, stop).astype(np.float32)[:, groups]
        out[...] = ((held.codes(start, stop) - np.float32(zeros)) * scale).astype(out.dtype)

    one = from_codes(
        bits,
        np.zeros((1, inputs), np.uint8),
        np.zeros((1, held.groups), FLOATS[scales.dtype]),
        None if held.zeros is None else np.zeros((1, held.groups), np.uint8),
    )
    kept = jax.tree.map(lambda array: jax.ShapeDtypeStruct((outputs, *array.shape[1:]), array.dtype), one)
    nbytes = sum(array.nbytes for array in arrays.values())
    if held.order is not None:
        return StoredTensor(held.shape, f"{kept.kind} in an order of its own", nbytes, file, read)
    return StoredTensor(held.shape, kept.kind, nbytes, file, read, kept, keep)


def _groups(codes: StoredTensor, inputs: int, size: int) -> int:
    """Number of groups of `size` inputs; -1 means one group.

    Raises:
        CheckpointError: `inputs` is not a multiple of `size`.
    """
    size = inputs if size == -1 else size
    if not inputs or not size or (inputs > size and inputs % size):
        raise CheckpointError(
            f"{codes.file}: a packed matrix has {inputs} inputs, which is not a multiple of its group_size {size}"
        )
    return max(1, inputs // size)


def _check_symmetric(zeros: StoredTensor, outputs: int, bits: int, source: Path) -> None:
    """Raise if a symmetric checkpoint has other zero points than the middle. Only old versions store them."""
    held = _whole(zeros)
    if zeros.dtype in WORDS and held.any():
        held = _split(np.atleast_2d(held).T, bits).reshape(-1, len(held) * 32 // bits)[:, :outputs] ^ np.uint8(
            1 << bits - 1
        )
    if held.any():
        raise CheckpointError(
            f"{zeros.file}: {source.name} says that codes are symmetric, but weight_zero_point is not zero"
        )


def _order(arrays: Mapping[str, StoredTensor], end: str) -> Callable[[], np.ndarray] | None:
    """Return a reader of each input's group; None if there is no such array."""
    if end not in arrays:
        return None
    order = _of(arrays, end, ORDERS, 1)
    return lambda: _whole(order)


def _of(arrays: Mapping[str, StoredTensor], end: str, dtypes: Collection[str], ndim: int | None = None) -> StoredTensor:
    if end not in arrays:
        near = next(iter(arrays.values()))
        raise CheckpointError(f"{near.file}: a packed matrix has {', '.join(arrays)}, but no {end}")
    if arrays[end].dtype not in dtypes:
        raise CheckpointError(
            f"{arrays[end].file}: a {end} of a packed matrix is {arrays[end].dtype}; it should have {' or '.join(dtypes)}"
        )
    if ndim is not None and len(arrays[end].shape) != ndim:
        raise CheckpointError(
            f"{arrays[end].file}: a {end} has shape {list(arrays[end].shape)}; it should have {ndim} axes"
        )
    return arrays[end]


def _fit(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or 0 in shape:
        raise CheckpointError(
            f"{tensor.file}: scales or zeros of a packed matrix have shape {list(tensor.shape)}, which does not fit its codes "
            f"and its group_size; it should have {list(shape)}"
        )


def _rows(tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
    """Read rows of a tensor in its stored type."""
    array = np.empty((stop - start, *tensor.shape[1:]), FLOATS.get(tensor.dtype, tensor.dtype))
    tensor.read(start, array)
    return array


def _columns(tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
    """Read columns of a matrix in its stored type."""
    array = np.empty((tensor.shape[0], stop - start), FLOATS.get(tensor.dtype, tensor.dtype))
    tensor.read(0, array, start)
    return array


def _whole(tensor: StoredTensor) -> np.ndarray:
    if not tensor.shape:
        array = np.empty((), FLOATS.get(tensor.dtype, tensor.dtype))
        tensor.read(0, array)
        return array
    return _rows(tensor, 0, tensor.shape[0])


def _split(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack the codes in each int32, along a new last axis."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    split = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts
    return (split & np.uint32(2**bits - 1)).astype(np.uint8)
