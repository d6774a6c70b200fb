"""Damaged, hostile and contradictory files: each kind is refused by a sentence that names file, key and value."""

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import HF_CONFIG, byte_tokenizer, weights, write_gguf, write_hf

from kvjax.conversion import CheckpointError, convert, describe, from_hf, load
from kvjax.conversion.checkpoint import count_not_finite

INDEX = "model.safetensors.index.json"

GGUF_TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": [byte_tokenizer().id_to_token(i) for i in range(261)],
    "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
    "tokenizer.ggml.token_type": [3, 3] + [1] * 259,
    "tokenizer.ggml.eos_token_id": 1,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound")
    write_hf(path / "hf", tokenizer=True, files=2)
    (path / "hf" / "generation_config.json").write_text('{"eos_token_id": 1}')
    convert(path / "hf", path / "orbax")
    for name in ("hf", "orbax"):
        load(path / name)
    return path


@pytest.fixture
def directory(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound / "hf", tmp_path / "hf")


@pytest.fixture
def orbax(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound / "orbax", tmp_path / "orbax")


def refused(source: Path, *parts: str) -> None:
    """Refused at once, in one line that has all the parts in it."""
    begun = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        load(source)
    assert time.monotonic() - begun < 5
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 700
    for part in (str(source.parent), *parts):
        assert part in message, message


def changed(fields: Any, key: str, value: Any) -> Any:
    """Fields with another value under a key; a dot leads into an object or the first of a list, an exclamation mark is a dot."""
    first, _, rest = key.partition(".")
    first = first.replace("!", ".")
    if isinstance(fields, list):
        return [changed(fields[0], key, value), *fields[1:]]
    return fields | {first: changed(fields[first], rest, value) if rest else value}


WRONG: dict[str, tuple[Any, ...]] = {
    "size": ("32", None, True, 32.5, [32], {"a": 1}, -1, 0, 2**31, 10**400, float("nan")),
    "number": ("1", True, [1.0], {}, -1.0, 0.0, 1e300, 10**400, float("inf"), float("nan")),
    "flag": ("yes", 1, [], 0.5),
    "text": (5, [], True, 1.5, {}),
    "object": (5, [], "yes", True),
    "token": (5, [], True, {}, {"content": 5}, {"content": {"content": "a"}}),
    "template": (5, True, {}, [5], [{}], [{"name": "default"}], [{"name": "default", "template": 5}]),
    "id": ("1", True, [True], [[1]], -1, [1, None], 2**31, 10**30, 1.0, {}),
    "numbers": (5, "1", ["1"], [True], [[1.0]], [float("nan")], [0.0], {}),
    "shard": (5, None, "../a.safetensors", "/a.safetensors", "a/b.safetensors", "..", "", "a\\b.safetensors", "a.bin"),
}
"""Values that a field of each kind cannot have."""

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS = {"type": "yarn", "factor": 4.0, "mscale": 1.0, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}

