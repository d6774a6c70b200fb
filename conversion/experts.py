"""Experts of a Hugging Face checkpoint as one tensor per kind of matrix, one expert below the other.

A checkpoint has one tensor per expert, such as ``mlp.experts.3.gate_proj.weight`` [F, D]. transformers 5 may write two
tensors of all experts: ``mlp.experts.gate_up_proj`` [E, 2F, D], in which an expert's gate comes before its up projection,
and ``mlp.experts.down_proj`` [E, D, F]. Here, both become ``mlp.experts.gate_proj.weight`` [E·F, D] and its like, which
are read from the stored tensors on demand.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from kvjax.config import ModelConfig

from .checkpoint import StoredTensor
from .errors import CheckpointError
from .hf_config import FAMILIES

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
    merged = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)")
    router = re.compile(r"(.*)\.mlp\.gate\.weight")  # transformers 5 has this name in every family
    found: dict[str, StoredTensor] = {}
    experts: dict[str, dict[int, StoredTensor]] = {}
    for name, tensor in tensors.items():
        if match := single.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = tensor
        elif (match := merged.fullmatch(name)) and len(tensor.shape) == 3:
            base = f"{match[1]}.{names.prefix}.experts"
            parts = [(gate, 0, 2), (up, 1, 2)] if match[2] == "gate_up_proj" else [(down, 0, 1)]
            found |= {f"{base}.{part}.weight": _part(tensor, at, of) for part, at, of in parts}
        elif match := router.fullmatch(name):
            found[f"{match[1]}.{names.prefix}.gate.weight"] = tensor
        else:
            found[name] = tensor
    return found | {name: _stack(name, own) for name, own in experts.items()}


def experts_of(config: ModelConfig, name: str) -> int:
    """Number of experts that a tensor of the layout stacks; 0 for other tensors."""
    names = FAMILIES[config.family].experts
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.weight", name)
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


def _part(tensor: StoredTensor, at: int, of: int) -> StoredTensor:
    """Matrices of all experts that are part `at` of `of` equal parts along the second axis of a merged tensor."""
    experts, rows, columns = tensor.shape
    size = rows // of

    def read(start: int, out: np.ndarray, column: int = 0) -> None:
        step = max(1, _READ_AT_ONCE // (rows * out.shape[1]))
        stop = start + len(out)
        for expert in range(start // size, -(-stop // size), step):
            last = min(expert + step, -(-stop // size))
            whole = np.empty((last - expert, rows, out.shape[1]), out.dtype)
            tensor.read(expert, whole, column)
            own = whole[:, at * size : (at + 1) * size].reshape(-1, out.shape[1])
            begin, end = max(expert * size, start), min(last * size, stop)
            out[begin - start : end - start] = own[begin - expert * size : end - expert * size]

    return dataclasses.replace(tensor, shape=(experts * size, columns), nbytes=tensor.nbytes // of, read=read)
