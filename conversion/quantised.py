"""Quantised matrices on the host: made from floats, repacked from GGUF blocks, and assembled from a file's arrays."""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.params import quantized_shape
from kvjax.pallas_kernels import GroupedMatrix, Int8Matrix, QuantizedMatrix

_LEVELS = ".levels"
"""Suffix of the array of codes, which every quantised matrix has."""

FIELDS = ("levels", "scale", "minimum", "scale_unit", "minimum_unit")
"""Last parts of the names of all arrays that a matrix can have."""

_SCALES = ("float32", "float16", "bfloat16")
_UNITS = ("int8", "uint8")

_IQ4_LEVELS = np.array(gguf.quants.IQ4_NL.kvalues, np.int8)
"""Values of the codes of GGUF's IQ4_NL and IQ4_XS."""


def to_int8(rows: np.ndarray) -> Int8Matrix:
    """Quantise a float32 matrix [rows, inputs] symmetrically, with one scale per row."""
    scale = np.abs(rows).max(1) / np.float32(127)
    levels = np.rint(rows / np.where(scale == 0, np.float32(1), scale)[:, None])
    return Int8Matrix(levels.astype(np.int8), scale)  # pyright: ignore[reportArgumentType]


def to_int4(rows: np.ndarray) -> GroupedMatrix:
    """Quantise a float32 matrix [rows, inputs] by the minimum and maximum of each group, rounded as by GGUF's Q4_1."""
    shape = quantized_shape(jax.ShapeDtypeStruct(rows.shape, jnp.float32), "int4")
    groups = shape.levels.shape[-1]
    numbers = rows.reshape(len(rows), groups, -1)
    least = numbers.min(-1)
    scale = ((numbers.max(-1) - least) / np.float32(15)).astype(np.float16)
    least = least.astype(np.float16)
    step = np.where(scale == 0, np.float32(1), scale.astype(np.float32))
    levels = np.rint((numbers - least.astype(np.float32)[..., None]) / step[..., None]).clip(0, 15)
    return _grouped(levels.astype(np.uint8), scale, least)


FROM_FLOATS: Mapping[str, Callable[[np.ndarray], QuantizedMatrix]] = {"int8": to_int8, "int4": to_int4}
"""Kind → function that quantises a float matrix."""


def from_blocks(kind: str, rows: np.ndarray) -> GroupedMatrix:
    """Repack rows of a GGUF tensor without loss.

    Args:
        kind: one of `BLOCKS`.
        rows: uint8, [rows, bytes per row].
    """
    return BLOCKS[kind](rows.reshape(len(rows), -1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]))


def from_codes(bits: int, codes: np.ndarray, scale: np.ndarray, zeros: np.ndarray | None) -> QuantizedMatrix:
    """Build a matrix from unsigned codes, `(code - zero) * scale`, without loss.

    Args:
        bits: 4 or 8.
        codes: uint8, [rows, inputs].
        scale: floats, [rows, groups].
        zeros: zero points, uint8, [rows, groups]; None if they are the middle of the range, 8 or 128.
    """
    rows, groups = scale.shape
    levels = codes.reshape(rows, groups, -1)
    if bits == 8:
        levels = (levels ^ np.uint8(128)).view(np.int8)
        if zeros is None and groups == 1:
            return Int8Matrix(np.ascontiguousarray(levels[:, 0]), scale[:, 0].astype(np.float32))  # pyright: ignore[reportArgumentType]
    scale = np.ascontiguousarray(scale)
    if zeros is None:
        return _grouped(levels, scale)
    # Zero points are stored in units of the scale: rounding their product to a float would lose precision.
    if bits == 4:
        return _grouped(levels, scale, -np.ascontiguousarray(zeros).view(np.int8), None, scale)
    return _grouped(levels, scale, (np.ascontiguousarray(zeros) ^ np.uint8(128)).view(np.int8), None, -scale)


def mxfp4(blocks: np.ndarray, scale: np.ndarray) -> GroupedMatrix:
    """Build a matrix from blocks of MXFP4, without loss.

    Args:
        blocks: uint8, [rows, groups, 16], two neighbouring inputs in a byte, the first in its low half.
        scale: exponents, uint8, [rows, groups].
    """
    codes = np.stack([blocks & np.uint8(15), blocks >> np.uint8(4)], axis=-1).reshape(*blocks.shape[:2], -1)
    return _grouped(codes, np.ascontiguousarray(scale))