FIELDS = [
    *(("config.json", key, "size") for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")),
    *(("config.json", key, "size") for key in ("num_attention_heads", "max_position_embeddings")),
    *(("config.json", key, "number") for key in ("rms_norm_eps", "rope_theta", "rope_scaling.factor")),
    *(("config.json", key, "numbers") for key in ("rope_scaling.short_factor", "rope_scaling.long_factor")),
    *(("config.json", key, "flag") for key in ("tie_word_embeddings", "attention_bias", "mlp_bias")),
    *(("config.json", key, "object") for key in ("rope_scaling", "rope_parameters", "quantization_config")),
    *(("config.json", key, "text") for key in ("model_type", "hidden_act", "rope_scaling.type")),
    *(("config.json", key, "id") for key in ("eos_token_id", "bos_token_id")),
    ("generation_config.json", "eos_token_id", "id"),
    ("tokenizer_config.json", "bos_token", "token"),
    ("tokenizer_config.json", "chat_template", "template"),
    (INDEX, "weight_map", "object"),
    (INDEX, "weight_map", "text"),
    (INDEX, "weight_map.lm_head!weight", "shard"),
    ("kvjax.json", "version", "object"),
    *(("kvjax.json", f"config.{key}", "size") for key in ("vocab_size", "max_position", "kinds.mlp.width")),
    *(("kvjax.json", f"config.kinds.mixer.{key}", "size") for key in ("num_heads", "num_kv_heads", "head_dim")),
    *(("kvjax.json", f"config.{key}", "number") for key in ("norm_eps", "kinds.mixer.rope.theta")),
    *(
        ("kvjax.json", f"config.{key}", "flag")
        for key in ("tied", "kinds.mixer.qk_norm", "kinds.mixer.rope.interleaved")
    ),
    *(("kvjax.json", key, "object") for key in ("config", "config.kinds", "config.kinds.mixer", "config.kinds.mlp")),
    *(("kvjax.json", f"config.kinds.mixer.{key}", "object") for key in ("rope", "rope.scaling")),
    *(("kvjax.json", f"config.{key}", "id") for key in ("eos", "bos")),
]


@pytest.mark.parametrize(("file", "key", "kind"), FIELDS)
def test_wrong_values(directory: Path, orbax: Path, file: str, key: str, kind: str) -> None:
    source = orbax if file == "kvjax.json" else directory
    fields = json.loads((source / file).read_text())
    if key.startswith("rope_scaling"):
        fields["rope_scaling"] = SCALINGS
    *_, name = key.split(".")
    for value in WRONG[kind]:
        (source / file).write_text(json.dumps(changed(fields, key, value)))
        refused(source, file, name.replace("!", "."))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000; it should be less than or equal to 4096"),
        ({"num_hidden_layers": 4000}, "asks for 4000 layers, but there are only 21 tensors"),
        ({"eos_token_id": [1, 300]}, "eos token id 300 is outside the vocabulary of 300"),
        ({"bos_token_id": 300}, "bos token id 300 is outside the vocabulary of 300"),
        ({"rms_norm_eps": 2.0}, "norm_eps=2.0 must lie between 0 and 1"),
        ({"rope_theta": 0.5}, "rope theta=0.5 must lie between 1 and 1e30"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor=4.0 must be below high_freq_factor=4.0"),
        ({"rope_scaling": LLAMA3 | {"factor": 1e20}}, "factor=1e+20 must lie between 1e-6 and 1e10"),
        ({"model_type": ["llama"]}, "unknown model_type ['llama']"),
    ],
)
def test_impossible_models(directory: Path, change: dict[str, Any], message: str) -> None:
    (directory / "generation_config.json").unlink()
    (directory / "config.json").write_text(json.dumps(HF_CONFIG | change))
    refused(directory, "config.json" if "tensors" not in message else "hf", message)


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer_config.json", INDEX, "kvjax.json"]
)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "a JSON object was expected, got list"),
        (b"null", "a JSON object was expected, got NoneType"),
        (b'{"a": 1, "b": 2, "a": 3}', "duplicate key a"),
        (b'{"a": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": "\\ud800"}', "not valid JSON"),
        (b'{"a": "\xff"}', "not UTF-8 text"),
        (b"\xff\xfe{\0}\0", "not UTF-8 text"),
    ],
)
def test_files_that_are_no_json_objects(directory: Path, orbax: Path, file: str, content: bytes, message: str) -> None:
    source = orbax if file == "kvjax.json" else directory
    (source / file).write_bytes(content)
    refused(source, file, message)


PIPES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


