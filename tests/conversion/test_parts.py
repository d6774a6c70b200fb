"""Parts of parameters, as devices of a mesh have them, are parts of the whole; and no more of a file is looked at than they lie on."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoints import HF_CONFIG, write_gguf, write_hf

from kvjax.conversion import convert, mapped
from kvjax.conversion.checkpoint import FLOATS, Kinds
from kvjax.conversion.hf_config import from_hf
from kvjax.conversion.loading import open_checkpoint
from kvjax.pallas_kernels import QuantizedMatrix

from .test_packed import LAYOUTS, write

WIDE = HF_CONFIG | {
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 1024,
}


def checkpoint(path: Path, name: str) -> Any:
    """One of a format, and of a type where that has several."""
    if name in LAYOUTS:
        write(path, LAYOUTS[name])
        return open_checkpoint(path)
    if name.startswith("gguf"):
        path.mkdir()
        write_gguf(path / "model.gguf", from_hf(WIDE), name.removeprefix("gguf-"))
        return open_checkpoint(path / "model.gguf")
    write_hf(path / "hf", WIDE)
    if name == "safetensors":
        return open_checkpoint(path / "hf")
    format, weights = name.split("-")
    convert(path / "hf", path / "made", format=format, dtype="float32", weights=weights, progress=False)
    return open_checkpoint(path / "made")


def part(array: Any, rows: slice, columns: slice, of: int) -> np.ndarray:
    """What an array has of rows, and of columns of `of`."""
    if array.ndim == 1:
        return array[rows]
    size = array.shape[-1]
    return array[rows, ..., columns.start * size // of : columns.stop * size // of]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("safetensors", "float"),
        ("safetensors", "int8"),
        ("safetensors-int4", "as stored"),
        ("safetensors-int4", "float"),
        ("orbax-float", "float"),
        ("orbax-int8", "as stored"),
        ("orbax-int4", "as stored"),
        ("gguf-F16", "float"),
        ("gguf-Q4_1", "float"),
        ("gguf-Q4_1", "as stored"),
        ("gguf-Q6_K", "as stored"),
        ("awq", "as stored"),
        ("awq", "float"),
        ("gptq-8", "as stored"),
    ],
)
def test_parts_are_of_the_whole(tmp_path: Path, name: str, kind: str) -> None:
    held, dtype, random = checkpoint(tmp_path / "model", name), FLOATS["float32"], np.random.default_rng(3)
    # Alike for axes that are as long, since for each new shape ten operations are compiled.
    sizes: dict[tuple[int, int], int] = {}

    def some(axis: int, length: int) -> slice:
        size = sizes.setdefault((axis, length), int(random.integers(1, length + 1)))
        start = int(random.integers(length - size + 1))
        return slice(start, start + size)

    kinds = Kinds(kind, "float")
    for parameter, shape in held.shapes(dtype, kinds).items():
        if not parameter.startswith(("layers.0.attn", "layers.0.mlp", "norm")):
            continue
        whole = jax.tree.map(np.asarray, held.read(parameter, dtype, kinds.of(parameter)))
        first = jax.tree.leaves(shape)[0].shape
        for _ in range(3):
            rows, columns = some(0, first[0]), some(-1, first[-1])
            found = held.read(parameter, dtype, kinds.of(parameter), rows, columns if len(first) > 1 else None)
            if isinstance(shape, QuantizedMatrix) and jax.tree.leaves(found)[0].shape[-1] == first[-1]:
                columns = slice(0, first[-1])  # not to be had by themselves
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
                np.testing.assert_array_equal(one, part(other, rows, columns, first[-1]))


def test_an_array_of_one_axis_has_no_columns(tmp_path: Path) -> None:
    numbers = np.arange(6, dtype=np.int16)
    (tmp_path / "numbers").write_bytes(b"head" + numbers.tobytes())
    found = mapped.mapped(tmp_path / "numbers", np.int16, 4, (6,), slice(2, 5), slice(0, 1))
    np.testing.assert_array_equal(found, [2, 3, 4])
    found = mapped.mapped(tmp_path / "numbers", np.int16, 4, (3, 2), slice(1, 3), slice(0, 1))
    np.testing.assert_array_equal(found, [[2], [4]])


@pytest.mark.parametrize(
    ("name", "kind", "share"),
    [
        ("safetensors", "float", 1 / 4),
        ("gguf-F16", "float", 1 / 4),
        ("gguf-Q8_0", "float", 1 / 4),
        ("gguf-Q4_1", "as stored", 1 / 4),
        ("safetensors-int4", "as stored", 1 / 4),
        ("safetensors-int8", "as stored", 0.2585),  # and all scales
        ("gguf-Q4_1", "int8", 1),  # whose scales are of whole rows
    ],
)
def test_no_more_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, share: float
) -> None:
    """A quarter of the rows, or of the columns, is a quarter of the bytes."""
    held, seen = checkpoint(tmp_path / "model", name), []

    def counted(*args: Any, **options: Any) -> np.ndarray:
        found = mapped.mapped(*args, **options)
        seen.append(found.nbytes)
        return found

    for module in ("huggingface", "gguf_file"):
        monkeypatch.setattr(f"kvjax.conversion.{module}.mapped", counted)
    for parameter, rows, columns in (
        ("q", 64, None),
        ("k", 32, None),
        ("down", 256, slice(128, 256)),
        ("o", 256, slice(64, 128)),
    ):
        parameter = f"layers.0.{'mlp' if parameter == 'down' else 'attn'}.{parameter}"
        shape = jax.tree.leaves(held.shapes(FLOATS["float32"], Kinds(kind))[parameter])[0].shape
        if columns is not None:
            width = 512 if "down" in parameter else 256
            columns = slice(columns.start * shape[-1] // width, columns.stop * shape[-1] // width)
        seen.clear()
        held.read(parameter, FLOATS["float32"], kind, slice(0, rows), columns)
        tensor, *_ = held._places[parameter]
        expected = share if columns is not None else 1 / 4
        assert sum(seen) == pytest.approx(expected * held.tensors[tensor].nbytes, rel=0.02)
