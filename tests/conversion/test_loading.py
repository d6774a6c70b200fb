"""Hugging Face directories: what is read, and what is refused."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import HF_CONFIG, weights, write_gguf, write_hf
from safetensors.numpy import save_file

from kvjax.conversion import CheckpointError, convert, describe, from_hf, from_state_dict, hub, load, loading, save
from kvjax.models import Params

LAST = "model.layers.1.mlp.down_proj.weight"


def same(ours: Params, theirs: Params) -> bool:
    return ours.config == theirs.config and jax.tree.all(
        jax.tree.map(np.array_equal, ours.replace(tokenizer=None), theirs.replace(tokenizer=None))
    )


@pytest.mark.parametrize("files", [1, 3])
def test_reads_one_file_and_shards(tmp_path: Path, files: int) -> None:
    tensors = write_hf(tmp_path, files=files)
    params = load(tmp_path, progress=False)
    np.testing.assert_array_equal(params.embed, tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params.layers[1].attn.k, tensors["model.layers.1.self_attn.k_proj.weight"])
    np.testing.assert_array_equal(params.layers[0].mlp_norm, tensors["model.layers.0.post_attention_layernorm.weight"])
    assert same(params, from_state_dict(from_hf(HF_CONFIG), tensors))
    assert params.tokenizer is None


def test_two_models_in_one_directory_are_refused(tmp_path: Path) -> None:
    """One in shards and one in a single file: transformers would read the single file."""
    tensors = write_hf(tmp_path, files=2)
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"two models, one in model\.safetensors and one in the files that"):
        load(tmp_path)


def test_cuts_fused_projections(tmp_path: Path) -> None:
    fields = HF_CONFIG | {"model_type": "phi3"}
    tensors = write_hf(tmp_path, fields)
    layer = load(tmp_path).layers[1]
    fused = tensors["model.layers.1.self_attn.qkv_proj.weight"]
    np.testing.assert_array_equal(layer.attn.q, fused[:32])
    np.testing.assert_array_equal(layer.attn.k, fused[32:48])
    np.testing.assert_array_equal(layer.attn.v, fused[48:])
    np.testing.assert_array_equal(layer.mlp.gate, tensors["model.layers.1.mlp.gate_up_proj.weight"][:64])
    np.testing.assert_array_equal(layer.mlp.up, tensors["model.layers.1.mlp.gate_up_proj.weight"][64:])


def test_devices_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hf(tmp_path)
    (first, *_), there = jax.devices("cpu"), len(jax.devices("cpu"))
    for name in ("cpu", "CPU", "cpu:0"):
        assert {device for leaf in jax.tree.leaves(load(tmp_path, device=name)) for device in leaf.devices()} == {first}
    monkeypatch.setattr(loading, "open_checkpoint", None)
    for name, says in (
        ("tpu", "device='tpu' is not here; JAX has cpu:0"),
        (f"cpu:{there}", f"device='cpu:{there}' is not here; JAX has cpu:0"),
        ("abacus", "device='abacus' is not here"),
        ("cpu:x", "device='cpu:x'; give a device of jax.devices"),
        ("", "device=''; give"),
        (0, r"device is 0 \(int\); give a device of jax.devices"),
    ):
        with pytest.raises(ValueError, match=says):
            load(tmp_path, device=name)


def test_types(tmp_path: Path) -> None:
    config = from_hf(HF_CONFIG)
    tensors = {name: value.astype(jnp.bfloat16) for name, value in weights(config).items()}
    write_hf(tmp_path, tensors=tensors)
    assert load(tmp_path).dtype == jnp.float32, "the default on CPU"
    for dtype in (jnp.bfloat16, "float16", np.float32):
        params = load(tmp_path, dtype=dtype)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
        np.testing.assert_array_equal(params.norm, tensors["model.norm.weight"].astype(dtype))
    with pytest.raises(ValueError, match=r"dtype='int8' is not one of float32, float16, bfloat16"):
        load(tmp_path, dtype="int8")


def test_accelerators_keep_the_type_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_platform", lambda device: "tpu")
    config = from_hf(HF_CONFIG)
    write_hf(tmp_path / "full")
    write_hf(tmp_path / "half", tensors={name: value.astype(np.float16) for name, value in weights(config).items()})
    write_gguf(tmp_path / "quantised.gguf", config, "Q8_0")
    for name, dtype in (("full", jnp.float32), ("half", jnp.float16), ("quantised.gguf", jnp.bfloat16)):
        assert load(tmp_path / name).dtype == dtype


def test_sentencepiece_files_alone_are_mentioned(tmp_path: Path) -> None:
    write_hf(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.warns(
        UserWarning, match=r"tokenizer.model alone is not supported, so the model is loaded without a tokenizer"
    ):
        assert load(tmp_path).tokenizer is None


def test_goes_to_the_device_it_is_told(tmp_path: Path) -> None:
    write_hf(tmp_path)
    device = jax.devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    for place in (device, sharding):
        params = load(tmp_path, device=place)
        assert {leaf.sharding for leaf in jax.tree.leaves(params)} == {sharding}
        assert params.embed.committed


def test_harmless_extras_are_passed_over(tmp_path: Path) -> None:
    fields = HF_CONFIG | {"tie_word_embeddings": True}
    tensors = weights(from_hf(fields))
    extras = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    write_hf(tmp_path, fields, tensors | extras)
    assert load(tmp_path).head is None


TIED = HF_CONFIG | {"tie_word_embeddings": True}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_head_that_differs_from_its_embedding_is_used(tmp_path: Path, dtype: Any) -> None:
    """As transformers does, whatever `tie_word_embeddings` says; what is written then says so too."""
    tensors = weights(from_hf(TIED))
    head = tensors[EMBEDDING].astype(dtype)
    head[-1, -1] += 1
    write_hf(tmp_path / "m", TIED, tensors | {HEAD: head})
    with pytest.warns(UserWarning, match=r"ties the head to the embedding .* lm_head.weight differs from model.embed"):
        params = load(tmp_path / "m", dtype="float32")
    np.testing.assert_array_equal(params.head, head)
    np.testing.assert_array_equal(params.embed, tensors[EMBEDDING])
    assert not params.config.tied
    with pytest.warns(UserWarning, match="ties the head to the embedding"):
        assert not describe(tmp_path / "m").config.tied
    assert same(load(save(params, tmp_path / "again", format="safetensors", dtype="float32")), params)
    with pytest.warns(UserWarning, match="state dict: the configuration ties"):
        assert same(from_state_dict(from_hf(TIED), tensors | {HEAD: head}), params)


def test_a_head_of_another_shape_is_told(tmp_path: Path) -> None:
    write_hf(tmp_path, TIED, weights(from_hf(TIED)) | {HEAD: np.ones((299, 32), np.float32)})
    with (
        pytest.warns(UserWarning, match="ties the head"),
        pytest.raises(CheckpointError, match=r"lm_head.weight has shape \[299, 32\], the configuration asks for \[300"),
    ):
        load(tmp_path)


def _only_the_head(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {HEAD if name == EMBEDDING else name: value for name, value in tensors.items()}


def _of_a_base_model(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix("model."): value for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        (TIED, _only_the_head),
        (TIED, _of_a_base_model),
        (TIED, lambda tensors: _of_a_base_model(_only_the_head(tensors))),
        (HF_CONFIG, _of_a_base_model),
    ],
)
@pytest.mark.filterwarnings("error")
def test_other_names_for_the_same_tensors(tmp_path: Path, fields: dict[str, Any], change: Any) -> None:
    tensors = weights(from_hf(fields))
    expected = from_state_dict(from_hf(fields), tensors)
    write_hf(tmp_path, fields, change(tensors))
    assert same(load(tmp_path), expected)
    assert same(from_state_dict(from_hf(fields), change(tensors)), expected)


def test_a_head_alone_is_not_enough_where_nothing_is_tied(tmp_path: Path) -> None:
    tensors = weights(from_hf(HF_CONFIG))
    del tensors[EMBEDDING]
    write_hf(tmp_path, HF_CONFIG, tensors)
    with pytest.raises(CheckpointError, match=r"1 tensor missing: model.embed_tokens.weight"):
        load(tmp_path)


def test_describe_reads_headers_only(tmp_path: Path) -> None:
    write_hf(tmp_path, files=2, tokenizer=True)
    found = describe(tmp_path)
    params = load(tmp_path)
    assert found.config == params.config
    assert found.parameters == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert found.dtypes == (("float32", 4 * found.parameters),)
    assert (found.format, found.nbytes) == ("safetensors", 4 * found.parameters)
    assert found.tokenizer == params.tokenizer


def test_real_checkpoint(shared: Path) -> None:
    params = load(shared / "data/models/stories260K-hf")
    assert params.config.num_layers == 5
    assert params.tokenizer.decode(params.tokenizer.encode("Once upon a time")) == "Once upon a time"


def _drop(path: Path) -> None:
    tensors = weights(from_hf(HF_CONFIG))
    del tensors[LAST]
    save_file(tensors, path / "model.safetensors")


def _add(path: Path) -> None:
    tensors = weights(from_hf(HF_CONFIG)) | {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}
    save_file(tensors, path / "model.safetensors")


def _reshape(path: Path) -> None:
    tensors = weights(from_hf(HF_CONFIG))
    tensors[LAST] = np.ascontiguousarray(tensors[LAST].T)
    save_file(tensors, path / "model.safetensors")


def _retype(path: Path) -> None:
    tensors = weights(from_hf(HF_CONFIG))
    tensors[LAST] = tensors[LAST].astype(np.int8)
    save_file(tensors, path / "model.safetensors")


def _truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _scramble(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not a json header")


def _empty(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"")


def _two_files(path: Path) -> None:
    (path / "model.safetensors").rename(path / "part-1.safetensors")
    save_file({"model.norm.weight": np.ones(32, np.float32)}, path / "part-2.safetensors")


def _twice_in_one(path: Path) -> None:
    file = path / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length].strip(), content[8 + length :]
    entry = json.dumps({"model.norm.weight": json.loads(header)["model.norm.weight"]}).encode()[1:-1]
    header = header[:-1] + b"," + entry + b"}"
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


def _no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def _bad_json(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": ')


def _list_json(path: Path) -> None:
    (path / "config.json").write_text("[]")


def _no_config(path: Path) -> None:
    (path / "config.json").unlink()


def _missing_shard(path: Path) -> None:
    write_hf(path, files=3)
    (path / "model-00002-of-00003.safetensors").unlink()


def _empty_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text("{}")


def _bad_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_text('{"model": "?"}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop, rf"1 tensor missing: {LAST}"),
        (
            _add,
            r"1 tensor that a llama model of this configuration does not have: model.layers.0.self_attn.q_proj.bias",
        ),
        (_reshape, rf"model.safetensors: tensor {LAST} has shape \[64, 32\], the configuration asks for \[32, 64\]"),
        (_retype, rf"model.safetensors: tensor {LAST} is I8; supported are F32, F16, BF16"),
        (_truncate, r"model.safetensors: truncated or not a safetensors file"),
        (_scramble, r"model.safetensors: truncated or not a safetensors file"),
        (_empty, r"model.safetensors: truncated or not a safetensors file"),
        (_two_files, r"part-2.safetensors: duplicate tensor model.norm.weight, also in part-1.safetensors"),
        (_twice_in_one, r"model.safetensors: truncated or not a safetensors file .duplicate key model.norm.weight"),
        (_no_weights, r"no .safetensors file there"),
        (_bad_json, r"config.json: not valid JSON"),
        (_list_json, r"config.json: a JSON object was expected, got list"),
        (_no_config, r"no config.json there"),
        (_missing_shard, r"1 of 3 shards missing: model-00002-of-00003.safetensors"),
        (_empty_index, r"index.json: weight_map is missing"),
        (_bad_tokenizer, r"tokenizer.json: not a tokenizer"),
    ],
)
def test_says_what_is_wrong(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    write_hf(tmp_path)
    load(tmp_path)  # sound before
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message) as raised:
        load(tmp_path)
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


class _Trap:
    """Unpickling it writes a file."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.sprung,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "weights.ckpt"])