@pytest.mark.parametrize("name", [*PIPES, INDEX, "model-00001-of-00002.safetensors", "kvjax.json", "only.gguf"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_pipes_and_directories_for_files(directory: Path, name: str, make: Callable[[Path], None]) -> None:
    if name == "only.gguf":
        (directory / "config.json").unlink()
    (directory / name).unlink(missing_ok=True)
    make(directory / name)
    kind = "directory" if make is os.mkdir else "pipe, socket or device"
    refused(directory, name, f"a regular file was expected, not a {kind}")


def test_a_pipe_for_a_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    refused(tmp_path / "m.gguf", "m.gguf: a regular file was expected")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load("a" * 5000)


def test_links_into_a_cache_are_followed(directory: Path, tmp_path: Path) -> None:
    for i, file in enumerate(sorted(directory.iterdir())):
        (tmp_path / "blobs").mkdir(exist_ok=True)
        file.rename(tmp_path / "blobs" / str(i))
        file.symlink_to(tmp_path / "blobs" / str(i))
    load(directory)


def header(entries: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 8,
        (2**62).to_bytes(8, "little") + b"{}",
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"1234"),
        header({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"),
        header({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}, b"1234"),
        header({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}, b"1234"),
        header({"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}, b"1234"),
        header({"a": []}, b""),
    ],
)
def test_damaged_safetensors_headers(directory: Path, content: bytes) -> None:
    (directory / "model-00001-of-00002.safetensors").write_bytes(content)
    refused(directory, "model-00001-of-00002.safetensors", "truncated or not a safetensors file")


def test_tensors_of_nothing(tmp_path: Path) -> None:
    tensors = weights(from_hf(HF_CONFIG)) | {"model.norm.weight": np.ones(0, np.float32)}
    write_hf(tmp_path / "hf", tensors=tensors)
    refused(tmp_path / "hf", "model.norm.weight has shape [0], the configuration asks for [32]")


def gguf_with(path: Path, **metadata: Any) -> Path:
    """A file with a tokenizer; dots in the names of fields are written as two underscores."""
    file = path / "m.gguf"
    fields = GGUF_TOKENIZER | {name.replace("__", "."): value for name, value in metadata.items()}
    write_gguf(file, from_hf(HF_CONFIG | {"bos_token_id": None, "eos_token_id": None}), metadata=fields)
    return file


@pytest.mark.parametrize("kind", ["UINT8", "INT8", "BOOL", "STRING", "FLOAT64", "ARRAY"])
@pytest.mark.parametrize("count", [2**60, 2**64 - 1, 10**6])
def test_gguf_arrays_claim_no_more_than_the_file(tmp_path: Path, kind: str, count: int) -> None:
    file = gguf_with(tmp_path, some__list=[1, 2, 3])
    key = b"some.list" + struct.pack("<I", gguf.GGUFValueType.ARRAY)
    content = file.read_bytes()
    at = content.index(key) + len(key)
    claim = struct.pack("<IQ", gguf.GGUFValueType[kind], count)
    file.write_bytes(content[:at] + claim + content[at + len(claim) :])
    refused(file, "m.gguf: truncated, damaged or not a GGUF file")


@pytest.mark.parametrize("kind", range(13))
def test_gguf_values_of_any_type(tmp_path: Path, kind: int) -> None:
    """A field of the configuration under every type of value: read where it is a fitting number, else refused."""
    file = gguf_with(tmp_path)
    key = b"llama.attention.head_count" + struct.pack("<I", gguf.GGUFValueType.UINT32)
    content = file.read_bytes()
    at = content.index(key) + len(key)
    file.write_bytes(content[: at - 4] + struct.pack("<I", kind) + content[at:])
    if kind in (gguf.GGUFValueType.UINT32, gguf.GGUFValueType.INT32):
        load(file)
    else:
        refused(file, "m.gguf")


def test_gguf_tensors_of_nothing(tmp_path: Path) -> None:
    file = gguf_with(tmp_path)
    name = b"output_norm.weight" + struct.pack("<IQ", 1, 32)
    content = file.read_bytes()
    assert content.count(name) == 1
    file.write_bytes(content.replace(name, b"output_norm.weight" + struct.pack("<IQ", 1, 0)))
    refused(file, "output_norm.weight has shape [0], which has no elements")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("llama.block_count", 10**7, "llama.block_count is 10000000; it should be less than or equal to 4096"),
        ("llama.attention.head_count", 0, "llama.attention.head_count is 0; it should be greater than 0"),
        ("llama.attention.head_count_kv", 0, "llama.attention.head_count_kv is 0; it should be greater than 0"),
        ("llama.attention.key_length", 0, "llama.attention.key_length is 0; it should be greater than 0"),
        ("llama.embedding_length", 0, "llama.embedding_length is 0; it should be greater than 0"),
        ("llama.rope.dimension_count", 2**20, "rope.dim=1048576 must be even and at most head_dim=8"),
    ],
)
def test_impossible_gguf_models(tmp_path: Path, field: str, value: int, message: str) -> None:
    file = gguf_with(tmp_path)
    key = field.encode() + struct.pack("<I", gguf.GGUFValueType.UINT32)
    content = file.read_bytes()
    at = content.index(key) + len(key)
    file.write_bytes(content[:at] + struct.pack("<I", value) + content[at + 4 :])
    refused(file, message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokenizer.ggml.eos_token_id", 300, "eos token id 300 is outside the vocabulary of 300"),
        ("tokenizer.ggml.bos_token_id", 300, "bos token id 300 is outside the vocabulary of 300"),
        ("tokenizer.ggml.unknown_token_id", 261, "tokenizer.ggml.unknown_token_id is 261; it should be below 261"),
        ("tokenizer.ggml.eos_token_id", "1", "tokenizer.ggml.eos_token_id is '1'; it should be a valid integer"),
        ("tokenizer.ggml.tokens", [1, 2], "tokenizer.ggml.tokens.0 is 1; it should be a valid string"),
        ("tokenizer.ggml.tokens", ["a" * 2000], "tokenizer.ggml.tokens.0 is 'aaa"),
        ("tokenizer.ggml.merges", "h e", "tokenizer.ggml.merges is 'h e'; it should be a valid list"),
        ("tokenizer.ggml.token_type", [1], "tokenizer.ggml.token_type needs one type for each of the 261 tokens"),
        ("tokenizer.ggml.model", 5, "tokenizer.ggml.model is 5; it should be a valid string"),
        ("tokenizer.chat_template", 5, "tokenizer.chat_template is 5; it should be a valid string"),
        ("llama.rope.scaling.type", True, "llama.rope.scaling.type is True; it should be a valid string"),
        ("llama.rope.scaling.factor", "4", "llama.rope.scaling.factor is '4'; it should be a valid number"),
        ("llama.expert_count", "4", "llama.expert_count is '4'; it should be a valid integer"),
        ("general.alignment", 3, "truncated, damaged or not a GGUF file"),
    ],
)
def test_wrong_gguf_values(tmp_path: Path, field: str, value: Any, message: str) -> None:
    refused(gguf_with(tmp_path, **{field.replace(".", "__"): value}), message)


def test_tokens_beyond_the_vocabulary_are_told(directory: Path, tmp_path: Path) -> None:
    backend = byte_tokenizer()
    backend.add_tokens([f"<extra{i}>" for i in range(50)])
    backend.save(str(directory / "tokenizer.json"))
    words = "tokens are beyond the model's vocabulary of 300, the first of them"
    with pytest.warns(UserWarning, match=f"tokenizer.json: 11 {words} '<extra39>' with id 300; prompts that hold them"):
        params = load(directory)
    assert params.tokenizer.encode("<extra39>") == [300]
    tokens = [*GGUF_TOKENIZER["tokenizer.ggml.tokens"], *(f"<extra{i}>" for i in range(50))]
    types = GGUF_TOKENIZER["tokenizer.ggml.token_type"] + [1] * 50
    file = gguf_with(tmp_path, tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=types)
    with pytest.warns(UserWarning, match=f"m.gguf: 11 {words} '<extra39>' with id 300"):
        load(file)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_that_are_not_finite_are_told(tmp_path: Path, dtype: str) -> None:
    tensors = {name: value.astype(jnp.dtype(dtype)) for name, value in weights(from_hf(HF_CONFIG)).items()}
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5:7] = np.nan, np.inf
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = -np.inf
    write_hf(tmp_path / "hf", tensors=tensors)
    with pytest.warns(
        UserWarning, match=rf"hf: 3 weights are NaN or infinite in {dtype}, the first of them in layers.0.mlp.up"
    ):
        load(tmp_path / "hf", dtype=dtype)


