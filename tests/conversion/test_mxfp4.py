"""Experts in MXFP4, as published checkpoints of gpt-oss store them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import HF_CONFIG, weights, write_gguf, write_hf
from oracles import logits, numbers

import kvjax
from kvjax.conversion import CheckpointError, from_hf, load
from kvjax.models import Params
from kvjax.models.params import Experts
from kvjax.pallas_kernels import GroupedMatrix

FIELDS = HF_CONFIG | {
    "model_type": "gpt_oss",
    "head_dim": 8,
    "sliding_window": 16,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "intermediate_size": 32,
}
MXFP4 = FIELDS | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def published(path: Path) -> dict[str, np.ndarray]:
    """Write a checkpoint as OpenAI published theirs; returns the numbers of its experts by the names of the layout."""
    config, rng = from_hf(FIELDS), np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    found: dict[str, np.ndarray] = {}
    for name, value in weights(config).items():
        base, _, last = name.partition(".experts.")
        if not last:
            tensors[name] = value
            continue
        experts = value.reshape(3, -1, *value.shape[1:])
        if last.startswith("up"):
            continue  # with the gate
        both = [experts]
        if last.startswith("gate"):
            other = weights(config)[f"{base}.experts.{last.replace('gate', 'up')}"]
            both.append(other.reshape(experts.shape))
        rows = np.stack(both, axis=2).reshape(3, -1, *value.shape[1:])
        merged = f"{base}.experts.{'gate_up' if len(both) == 2 else 'down'}_proj"
        parts = ("gate", "up") if len(both) == 2 else ("down",)
        if last.endswith("bias"):
            tensors[f"{merged}_bias"] = rows
            continue
        blocks = rng.integers(0, 256, (*rows.shape[:2], rows.shape[2] // 32, 16), dtype=np.uint8)
        scales = rng.integers(121, 126, blocks.shape[:3], dtype=np.uint8)
        tensors |= {f"{merged}_blocks": blocks, f"{merged}_scales": scales}
        pairs = np.stack([VALUES[blocks & 15], VALUES[blocks >> 4]], axis=-1).reshape(*blocks.shape[:3], 32)
        floats = (pairs * np.exp2(scales.astype(np.float32) - 127)[..., None]).reshape(rows.shape)
        for i, part in enumerate(parts):
            found[f"{base}.experts.{part}"] = floats[:, i :: len(parts)].reshape(-1, rows.shape[2])
    write_hf(path, MXFP4, tensors)
    return found


def experts_of(params: Params, layer: int) -> Experts:
    found = params.layers[layer].mlp
    assert isinstance(found, Experts)
    return found


def test_published_experts(tmp_path: Path) -> None:
    """Exactly their numbers, in 4.25 bits each, or as floats; and the same after they are written."""
    found = published(tmp_path / "hub")
    kept, floats = (load(tmp_path / "hub", dtype="float32", weights=how) for how in (None, "float"))
    kvjax.save(kept, tmp_path / "own", format="safetensors")
    kvjax.save(floats, tmp_path / "floats", format="safetensors")
    own, again = (load(tmp_path / name, dtype="float32") for name in ("own", "floats"))
    for layer in range(2):
        for part in ("gate", "up", "down"):
            wanted = found[f"model.layers.{layer}.mlp.experts.{part}"]
            for params in (kept, own):
                matrix = getattr(experts_of(params, layer), f"{part}_experts")
                assert isinstance(matrix, GroupedMatrix)
                assert (matrix.kind, matrix.nbytes) == ("mxfp4", wanted.size * 17 // 32)
                np.testing.assert_array_equal(numbers(matrix), wanted)
            for params in (floats, again):
                np.testing.assert_array_equal(getattr(experts_of(params, layer), f"{part}_experts"), wanted)
            bias = getattr(experts_of(kept, layer), f"{part}_experts_bias")
            given = weights(from_hf(FIELDS))[f"model.layers.{layer}.mlp.experts.{part}_proj.bias"]
            np.testing.assert_array_equal(bias, given)
    tokens = np.arange(20, dtype=np.int32)[None]
    np.testing.assert_allclose(logits(kept, tokens), logits(floats, tokens), atol=1e-4)


def test_numbers_are_those_of_transformers(tmp_path: Path) -> None:
    """Its function dequantises the same file's tensors."""
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    safetensors = pytest.importorskip("safetensors.torch")
    published(tmp_path / "hub")
    p = experts_of(load(tmp_path / "hub", dtype="float32"), 1)
    tensors = safetensors.load_file(tmp_path / "hub/model.safetensors")
    for name, parts in (("gate_up_proj", (p.gate_experts, p.up_experts)), ("down_proj", (p.down_experts,))):
        stored = [tensors[f"model.layers.1.mlp.experts.{name}_{end}"] for end in ("blocks", "scales")]
        theirs = mxfp4.convert_moe_packed_tensors(*stored, dtype=torch.float32).numpy()  # [E, in, out]
        ours = [np.asarray(numbers(part)).reshape(3, -1, theirs.shape[1]) for part in parts]
        np.testing.assert_array_equal(np.stack(ours, axis=2).reshape(3, -1, theirs.shape[1]).swapaxes(1, 2), theirs)


def test_gguf_keeps_mxfp4(tmp_path: Path) -> None:
    config = from_hf(FIELDS)
    write_gguf(tmp_path / "m.gguf", config, "MXFP4", {"gpt-oss.attention.sliding_window": 16})
    kept, floats = (load(tmp_path / "m.gguf", dtype="float32", weights=how) for how in ("as stored", None))
    matrix = experts_of(kept, 0).down_experts
    assert isinstance(matrix, GroupedMatrix)
    assert matrix.kind == "mxfp4"
    np.testing.assert_array_equal(numbers(matrix), experts_of(floats, 0).down_experts)


def test_greedy_tokens_with_experts_in_mxfp4(tmp_path: Path) -> None:
    """Decoding and prefill read the same numbers, of few tokens and of many."""
    published(tmp_path / "hub")
    params = load(tmp_path / "hub", dtype="float32")
    options: Any = {"policy": "full", "max_new_tokens": 8, "ignore_eos": True}
    tokens = kvjax.generate(params, [3, 1, 4, 1, 5, 9], **options).tokens
    found = np.asarray(logits(params, np.asarray([[3, 1, 4, 1, 5, 9, *tokens]], np.int32)))[0, 5:-1]
    assert tokens == found.argmax(-1).tolist()


def test_what_is_no_mxfp4(tmp_path: Path) -> None:
    published(tmp_path / "hub")
    safetensors = pytest.importorskip("safetensors.numpy")
    file = tmp_path / "hub/model.safetensors"
    tensors = safetensors.load_file(file)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    safetensors.save_file(tensors | {name: tensors[name][:, :3]}, file)
    with pytest.raises(
        CheckpointError, match=r"down_proj_blocks is uint8 .* its scales are uint8 \[3, 3, 1\]; MXFP4 needs"
    ):
        load(tmp_path / "hub")
    del tensors[name]
    safetensors.save_file(tensors, file)
    with pytest.raises(CheckpointError, match="its scales are missing"):
        load(tmp_path / "hub")
    with pytest.raises(CheckpointError, match="weights are quantised with 'mxfp4'"):
        from_hf(HF_CONFIG | {"quantization_config": {"quant_method": "mxfp4"}})
