"""GPTQ, AWQ and compressed-tensors: random checkpoints against those libraries' own unpacking, bit for bit."""

import copy
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import packing_oracles as oracle
import pytest
from checkpoints import HF_CONFIG, weights, write_hf
from oracles import logits
from oracles import numbers as floats_of

from kvjax.conversion import CheckpointError, convert, describe, from_hf, load
from kvjax.conversion.checkpoint import StoredTensor, nbytes_of
from kvjax.conversion.packed import unpacked
from kvjax.conversion.state_dict import _held
from kvjax.models import Params
from kvjax.models.params import count
from kvjax.pallas_kernels import QuantizedMatrix, is_quantized

FIELDS = HF_CONFIG | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "vocab_size": 40,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUP = 16

Pack = Callable[[np.random.Generator, int, int], tuple[dict[str, np.ndarray], np.ndarray]]
"""Arrays of a random matrix of so many outputs and inputs, by the ends of their names, and its numbers in float32."""


def gptq(
    bits: int, sym: bool, version: int = 1, desc_act: bool = False, group: int = GROUP
) -> tuple[dict[str, Any], Pack]:
    fields = {"bits": bits, "sym": sym, "desc_act": desc_act, "group_size": group}
    fields |= {"quant_method": "gptq"} | ({"checkpoint_format": "gptq_v2"} if version == 2 else {})

    def pack(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        size = inputs if group == -1 else group
        groups = inputs // size
        codes = rng.integers(0, 2**bits, (inputs, outputs))
        zeros = np.full((groups, outputs), 2 ** (bits - 1)) if sym else rng.integers(0, 2**bits, (groups, outputs))
        scales = rng.normal(0, 0.16 / 2**bits, (groups, outputs)).astype(np.float16)
        g_idx = np.arange(inputs, dtype=np.int32) // size
        if desc_act:
            g_idx = rng.permutation(g_idx)
        qweight, qzeros = oracle.gptq_pack(codes, zeros, bits, version)
        arrays = {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": g_idx}
        return arrays, oracle.gptq_unpack(qweight, qzeros, scales, g_idx, bits, version).T

    return fields, pack


def awq() -> tuple[dict[str, Any], Pack]:
    def pack(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        qweight = oracle.awq_pack(rng.integers(0, 16, (inputs, outputs)))
        qzeros = oracle.awq_pack(rng.integers(0, 16, (inputs // GROUP, outputs)))
        scales = rng.normal(0, 0.01, (inputs // GROUP, outputs)).astype(np.float16)
        arrays = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
        return arrays, oracle.awq_unpack(qweight, qzeros, scales, GROUP).T

    return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, pack


def compressed(
    bits: int, strategy: str, symmetric: bool = True, packed: bool = True, actorder: bool = False
) -> tuple[dict[str, Any], Pack]:
    args = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    args |= {"group_size": GROUP} if strategy == "group" else {}
    fields = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if packed else "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": None}},
        "ignore": ["lm_head"],
    }

    def pack(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        groups = inputs // GROUP if strategy == "group" else 1
        half = 2 ** (bits - 1)
        codes = rng.integers(-half, half, (outputs, inputs)).astype(np.int8)
        shape = (1,) if strategy == "tensor" else (outputs, groups)
        scale = rng.normal(0, 0.16 / 2**bits, shape).astype(ml_dtypes.bfloat16)
        zero = None if symmetric else rng.integers(-half, half, shape).astype(np.int8)
        order = rng.permutation(np.arange(inputs, dtype=np.int32) // GROUP) if actorder else None
        arrays: dict[str, np.ndarray] = {"weight_scale": scale}
        if packed:
            arrays["weight_packed"] = oracle.pack_to_int32(codes, bits)
            arrays["weight_shape"] = np.asarray([outputs, inputs], np.int64)
            codes = oracle.unpack_from_int32(arrays["weight_packed"], bits, (outputs, inputs))
        else:
            arrays["weight"] = codes
        if zero is not None:
            arrays["weight_zero_point"] = oracle.pack_to_int32(zero, bits, 0) if packed else zero
        if order is not None:
            arrays["weight_g_idx"] = order
        return arrays, oracle.dequantize(codes, scale, zero, order)

    return fields, pack


LAYOUTS = {
    "gptq-4": gptq(4, sym=False),
    "gptq-4-sym": gptq(4, sym=True),
    "gptq-4-v2": gptq(4, sym=False, version=2),
    "gptq-8": gptq(8, sym=False),
    "gptq-8-sym": gptq(8, sym=True),
    "gptq-8-sym-channel": gptq(8, sym=True, group=-1),
    "gptq-4-channel": gptq(4, sym=False, group=-1),
    "awq": awq(),
    "compressed-4": compressed(4, "group"),
    "compressed-4-asym": compressed(4, "group", symmetric=False),
    "compressed-4-channel": compressed(4, "channel"),
    "compressed-8": compressed(8, "group"),
    "compressed-8-asym": compressed(8, "group", symmetric=False),
    "compressed-int8": compressed(8, "channel", packed=False),
    "compressed-int8-asym": compressed(8, "channel", symmetric=False, packed=False),
    "compressed-int8-tensor": compressed(8, "tensor", packed=False),
    "compressed-int8-tensor-asym": compressed(8, "tensor", symmetric=False, packed=False),
}
UNORDERED = {
    "gptq-4-desc_act": gptq(4, sym=False, desc_act=True),
    "gptq-8-desc_act": gptq(8, sym=True, desc_act=True),
    "compressed-4-actorder": compressed(4, "group", actorder=True),
}


FEW = "awq", "compressed-4-asym", "compressed-int8", "gptq-4-desc_act", "gptq-8"
"""Of which the others differ in little."""


def some(names: Iterable[str], few: Sequence[str] = FEW) -> list[Any]:
    """All names, of which those that are not among the few are slow."""
    return [name if name in few else pytest.param(name, marks=pytest.mark.slow) for name in names]


def write(path: Path, layout: tuple[dict[str, Any], Pack], fields: dict[str, Any] = FIELDS) -> dict[str, np.ndarray]:
    """Write a random checkpoint whose projections are packed; all numbers by the names of their floats."""
    quantization, pack = layout
    rng, stored, numbers = np.random.default_rng(7), {}, {}
    for name, value in weights(from_hf(fields)).items():
        if not name.endswith("proj.weight"):
            stored[name] = numbers[name] = value.astype(np.float16)
            continue
        arrays, numbers[name] = pack(rng, *value.shape)
        stored |= {name.removesuffix("weight") + end: np.ascontiguousarray(array) for end, array in arrays.items()}
    write_hf(path, fields | {"quantization_config": quantization}, stored)
    return numbers


def matrix(params: Params, name: str) -> Any:
    layer, (block, rest) = params.layers[0], name.split(".")[3:5]
    part = rest.removesuffix("_proj")
    return getattr(layer.attn if block == "self_attn" else layer.mlp, part)


@pytest.mark.parametrize("name", some([*LAYOUTS, *UNORDERED]))
def test_numbers_are_those_of_the_library(tmp_path: Path, name: str) -> None:
    numbers = write(tmp_path, (LAYOUTS | UNORDERED)[name])
    kept, floats = (load(tmp_path, dtype="float32", weights=weights) for weights in (None, "float"))
    for tensor, expected in numbers.items():
        if not tensor.endswith("proj.weight"):
            continue
        np.testing.assert_array_equal(matrix(floats, tensor), expected)
        held = matrix(kept, tensor)
        assert is_quantized(held) == (name in LAYOUTS)
        if is_quantized(held):
            np.testing.assert_array_equal(floats_of(held), expected)


@pytest.mark.parametrize("name", some(LAYOUTS, FEW[:2]))
def test_nothing_is_blown_up(tmp_path: Path, name: str) -> None:
    write(tmp_path, LAYOUTS[name])
    found = describe(tmp_path)
    kept = load(tmp_path, dtype="float16")
    assert found.weight_bytes == nbytes_of(kept)
    assert found.parameters == count(kept)
    assert found.own_dtype == "float16"
    projections = [w for w in jax.tree.leaves(kept, is_leaf=is_quantized) if isinstance(w, QuantizedMatrix)]
    assert len(projections) == 7
    bits = 8 if "8" in name else 4
    per_group = 6 * 8  # bits: a scale, again as what its zero is counted in, and the zero
    for w in projections:
        assert 8 * nbytes_of(w) <= bits * w.shape[0] * w.shape[1] + per_group * w.shape[0] * w.shape[1] / GROUP


@pytest.mark.parametrize("name", some(["gptq-4", "awq", "compressed-int8"], []))
def test_logits_are_those_of_the_numbers(tmp_path: Path, name: str) -> None:
    write(tmp_path, LAYOUTS[name])
    tokens = jnp.asarray([[5, 9, 2, 7, 7, 1] * 4], jnp.int32)
    kept, floats = (load(tmp_path, dtype="float32", weights=weights) for weights in ("as stored", "float"))
    np.testing.assert_allclose(logits(kept, tokens), logits(floats, tokens), atol=1e-4)
    halves = [load(tmp_path, dtype="bfloat16", weights=weights) for weights in ("as stored", "float")]
    kept, floats = (np.asarray(logits(params, tokens), np.float32) for params in halves)
    np.testing.assert_allclose(kept, floats, atol=1e-2 * np.abs(floats).max())


@pytest.mark.parametrize("name", some(["gptq-4", "compressed-8-asym"], ["compressed-8-asym"]))
@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_they_are_written_as_they_are(tmp_path: Path, name: str, format: Any) -> None:
    write(tmp_path / "from", LAYOUTS[name])
    convert(tmp_path / "from", tmp_path / "to", format=format)
    ours, theirs = load(tmp_path / "to", dtype="float16"), load(tmp_path / "from", dtype="float16")
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("name", some(["gptq-8", "awq", "compressed-4-asym"], FEW[1:2]))
def test_fused_projections_are_cut(tmp_path: Path, name: str) -> None:
    fields = FIELDS | {
        "model_type": "phi3",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "pad_token_id": None,
    }
    numbers = write(tmp_path, LAYOUTS[name], fields)
    kept = load(tmp_path, dtype="float32").layers[0]
    fused = numbers["model.layers.0.self_attn.qkv_proj.weight"]
    q, k, v = (floats_of(part) for part in (kept.attn.q, kept.attn.k, kept.attn.v))
    np.testing.assert_array_equal(np.concatenate([q, k, v]), fused)
    halves = [floats_of(part) for part in (kept.mlp.gate, kept.mlp.up)]
    np.testing.assert_array_equal(np.concatenate(halves), numbers["model.layers.0.mlp.gate_up_proj.weight"])


@pytest.mark.parametrize(
    ("layout", "change", "told"),
    [
        ("gptq-4", {"bits": 3}, "quantization_config.bits is 3"),
        ("gptq-4", {"sym": True}, "the zero points are not"),
        ("gptq-4", {"dynamic": {"x": {}}}, "dynamic"),
        ("gptq-4", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ("awq", {"version": "gemv"}, "gemm is"),
        ("awq", {"bits": 8}, "bits is 8"),
        ("compressed-4", {"format": "float-quantized"}, "format is 'float-quantized'"),
        ("compressed-4", {"config_groups": {}}, "exactly one is supported"),
        ("compressed-4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        ("compressed-int8", {"quant_method": "bitsandbytes"}, "only gptq, awq, compressed-tensors are supported"),
    ],
)
def test_what_is_not_read_is_said(tmp_path: Path, layout: str, change: dict[str, Any], told: str) -> None:
    write(tmp_path, LAYOUTS[layout])
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    fields["quantization_config"] |= change
    file.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=told):
        load(tmp_path)


def test_odd_groups_of_4_bits_are_refused(tmp_path: Path) -> None:
    write(tmp_path, gptq(4, sym=False, group=1))
    with pytest.raises(
        CheckpointError, match=r"proj\.weight has groups of 1 inputs; with 4 bits, the number has to be even"
    ):
        load(tmp_path)


def test_biases_of_zeros_are_none(tmp_path: Path) -> None:
    """AutoGPTQ wrote them for every matrix; what is not zero is not dropped."""
    quantization, pack = LAYOUTS["gptq-4"]

    def biased(value: float) -> Pack:
        def made(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
            arrays, numbers = pack(rng, outputs, inputs)
            return arrays | {"bias": np.full(outputs, value, np.float16)}, numbers

        return made

    write(tmp_path / "none", (quantization, pack))
    write(tmp_path / "zeros", (quantization, biased(0.0)))
    write(tmp_path / "ones", (quantization, biased(1.0)))
    none, zeros = (load(tmp_path / name, dtype="float16") for name in ("none", "zeros"))
    jax.tree.map(np.testing.assert_array_equal, none, zeros)
    with pytest.raises(CheckpointError, match="biases other than zero"):
        load(tmp_path / "ones")
    numbers = write(tmp_path / "own", LAYOUTS["gptq-4"], FIELDS | {"attention_bias": True})
    own = load(tmp_path / "own", dtype="float16").layers[0].attn.q_bias
    np.testing.assert_array_equal(own, numbers["model.layers.0.self_attn.q_proj.bias"])


DAMAGE: dict[str, tuple[str, Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]]] = {
    "fewer scales": (r"does not fit its codes|should have", lambda arrays: _ended(arrays, "scale", lambda x: x[:-1])),
    "no scales": (r"does not fit its codes|should have", lambda arrays: _ended(arrays, "scale", lambda x: x[..., :0])),
    "scales of no groups": (
        r"does not fit its codes|should have",
        lambda arrays: _ended(arrays, "scale", lambda x: x[:0]),
    ),
    "scales that are whole numbers": (
        r"is int32; it should have float32 or",
        lambda arrays: _ended(arrays, "scale", lambda x: x.astype(np.int32)),
    ),
    "codes in longer words": (
        r"is int64; it should have int(32|8)",
        lambda arrays: _ended(arrays, "weight", lambda x: x.astype(np.int64)),
    ),
    "an order in floats": (
        r"g_idx of a packed matrix is float32; it should have int32 or int64",
        lambda arrays: _ended(arrays, "g_idx", lambda x: x.astype(np.float32)),
    ),
    "an order that is not spoken of": (
        r"says that groups are of neighbouring inputs \(desc_act\)",
        lambda arrays: _ended(arrays, "g_idx", lambda x: x[::-1].copy()),
    ),
}
"""What is said of it, and what is done to a matrix's arrays."""


def _ended(
    arrays: dict[str, np.ndarray], end: str, change: Callable[[np.ndarray], np.ndarray]
) -> dict[str, np.ndarray]:
    """With the arrays changed of whose names the last part is of this kind: scales, codes or the order of inputs."""
    named = {"scale": ("scales", "weight_scale"), "weight": ("qweight", "weight_packed", "weight"), "g_idx": ("g_idx",)}
    return {name: change(array) if name in named[end] else array for name, array in arrays.items()}


@pytest.mark.parametrize(
    ("layout", "damage"),
    [
        *(
            (layout, damage)
            for layout in ("gptq-4", "awq", "compressed-4-asym", "compressed-int8")
            for damage in list(DAMAGE)[:5]
        ),
        ("gptq-4", "an order in floats"),
        ("gptq-4", "an order that is not spoken of"),
    ],
)
def test_damaged_arrays_are_refused(tmp_path: Path, layout: str, damage: str) -> None:
    (quantization, pack), (told, change) = LAYOUTS[layout], DAMAGE[damage]

    def damaged(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        arrays, numbers = pack(rng, outputs, inputs)
        return change(arrays), numbers

    write(tmp_path, (quantization, damaged))
    with pytest.raises(CheckpointError, match=told):
        load(tmp_path)


def one(
    layout: tuple[dict[str, Any], Pack],
    config: dict[str, Any] | None = None,
    arrays: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = dict,
    inputs: int = 64,
) -> tuple[StoredTensor, np.ndarray]:
    """One matrix of 32 outputs as it is read, without files, and its numbers; with changes of the configuration and of its arrays.

    Of compressed-tensors' configuration, those of what is said of weights.
    """
    quantization, pack = layout
    made, numbers = pack(np.random.default_rng(3), 32, inputs)
    quantization = copy.deepcopy(quantization)
    where = quantization if "config_groups" not in quantization else quantization["config_groups"]["group_0"]["weights"]
    where |= config or {}
    tensors = {f"m.{name}": _held(np.ascontiguousarray(array)) for name, array in arrays(made).items()}
    return unpacked(tensors, quantization, Path("config.json"), lambda: ())["m.weight"], numbers


def numbers_of(tensor: StoredTensor) -> np.ndarray:
    out = np.empty(tensor.shape, np.float32)
    tensor.read(0, out)
    return out


def put(name: str, value: Any) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Arrays with one replaced, by one that a function makes of it."""

    def replaced(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return arrays | {name: np.asarray(value(arrays[name]) if callable(value) else value)}

    return replaced


@pytest.mark.parametrize("name", [*LAYOUTS, *UNORDERED])
def test_one_matrix(name: str) -> None:
    """Each layout and type of zeros and scales, without a model."""
    tensor, numbers = one((LAYOUTS | UNORDERED)[name])
    np.testing.assert_array_equal(numbers_of(tensor), numbers)


GROUPED = {"strategy": "group", "group_size": GROUP}
PACKED_EIGHTS = np.full((4, 4), -2004318072, np.int32)  # 0x88888888
SCALES = "weight_scale"


@pytest.mark.parametrize(
    ("name", "config", "arrays"),
    [
        ("compressed-4", GROUPED, dict),
        ("compressed-4", {"strategy": None, "group_size": GROUP}, dict),
        ("compressed-4-channel", {"strategy": None, "group_size": -1}, dict),
        ("compressed-4-channel", {"group_size": -1}, dict),
        ("compressed-int8-tensor", {"strategy": None}, dict),
        ("compressed-int8-tensor", {}, put(SCALES, lambda scale: scale.reshape(()))),
        ("compressed-4-actorder", GROUPED | {"actorder": "group"}, dict),
        ("compressed-4", GROUPED | {"actorder": "weight"}, dict),
        # Zeros that old versions wrote of what is symmetric.
        ("compressed-4", GROUPED, put("weight_zero_point", np.zeros((32, 4), np.int8))),
        ("compressed-4", GROUPED, put("weight_zero_point", PACKED_EIGHTS)),
        ("gptq-8-sym-channel", {"group_size": 128}, dict),  # of 64 inputs
    ],
)
def test_what_the_configuration_may_say(name: str, config: dict[str, Any], arrays: Any) -> None:
    tensor, numbers = one((LAYOUTS | UNORDERED)[name], config, arrays)
    np.testing.assert_array_equal(numbers_of(tensor), numbers)


@pytest.mark.parametrize(
    ("name", "config", "arrays", "told"),
    [
        ("compressed-4", {"group_size": 32}, dict, r"have shape \[32, 4\].*group_size; it should have \[32, 2\]"),
        ("compressed-4", {"group_size": 48}, dict, r"64 inputs, which is not a multiple of its group_size 48"),
        ("compressed-4", {"group_size": 0}, dict, "it should have a group_size above 0 if its strategy is 'group'"),
        ("compressed-4", {"group_size": -1}, dict, "it should have a group_size above 0 if its strategy is 'group'"),
        (
            "compressed-4",
            {"strategy": "channel", "group_size": None},
            dict,
            r"have shape \[32, 4\].*it should have \[32, 1\]",
        ),
        (
            "compressed-4",
            {"strategy": "tensor", "group_size": None},
            dict,
            r"have shape \[32, 4\].*it should have \[1\]",
        ),
        ("compressed-4", {"strategy": "block"}, dict, "strategy is 'block'"),
        ("compressed-4", {"strategy": None, "group_size": None}, dict, r"it should have \[1\]"),
        ("compressed-4-channel", {"group_size": 16}, dict, "it should have a group_size above 0 if"),
        ("compressed-4-channel", {}, put(SCALES, lambda scale: scale[:1]), r"\[1, 1\].*it should have \[32, 1\]"),
        ("compressed-int8-tensor", {"strategy": "channel"}, dict, r"have shape \[1\].*it should have \[32, 1\]"),
        ("compressed-int8", {"strategy": "tensor"}, dict, r"have shape \[32, 1\].*it should have \[1\]"),
        ("compressed-4-asym", {"symmetric": True}, dict, "symmetric, but weight_zero_point is not zero"),
        ("compressed-int8-asym", {"symmetric": True}, dict, "symmetric, but weight_zero_point is not zero"),
        ("compressed-int8", {"symmetric": False}, dict, "but no weight_zero_point"),
        ("compressed-4", {"actorder": "group"}, dict, "actorder 'group' needs the groups of inputs"),
        ("compressed-4-channel", {"actorder": "group"}, dict, "no actorder unless its strategy is 'group'"),
        ("compressed-4", {}, put("weight_shape", np.asarray([32, 63])), r"weight_shape is \[32, 63\], but"),
        ("gptq-4", {"group_size": 32}, dict, r"have shape \[4, 32\].*it should have \[2, 32\]"),
        ("gptq-4", {"group_size": -1}, dict, r"have shape \[4, 32\].*it should have \[1, 32\]"),
        ("gptq-4", {"group_size": 0}, dict, "not a multiple of its group_size 0"),
        ("gptq-4", {"group_size": -2}, dict, "group_size is -2"),
        ("awq", {"group_size": 32}, dict, r"have shape \[4, 32\].*it should have \[2, 32\]"),
        ("awq", {"zero_point": False}, dict, "zero_point is False; it should be True"),
    ],
)
def test_scales_are_what_the_configuration_says(name: str, config: dict[str, Any], arrays: Any, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        numbers_of(one(LAYOUTS[name], config, arrays)[0])


@pytest.mark.parametrize(
    ("name", "end"),
    [("gptq-4-desc_act", "g_idx"), ("gptq-8-desc_act", "g_idx"), ("compressed-4-actorder", "weight_g_idx")],
)
@pytest.mark.parametrize("group", [4, -1])
def test_groups_of_inputs_are_bounded(name: str, end: str, group: int) -> None:
    """There are four; numpy would take the last for -1."""

    def beyond(order: np.ndarray) -> np.ndarray:
        order = order.copy()
        order[5] = group
        return order

    def moved(order: np.ndarray) -> np.ndarray:
        order = order.copy()
        order[np.argmax(order == 1)] = 0
        return order

    for change in (beyond, lambda order: order[:-1]):
        with pytest.raises(CheckpointError, match="the group indices of its inputs should be 64 numbers from 0 to 3"):
            numbers_of(one(UNORDERED[name], {}, put(end, change))[0])
    with pytest.raises(
        CheckpointError, match="group 0 has 17 inputs by the group indices; each of the 4 groups should have 16"
    ):
        numbers_of(one(UNORDERED[name], {}, put(end, moved))[0])


@pytest.mark.parametrize("group", [3, 5])
def test_odd_groups_in_four_bits(group: int) -> None:
    """Two numbers are in a byte; in 8 bits any number may share a scale."""
    with pytest.raises(
        CheckpointError, match=rf"m.weight has groups of {group} inputs; with 4 bits, the number has to be even"
    ):
        one(gptq(4, sym=False, group=group), inputs=32 * group)
    tensor, numbers = one(gptq(8, sym=False, group=group), inputs=32 * group)
    np.testing.assert_array_equal(numbers_of(tensor), numbers)