@functools.lru_cache(maxsize=256)
def blocks_shape(kind: str, outputs: int, inputs: int) -> Any:
    """Shapes of `from_blocks` for a whole tensor."""
    numbers, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    one = from_blocks(kind, np.zeros((1, inputs // numbers * nbytes), np.uint8))
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct((outputs, *array.shape[1:]), array.dtype), one)


def dequantised(matrix: QuantizedMatrix, dtype: np.dtype) -> np.ndarray:
    """Dequantise a matrix on the host."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]), np.errstate(all="ignore"):
        return np.asarray(jax.tree.map(jnp.asarray, matrix).dequantized(dtype))


def parts(name: str, held: Any) -> dict[str, Any]:
    """Arrays of a parameter by their names in files: `name` alone, or `name.field` for each array of a quantised matrix."""
    if not isinstance(held, QuantizedMatrix):
        return {name: held}
    leaves, _ = jax.tree_util.tree_flatten_with_path(held)
    return {f"{name}.{jax.tree_util.keystr(path, simple=True)}": leaf for path, leaf in leaves}


def matrices(names: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Find the quantised matrices among arrays by name. Returns matrix name → field → array."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        if name.endswith(_LEVELS):
            base = name.removesuffix(_LEVELS)
            found[base] = {field: names[f"{base}.{field}"] for field in FIELDS if f"{base}.{field}" in names}
    return found


def assembled(arrays: Mapping[str, Any]) -> QuantizedMatrix:
    """Build a matrix from its arrays, or from their shapes.

    Raises:
        ValueError: the arrays do not form a matrix.
    """
    shapes = {field: tuple(array.shape) for field, array in arrays.items()}
    types = {field: np.dtype(array.dtype).name for field, array in arrays.items()}
    levels, scale = shapes["levels"], shapes.get("scale")
    if len(levels) == 2:
        fits = set(arrays) == {"levels", "scale"} and scale == levels[:1] and types["levels"] == "int8"
        if fits and types["scale"] in _SCALES:
            return Int8Matrix(**arrays)
    elif len(levels) == 3 and types["levels"] in ("int8", "uint8") and all(levels):
        wanted = levels[::2]
        fits = scale == wanted and shapes.get("minimum", wanted) == wanted
        for field in ("scale", "minimum"):
            unit = shapes.get(f"{field}_unit")
            if unit is not None:
                whole = len(unit) == 2 and unit[0] == levels[0] and unit[1] and not operator.mod(levels[2], unit[1])
                fits &= bool(whole) and types.get(field) in _UNITS and types[f"{field}_unit"] in _SCALES
            elif field in types:
                exponents = field == "scale" and types["levels"] == types[field] == "uint8" and "minimum" not in types
                fits &= types[field] in _SCALES or exponents
        if fits:
            return GroupedMatrix(**arrays)
    told = ", ".join(f"{field} {types[field]}{list(shape)}" for field, shape in shapes.items())
    raise ValueError(f"its arrays do not make a matrix: {told}")


def _grouped(levels: np.ndarray, *rest: np.ndarray | None) -> GroupedMatrix:
    """Build a matrix from codes [rows, groups, members]. Unsigned codes are packed into 4 bits."""
    if levels.dtype == np.uint8:
        half = levels.shape[-1] // 2
        levels = levels[..., :half] | levels[..., half:] << np.uint8(4)
    return GroupedMatrix(np.ascontiguousarray(levels.swapaxes(1, 2)), *rest)  # pyright: ignore[reportArgumentType]


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """Read the float16 at a byte of each block."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]


def _q8_0(blocks: np.ndarray) -> GroupedMatrix:
    return _grouped(np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _half(blocks, 0))


def _q4_0(blocks: np.ndarray) -> GroupedMatrix:
    return _grouped(_nibbles(blocks[..., 2:]), _half(blocks, 0))


def _q4_1(blocks: np.ndarray) -> GroupedMatrix:
    return _grouped(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: np.ndarray) -> GroupedMatrix:
    levels = _fives(blocks[..., 2:6], blocks[..., 6:])
    return _grouped(levels - np.int8(16), _half(blocks, 0))


def _q5_1(blocks: np.ndarray) -> GroupedMatrix:
    return _grouped(_fives(blocks[..., 4:8], blocks[..., 8:]), _half(blocks, 0), _half(blocks, 2))


def _q2_k(blocks: np.ndarray) -> GroupedMatrix:
    scale, least = (
        part.reshape(len(blocks), -1) for part in (blocks[..., :16] & np.uint8(15), blocks[..., :16] >> np.uint8(4))
    )
    levels = _pairs(blocks[..., 16:80]).reshape(len(blocks), -1, 16)
    return _grouped(levels, scale, least, _half(blocks, 80), -_half(blocks, 82))


def _q3_k(blocks: np.ndarray) -> GroupedMatrix:
    low = _pairs(blocks[..., 32:96])  # [..., two halves of a block, four pairs of bits, 32 bytes]
    high = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    levels = low.reshape(len(blocks), -1, 16) + np.uint8(4) * high.reshape(len(blocks), -1, 16)
    packed = blocks[..., 96:108]
    units = _nibbles(packed[..., :8]) | _pairs(packed[..., 8:], 4).reshape(*blocks.shape[:2], 16) << np.uint8(4)
    scale = (units.astype(np.int8) - np.int8(32)).reshape(len(blocks), -1)
    # The codes' middle is 4; that of a 4-bit matrix is 8.
    return _grouped(levels + np.uint8(4), scale, None, _half(blocks, 108))


def _iq4_nl(blocks: np.ndarray) -> GroupedMatrix:
    return _grouped(_IQ4_LEVELS[_nibbles(blocks[..., 2:])], _half(blocks, 0))


def _iq4_xs(blocks: np.ndarray) -> GroupedMatrix:
    levels = _IQ4_LEVELS[_nibbles(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16))]
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    high = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16) >> shifts & np.uint16(3)
    low = np.stack([blocks[..., 4:8] & np.uint8(15), blocks[..., 4:8] >> np.uint8(4)], axis=-1)
    scale = (low.reshape(high.shape) | high.astype(np.uint8) << np.uint8(4)).astype(np.int8) - np.int8(32)
    return _grouped(levels.reshape(len(blocks), -1, 32), scale.reshape(len(blocks), -1), None, _half(blocks, 0))


