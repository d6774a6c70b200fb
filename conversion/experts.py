"""Experts of a Hugging Face checkpoint as one tensor per kind of matrix, one expert below the other.

A checkpoint has one tensor per expert, such as ``mlp.experts.3.gate_proj.weight`` [F, D]. transformers 5 may write two
tensors of all experts: ``mlp.experts.gate_up_proj`` [E, 2F, D], in which an expert's gate comes before its up projection,
and ``mlp.experts.down_proj`` [E, D, F]. Those of gpt-oss are [E, D, 2F], in which rows of gate and up alternate, and
[E, F, D], or in MXFP4, untransposed. Here, both become ``mlp.experts.gate_proj.weight`` [E·F, D] and its like, which are
read from the stored tensors on demand.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.config import ModelConfig

from .checkpoint import StoredTensor, read_dequantised
from .errors import CheckpointError
from .hf_config import FAMILIES
from .quantised import mxfp4

_READ_AT_ONCE = 1 << 24
"""Numbers of a merged tensor that are read at a time."""


def stacked(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Stack the experts of each layer. Other tensors stay as they are.

    Raises:
        CheckpointError: experts of a layer are missing, or have different shapes.
    """
    names = FAMILIES[config.family].experts
    if names is None:
        return dict(tensors)
    gate, up, down = names.matrices
    single = re.compile(rf"(.*\.{names.prefix}\.experts)\.(\d+)\.({gate}|{up}|{down})\.weight")
    merged = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)(_bias|_blocks)?")
    router = re.compile(r"(.*)\.mlp\.gate\.weight")  # transformers 5 has this name in every family
    found: dict[str, StoredTensor] = {}
    experts: dict[str, dict[int, StoredTensor]] = {}
    for name, tensor in tensors.items():
        if match := single.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = tensor
        elif (match := merged.fullmatch(name)) and len(tensor.shape) == _AXES[match[3]]:
            base = f"{match[1]}.{names.prefix}.experts"
            parts = [(gate, 0, 2), (up, 1, 2)] if match[2] == "gate_up_proj" else [(down, 0, 1)]
            last = "bias" if match[3] == "_bias" else "weight"
            for part, at, of in parts:
                if match[3] == "_bias":
                    stored = _part_of_bias(tensor, at, of)
                elif match[3] == "_blocks":
                    stored = _part_of_blocks(name, tensor, tensors, at, of)
                else:
                    stored = _part(tensor, at, of, names.transposed)
                found[f"{base}.{part}.{last}"] = stored
        elif name.endswith("_scales") and f"{name.removesuffix('scales')}blocks" in tensors:
            continue  # read with the blocks
        elif (match := router.fullmatch(name)) and names.router == "gate":
            found[f"{match[1]}.{names.prefix}.gate.weight"] = tensor
        else:
            found[name] = tensor
    return found | {name: _stack(name, own) for name, own in experts.items()}


_AXES = {None: 3, "_bias": 2, "_blocks": 4}
"""Axes of a tensor of all experts, by the end of its name."""


def merged(config: ModelConfig, name: str) -> tuple[str, tuple[str, ...]] | None:
    """The tensor of all experts that a tensor of the layout is written in, and all tensors of the layout in it.

    None if the family's experts are written apart, or the tensor is not one of experts.
    """
    names = FAMILIES[config.family].experts
    if names is None or not names.transposed:
        return None
    gate, up, down = names.matrices
    match = re.fullmatch(rf"(.*\.experts\.)({gate}|{up}|{down})\.(weight|bias)", name)
    if match is None:
        return None
    members = (down,) if match[2] == down else (gate, up)
    end = "_bias" if match[3] == "bias" else ""
    whole = "down_proj" if match[2] == down else "gate_up_proj"
    return f"{match[1]}{whole}{end}", tuple(f"{match[1]}{member}.{match[3]}" for member in members)