def test_pickles_are_refused_unopened(tmp_path: Path, name: str) -> None:
    write_hf(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    sprung = tmp_path / "sprung"
    (tmp_path / name).write_bytes(pickle.dumps(_Trap(sprung)))
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=rf"{name}: a \.\w+ checkpoint is a pickle, which can run code"):
            load(source)
    assert not sprung.exists()


def test_safetensors_win_over_pickles(tmp_path: Path) -> None:
    write_hf(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(_Trap(tmp_path / "sprung")))
    load(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_sources_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="no such file or directory, and not a hub id, which looks like owner/name"
    ):
        load(tmp_path / "nothing")
    for read in (load, describe):
        with pytest.raises(ValueError, match='source="" is empty; give a path or a hub id, or None for the default'):
            read("")
    write_hf(tmp_path)
    with pytest.raises(CheckpointError, match="give the directory that contains it"):
        load(tmp_path / "model.safetensors")


def test_a_tokenizer_in_place_of_the_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From wherever a model's own may come; end tokens are the model's. The model's own files are not even looked at."""
    model, other = tmp_path / "model", tmp_path / "other"
    write_hf(model, tokenizer=True)
    write_hf(other, tokenizer=True)
    (other / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": "another"}))
    (model / "tokenizer.json").write_text("damaged")
    alphabet = [load(other).tokenizer.backend.id_to_token(i) for i in range(261)]
    fields = {"model": "gpt2", "pre": "smollm", "tokens": alphabet, "merges": ["h e", "l l", "he ll"]}
    fields |= {"token_type": [3, 3] + [1] * 259, "eos_token_id": 1, "bos_token_id": 0}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    gguf = tmp_path / "gguf" / "model.gguf"
    gguf.parent.mkdir()
    write_gguf(gguf, from_hf(HF_CONFIG), metadata=metadata | {"tokenizer.chat_template": "another"})
    given = load(other).tokenizer
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in (given, other, str(other), other / "tokenizer.json", gguf, gguf.parent, "~/other"):
        params = load(model, tokenizer=source)
        assert params.tokenizer.chat_template == "another"
        assert params.tokenizer.encode("hell</s>") == [260, 1]
        assert (params.config.eos, params.tokenizer.eos) == ((1,), (1,))
    assert load(gguf, tokenizer=other).tokenizer == given
    fetched = []
    monkeypatch.setattr(hub, "_download", lambda repo_id, patterns, *_: fetched.append((repo_id, patterns)) or other)
    assert load(model, tokenizer="owner/name").tokenizer == given
    assert fetched == [("owner/name", list(hub.TOKENIZER))], "no weights"
    convert(model, tmp_path / "converted", tokenizer=other)
    assert load(tmp_path / "converted").tokenizer.chat_template == "another"


def test_tokenizers_that_are_none(tmp_path: Path) -> None:
    """Refused before the model is looked for."""
    write_hf(tmp_path / "bare")
    for source in (tmp_path / "bare", tmp_path / "nothing", "nothing", tmp_path / "bare" / "config.json"):
        with pytest.raises(
            CheckpointError, match=r"tokenizer='.*': no tokenizer there; give a directory with a tokenizer.json"
        ):
            load(tmp_path / "no model", tokenizer=source)
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match="a regular file was expected"):
        load(tmp_path / "no model", tokenizer=tmp_path / "tokenizer.json")
    write_hf(tmp_path / "large", tokenizer=True)
    small = HF_CONFIG | {"vocab_size": 200}
    write_hf(tmp_path / "small", small)
    with pytest.warns(UserWarning, match="61 tokens are beyond the model's vocabulary of 200"):
        load(tmp_path / "small", tokenizer=tmp_path / "large")