def _mxfp4(blocks: np.ndarray) -> GroupedMatrix:
    return _grouped(_nibbles(blocks[..., 1:]), np.ascontiguousarray(blocks[..., 0]))


def _q4_k(blocks: np.ndarray) -> GroupedMatrix:
    levels = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)).reshape(len(blocks), -1, 32)
    return _grouped(levels, *_k_scales(blocks))


def _q5_k(blocks: np.ndarray) -> GroupedMatrix:
    low = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)).reshape(*blocks.shape[:2], 8, 32)
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    levels = (low | high << np.uint8(4)).astype(np.int8)
    return _grouped(levels.reshape(len(blocks), -1, 32), *_k_scales(blocks))


def _q6_k(blocks: np.ndarray) -> GroupedMatrix:
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)).reshape(*blocks.shape[:2], 2, 4, 32)
    bits = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = bits >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)
    levels = (low | high << np.uint8(4)).astype(np.int8) - np.int8(32)
    scale = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).reshape(len(blocks), -1)
    return _grouped(levels.reshape(len(blocks), -1, 16), scale, None, _half(blocks, 208))


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Low halves of the bytes along the last axis, followed by the high halves."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


def _fives(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Codes of 5 bits: the highest bits in 4 bytes, the others as in `_nibbles`."""
    bits = np.unpackbits(np.ascontiguousarray(high), axis=-1, bitorder="little")
    return (_nibbles(low) | bits << np.uint8(4)).astype(np.int8)


def _pairs(packed: np.ndarray, width: int = 32) -> np.ndarray:
    """Pairs of bits, `width` bytes at a time: the lowest pair of every byte, then the next."""
    rows = packed.reshape(*packed.shape[:2], -1, 1, width)
    return rows >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Scales and minima with their units. The file subtracts minima, and kvjax adds them."""
    packed = np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12)
    scale, least = (each.reshape(len(blocks), -1) for each in gguf.quants.Q4_K.get_scale_min(packed))
    return scale, least, _half(blocks, 0), -_half(blocks, 2)


BLOCKS: Mapping[str, Callable[[np.ndarray], GroupedMatrix]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""GGUF block types that are repacked without loss, with their functions."""