def merge(experts: int, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Merge stacked matrices [E·R, I], or biases [E·R], of all experts into one array [E, I, P·R], or [E, P·R].

    Rows of the P parts alternate.
    """
    apart = [part.reshape(experts, -1, *part.shape[1:]) for part in parts]
    rows = np.stack(apart, axis=2).reshape(experts, -1, *parts[0].shape[1:])
    return np.ascontiguousarray(rows if rows.ndim == 2 else rows.swapaxes(1, 2))


def experts_of(config: ModelConfig, name: str) -> int:
    """Number of experts that a tensor of the layout stacks; 0 for other tensors."""
    names = FAMILIES[config.family].experts
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.(?:weight|bias)", name)
    if names is None or match is None or match[2] not in {f"{names.prefix}.experts.{x}" for x in names.matrices}:
        return 0
    return getattr(config.layers[int(match[1])].mlp, "experts", 0)


def expert_name(name: str, expert: int) -> str:
    """Name of one expert's tensor, from that of the stacked tensor."""
    base, matrix, last = name.rsplit(".", 2)
    return f"{base}.{expert}.{matrix}.{last}"


def _stack(name: str, own: Mapping[int, StoredTensor]) -> StoredTensor:
    """One tensor of all experts, from one tensor per expert."""
    tensors = [own[i] for i in sorted(own)]
    one = tensors[0]
    if sorted(own) != list(range(len(own))):
        missing = min(set(range(max(own) + 1)) - own.keys())
        raise CheckpointError(f"{one.file}: expert {missing} of {name} is missing")
    if any((each.shape, each.dtype, each.kept) != (one.shape, one.dtype, one.kept) for each in tensors):
        raise CheckpointError(f"{one.file}: experts of {name} have different shapes or types")
    if len(one.shape) != 2:
        raise CheckpointError(f"{one.file}: experts of {name} have shape {list(one.shape)}; they should be matrices")
    size = one.shape[0]

    def pieces(start: int, stop: int) -> list[tuple[StoredTensor, int, int]]:
        """The experts that have these rows, each with its first row and the end of its rows."""
        last = -(-stop // size)
        return [(tensors[i], max(start - i * size, 0), min(stop - i * size, size)) for i in range(start // size, last)]

    def read(start: int, out: np.ndarray, column: int = 0) -> None:
        at = 0
        for tensor, first, last in pieces(start, start + len(out)):
            tensor.read(first, out[at : at + last - first], column)
            at += last - first

    def keep(start: int, stop: int, columns: slice | None = None) -> Any:
        kept = [tensor.keep(first, last, columns) for tensor, first, last in pieces(start, stop) if tensor.keep]
        return jax.tree.map(lambda *each: np.concatenate(each), *kept)

    shape, nbytes = (len(tensors) * size, one.shape[1]), sum(each.nbytes for each in tensors)
    if one.kept is None or one.keep is None:
        return StoredTensor(shape, one.dtype, nbytes, one.file, read)
    kept = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(tensors) * x.shape[0], *x.shape[1:]), x.dtype), one.kept)
    return StoredTensor(shape, one.dtype, nbytes, one.file, read, kept, keep)


def _part(tensor: StoredTensor, at: int, of: int, transposed: bool) -> StoredTensor:
    """Matrices of all experts that are part `at` of `of` parts of a merged tensor.

    Parts are equal ranges along the second axis. Of a `transposed` tensor, part `at` is every `of`-th column from column
    `at` on.
    """
    experts, rows, columns = (tensor.shape[i] for i in ((0, 2, 1) if transposed else (0, 1, 2)))
    size = rows // of

    def read(start: int, out: np.ndarray, column: int = 0) -> None:
        step = max(1, _READ_AT_ONCE // (rows * (columns if transposed else out.shape[1])))
        stop = start + len(out)
        for expert in range(start // size, -(-stop // size), step):
            last = min(expert + step, -(-stop // size))
            if transposed:
                whole = np.empty((last - expert, columns, rows), out.dtype)
                tensor.read(expert, whole)
                parts = whole[:, column : column + out.shape[1], at::of].swapaxes(1, 2)
            else:
                whole = np.empty((last - expert, rows, out.shape[1]), out.dtype)
                tensor.read(expert, whole, column)
                parts = whole[:, at * size : (at + 1) * size]
            own = parts.reshape(-1, out.shape[1])
            begin, end = max(expert * size, start), min(last * size, stop)
            out[begin - start : end - start] = own[begin - expert * size : end - expert * size]

    return dataclasses.replace(tensor, shape=(experts * size, columns), nbytes=tensor.nbytes // of, read=read)


def _part_of_bias(tensor: StoredTensor, at: int, of: int) -> StoredTensor:
    """Biases of all experts, expert after expert: every `of`-th one of each expert from number `at` on."""
    experts, rows = tensor.shape
    size = rows // of

    def read(start: int, out: np.ndarray, column: int = 0) -> None:
        first, last = start // size, -(-(start + len(out)) // size)
        whole = np.empty((last - first, rows), out.dtype)
        tensor.read(first, whole)
        out[...] = whole[:, at::of].reshape(-1)[start - first * size :][: len(out)]

    return dataclasses.replace(tensor, shape=(experts * size,), nbytes=tensor.nbytes // of, read=read)


def _part_of_blocks(
    name: str, blocks: StoredTensor, tensors: Mapping[str, StoredTensor], at: int, of: int
) -> StoredTensor:
    """Matrices of all experts in MXFP4: every `of`-th row of each expert from row `at` on.

    Blocks are uint8 [E, R, G, 16] with two neighbouring inputs in a byte, the first in its low half. Scales are uint8
    [E, R, G].
    """
    scales = tensors.get(f"{name.removesuffix('blocks')}scales")
    experts, rows, groups, width = blocks.shape
    if (
        scales is None
        or scales.shape != (experts, rows, groups)
        or {scales.dtype, blocks.dtype} != {"uint8"}
        or width != 16
    ):
        told = "missing" if scales is None else f"{scales.dtype} {list(scales.shape)}"
        raise CheckpointError(
            f"{blocks.file}: {name} is {blocks.dtype} {list(blocks.shape)} and its scales are {told}; MXFP4 needs uint8 [E, R, G, 16] "
            "and [E, R, G]"
        )
    size = rows // of

    def keep(start: int, stop: int, columns: slice | None = None) -> Any:
        first, last = start // size, -(-stop // size)
        whole = (
            np.empty((last - first, rows, groups, width), np.uint8),
            np.empty((last - first, rows, groups), np.uint8),
        )
        for tensor, array in zip((blocks, scales), whole, strict=True):
            tensor.read(first, array)
        own = slice(start - first * size, stop - first * size)
        codes, scale = (array[:, at::of].reshape(-1, *array.shape[2:])[own] for array in whole)
        part = slice(None) if columns is None else columns
        return mxfp4(codes[:, part], scale[:, part])

    def read(start: int, out: np.ndarray, column: int = 0) -> None:
        read_dequantised(keep, start, out, column)

    kept = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((experts * size, *x.shape[1:]), x.dtype),
        mxfp4(np.zeros((1, groups, width), np.uint8), np.zeros((1, groups), np.uint8)),
    )
    nbytes = (blocks.nbytes + scales.nbytes) // of
    return StoredTensor((experts * size, 32 * groups), "MXFP4", nbytes, blocks.file, read, kept, keep)