def test_state_dicts_are_checked_too() -> None:
    config = from_hf(HF_CONFIG)
    tensors = weights(config)
    missing = {name: value for name, value in tensors.items() if "layers.1" not in name}
    with pytest.raises(CheckpointError, match=r"state dict: 9 tensors missing: model.layers.1.* and 6 more"):
        from_state_dict(config, missing)
    assert from_state_dict(config, tensors, "bfloat16").dtype == jnp.bfloat16


def test_parameters_stand_on_no_one_elses_memory(tmp_path: Path) -> None:
    config = from_hf(HF_CONFIG)
    tensors = weights(config)
    held = from_state_dict(config, tensors)
    before = np.array(held.embed)
    tensors["model.embed_tokens.weight"][:] = 0
    np.testing.assert_array_equal(held.embed, before)

    # Every alignment a file may have: the data follow a header of any length.
    write_hf(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    for pad in range(0, 64, 8):
        padded = (length + pad).to_bytes(8, "little") + content[8 : 8 + length] + b" " * pad + content[8 + length :]
        file.write_bytes(padded)
        params = load(tmp_path)
        with file.open("r+b") as stream:
            stream.seek(8 + length + pad)
            stream.write(bytes(len(content) - 8 - length))
        assert all(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("old", [True, False])
def test_the_text_model_of_a_checkpoint_with_a_vision_tower(tmp_path: Path, old: bool) -> None:
    """Both spellings of its tensors' names; the vision tower is not read."""
    text = HF_CONFIG | {"model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 8}
    held = weights(from_hf(text))
    prefix = "language_model.model." if old else "model.language_model."
    tensors = {prefix + name.removeprefix("model."): tensor for name, tensor in held.items()}
    tower = "" if old else "model."
    more = {
        f"{tower}{name}.weight": np.zeros((2, 3), np.float32) for name in ("vision_tower.a", "multi_modal_projector.b")
    }
    fields = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    write_hf(tmp_path / "whole", fields, tensors | more)
    write_hf(tmp_path / "text", text, held)
    whole, alone = load(tmp_path / "whole"), load(tmp_path / "text")
    assert whole.config == alone.config
    jax.tree.map(np.testing.assert_array_equal, whole, alone)
