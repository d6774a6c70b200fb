"""Weights in 8 and 4 bits: exact where a file has them, near where they are made of floats, the same wherever they are written."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import HF_CONFIG, write_gguf, write_hf
from oracles import logits, numbers

from kvjax.conversion import CheckpointError, convert, describe, from_hf, load, quantize_weights, save
from kvjax.conversion.checkpoint import nbytes_of
from kvjax.conversion.quantised import BLOCKS, FROM_FLOATS, assembled, blocks_shape, dequantised, from_blocks
from kvjax.models import Params, abstract
from kvjax.models.params import count

WIDE = HF_CONFIG | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 40}
CONFIG = dataclasses.replace(from_hf(WIDE), eos=(), bos=None)

# Where a block has float16 numbers.
SCALES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def assert_same(ours: Params, theirs: Params) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_what_the_gguf_package_says(kind: str) -> None:
    """Bit for bit, as single operations and as one program, of random bytes."""
    qtype = gguf.GGMLQuantizationType[kind]
    numbers, size = gguf.GGML_QUANT_SIZES[qtype]
    data = np.random.default_rng(0).integers(0, 256, (6, 1024 // numbers * size), dtype=np.uint8)
    for low in SCALES.get(kind, (0,)):  # neither infinite nor NaN
        data.reshape(-1, size)[:, low + 1] &= 0xBB
    if kind == "MXFP4":  # exponents of floats that are neither infinite nor denormal
        data.reshape(-1, size)[:, 0] = data.reshape(-1, size)[:, 0] % 200 + 20
    expected = gguf.quants.dequantize(data, qtype)
    matrix = from_blocks(kind, data)
    assert matrix.shape == expected.shape
    np.testing.assert_array_equal(dequantised(matrix, np.dtype(np.float32)), expected)
    program = jax.jit(lambda m: m.dequantized(jnp.float32))
    np.testing.assert_array_equal(program(jax.tree.map(jnp.asarray, matrix)), expected)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), matrix)
    assert shapes == blocks_shape(kind, *expected.shape)
    np.testing.assert_array_equal(dequantised(matrix.rows(jnp.asarray([4, 1])), np.dtype(np.float32)), expected[[4, 1]])


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4)])
def test_floats_become_the_nearest_level(kind: str, bits: int) -> None:
    rows = np.random.default_rng(1).normal(size=(7, 96)).astype(np.float32)
    rows[2], rows[3, :32] = 0, 0.25  # all alike
    found = dequantised(FROM_FLOATS[kind](rows), np.dtype(np.float32))
    if kind == "int8":
        step = np.abs(rows).max(1, keepdims=True) / 127
    else:
        groups = rows.reshape(7, 3, 32)
        # Scale and minimum are float16.
        step = np.repeat((groups.max(-1) - groups.min(-1)) / 15, 32, axis=1) + 2 * 2**-10 * np.abs(rows).max()
    assert (np.abs(found - rows) <= 0.5001 * step + 1e-7).all()
    assert not found[2].any()


@pytest.mark.parametrize(
    "kind", ["Q4_K", "Q6_K", *(pytest.param(k, marks=pytest.mark.slow) for k in ("Q4_0", "Q4_1", "Q8_0", "Q5_K"))]
)
def test_as_stored_is_the_dequantised_model(tmp_path: Path, kind: str) -> None:
    """Exactly its weights, so its logits to rounding; and no larger than what the format asks for."""
    write_gguf(tmp_path / "m.gguf", CONFIG, kind)
    kept, floats = (load(tmp_path / "m.gguf", dtype="float32", weights=w) for w in ("as stored", None))
    for name in ("q", "k", "o"):  # rows of q and k are permuted
        matrix = getattr(kept.layers[0].attn, name)
        np.testing.assert_array_equal(numbers(matrix), getattr(floats.layers[0].attn, name))
    np.testing.assert_array_equal(numbers(kept.embed), floats.embed)
    bits = {"Q4_0": 4.5, "Q4_1": 5, "Q4_K": 4.625}.get(kind, 8.625)
    assert nbytes_of(kept) <= bits / 8 * count(kept) + 4 * 3 * 256
    assert describe(tmp_path / "m.gguf", dtype="float32", weights="as stored").weight_bytes == nbytes_of(kept)


def test_logits_as_stored(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", CONFIG, "Q4_1")
    tokens = jnp.arange(24, dtype=jnp.int32)[None]
    kept, floats = (logits(load(tmp_path / "m.gguf", dtype="bfloat16", weights=w), tokens) for w in ("as stored", None))
    np.testing.assert_allclose(kept, floats, atol=1e-2 * float(jnp.abs(floats).max()))


@pytest.mark.parametrize(
    ("options", "format"),
    [
        ({"weights": "as stored"}, "safetensors"),
        pytest.param({"weights": "as stored"}, "orbax", marks=pytest.mark.slow),
        ({"weights": "int8", "embedding": "int4"}, "safetensors"),
        ({"weights": "int8", "embedding": "int8", "dtype": "bfloat16"}, "safetensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["weights"] + value.get("dtype", ""),
)
def test_what_is_written_is_loaded_again(tmp_path: Path, format: str, options: dict[str, Any]) -> None:
    source, options = tmp_path / "m.gguf", {"dtype": "float32"} | options
    if options["dtype"] == "bfloat16":
        write_hf(source := tmp_path / "hf", HF_CONFIG | {"model_type": "phi3"})  # its tensors are fused
    else:
        write_gguf(source, CONFIG, "Q6_K")
    dtype = options["dtype"]
    there = convert(source, tmp_path / "there", format=format, **options)
    written = load(there, dtype=dtype)
    assert_same(written, load(source, **options))
    assert_same(load(save(written, tmp_path / "again", format=format), dtype=dtype), written)
    # As floats, when they are asked for.
    floats = load(there, dtype=dtype, weights="float")
    assert jax.tree.structure(floats) == jax.tree.structure(abstract(floats.config))
    np.testing.assert_array_equal(floats.layers[0].mlp.up, numbers(written.layers[0].mlp.up, dtype))
    assert describe(there, dtype=dtype).weight_bytes == nbytes_of(written)


def test_orbax_holds_their_arrays(tmp_path: Path) -> None:
    write_hf(tmp_path / "m")
    there = convert(tmp_path / "m", tmp_path / "there", weights="int4", embedding="int8")
    assert_same(load(there), load(tmp_path / "m", weights="int4", embedding="int8"))


def test_large_matrices_are_made_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hf(tmp_path / "m")
    whole = load(tmp_path / "m", weights="int4", embedding="int8")
    monkeypatch.setattr("kvjax.conversion.checkpoint._QUANTISED", 3 * 32)
    assert_same(load(tmp_path / "m", weights="int4", embedding="int8"), whole)
    assert_same(quantize_weights(load(tmp_path / "m"), "int4", "int8"), whole)
    assert repr(whole).startswith(
        f"Params(llama, {count(abstract(whole.config)):,} parameters, float32 and int4 and int8, "
    )


def test_what_cannot_be_is_refused(tmp_path: Path, tiny: Params) -> None:
    with pytest.raises(ValueError, match="weights='int3' is not one of float, int8, int4, as stored"):
        load(tmp_path, weights="int3")
    with pytest.raises(ValueError, match="embedding=8 is not one of"):
        convert(tmp_path, tmp_path / "there", embedding=8)  # pyright: ignore[reportArgumentType]
    odd = HF_CONFIG | {"intermediate_size": 63}
    write_hf(tmp_path / "odd", odd)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down: a matrix with 63 inputs cannot be in 4 bits"):
        load(tmp_path / "odd", weights="int4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": None}, "1 tensor missing: model.norm.weight"),
        ({"scale": None}, r"mlp.up_proj.weight: its arrays do not make a matrix: levels int8\[64, 32\]"),
        ({"scale": np.zeros((65,), np.float32)}, r"do not make a matrix: levels int8\[64, 32\], scale float32\[65\]"),
        ({"scale": np.zeros((64,), np.int8)}, r"scale int8\[64\]"),
        ({"levels": np.zeros((64, 16, 1), np.uint8)}, r"levels uint8\[64, 16, 1\]"),
        ({"levels": np.zeros((64, 31), np.int8)}, r"has shape \[64, 31\], the configuration asks for \[64, 32\]"),
        ({"minimum": np.zeros((64,), np.float32)}, r"minimum float32\[64\]"),
    ],
)
def test_damaged_matrices_are_told(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    from safetensors.numpy import load_file, save_file

    write_hf(tmp_path / "m")
    there = convert(tmp_path / "m", tmp_path / "there", format="safetensors", weights="int8", dtype="float32")
    assert json.loads((there / "config.json").read_text())["quantization_config"] == {"quant_method": "kvjax"}
    held = load_file(there / "model.safetensors")
    for field, value in change.items():
        name = "model.norm.weight" if field == "norm" else f"model.layers.1.mlp.up_proj.weight.{field}"
        if value is None:
            del held[name]
        else:
            held[name] = value
    save_file(held, there / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(there)


def test_a_matrix_without_its_minima_is_told(tmp_path: Path) -> None:
    """Without its minima, a matrix in 4 bits would be another one: of levels about 8."""
    from safetensors.numpy import load_file, save_file

    write_hf(tmp_path / "m", HF_CONFIG | {"num_hidden_layers": 1})
    there = convert(tmp_path / "m", tmp_path / "there", format="safetensors", weights="int4", dtype="float32")
    held = load_file(there / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    lost = held.pop(f"{name}.minimum")
    save_file(held, there / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"config.json: {name} should have the arrays levels, minimum, scale, but"
    ):
        load(there)
    fields = json.loads((there / "config.json").read_text())
    assert fields["quantized_matrices"].pop(name) == ["levels", "scale", "minimum"]
    (there / "config.json").write_text(json.dumps(fields))
    save_file(held | {f"{name}.minimum": lost}, there / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} should have the arrays of floats, but the weights hold levels"):
        load(there)
    del fields["quantized_matrices"]  # as older versions wrote it
    (there / "config.json").write_text(json.dumps(fields))
    load(there)


@pytest.mark.parametrize("unit", [[4], [3, 2], [4, 3], [4, 0]])
def test_units_of_scales_fit_the_matrix(unit: list[int]) -> None:
    """Units are [rows, U], where U divides the groups of a row."""
    arrays = {
        "levels": np.zeros((4, 2, 8), np.uint8),
        "scale": np.zeros((4, 8), np.uint8),
        "scale_unit": np.zeros((4, 2), np.float16),
    }
    assembled(arrays)
    with pytest.raises(ValueError, match="scale_unit float16"):
        assembled(arrays | {"scale_unit": np.zeros(unit, np.float16)})