def test_weights_that_exceed_their_new_type_are_told(tmp_path: Path) -> None:
    tensors = weights(from_hf(HF_CONFIG))
    tensors["model.norm.weight"][7] = 1e6
    write_hf(tmp_path / "hf", tensors=tensors)
    with pytest.warns(UserWarning, match=r"1 weights are NaN or infinite in float16, the first of them in norm"):
        load(tmp_path / "hf", dtype="float16")
    load(tmp_path / "hf", dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_number_is_looked_at(dtype: str) -> None:
    kind = jnp.dtype(dtype)
    array = np.full((300, 700), jnp.finfo(kind).max, kind)
    assert count_not_finite(array) == 0
    for place in ((0, 0), (150, 3), (299, 699)):
        array[place] = -np.inf
    assert count_not_finite(array) == 3
    assert count_not_finite(np.zeros((0, 3), kind)) == 0


def _without_manifest(params: Path) -> None:
    (params / "manifest.ocdbt").unlink()


def _with_a_pipe(params: Path) -> None:
    (params / "manifest.ocdbt").unlink()
    os.mkfifo(params / "manifest.ocdbt")


def _without_data(params: Path) -> None:
    for file in params.rglob("d/*"):
        file.unlink()


def _truncated(params: Path) -> None:
    for file in params.rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _scrambled(params: Path) -> None:
    for file in params.rglob("d/*"):
        file.write_bytes(bytes(byte ^ 0x55 for byte in file.read_bytes()))


def _empty(params: Path) -> None:
    for file in params.rglob("d/*"):
        file.write_bytes(b"")


@pytest.mark.parametrize("damage", [_without_manifest, _with_a_pipe, _without_data, _truncated, _scrambled, _empty])
def test_damaged_orbax_directories(orbax: Path, damage: Callable[[Path], None]) -> None:
    damage(orbax / "params")
    refused(orbax, "params")


def test_describe_refuses_alike(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(HF_CONFIG | {"num_hidden_layers": 4000}))
    with pytest.raises(CheckpointError, match="asks for 4000 layers"):
        describe(directory)
