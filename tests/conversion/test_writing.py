"""`convert`: what is written loads again, here and in transformers; failures leave nothing behind."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from checkpoints import HF_CONFIG, byte_tokenizer, write_gguf, write_hf
from oracles import logits
from safetensors import safe_open

import kvjax
from kvjax.conversion import CheckpointError, convert, describe, from_hf, load, orbax_streaming, writing
from kvjax.models import Params, abstract

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "mistral": {"model_type": "mistral", "sliding_window": 16},
    "phi3": {
        "model_type": "phi3",
        "original_max_position_embeddings": 32,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    },
    "glm4": {"model_type": "glm4", "head_dim": 8},
}


def assert_equal(ours: Params, theirs: Params) -> None:
    assert ours.config == theirs.config
    assert ours.tokenizer == theirs.tokenizer
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trips(tmp_path: Path, name: str) -> None:
    write_hf(tmp_path / "hf", HF_CONFIG | FAMILIES[name], tokenizer=True)
    original = load(tmp_path / "hf")
    orbax = convert(tmp_path / "hf", tmp_path / "orbax")
    assert_equal(load(orbax), original)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(orbax / "params")
    np.testing.assert_array_equal(restored["layers.1.mlp.up"], original.layers[1].mlp.up)
    again = convert(orbax, tmp_path / "again", format="safetensors")
    assert_equal(load(again), original)
    with (
        safe_open(tmp_path / "hf/model.safetensors", "numpy") as theirs,
        safe_open(again / "model.safetensors", "numpy") as ours,
    ):
        assert set(ours.keys()) == set(theirs.keys())
        for tensor in ours.keys():  # noqa: SIM118, not a mapping
            np.testing.assert_array_equal(ours.get_tensor(tensor), theirs.get_tensor(tensor))


def test_gguf_becomes_anything(tmp_path: Path) -> None:
    config = from_hf(HF_CONFIG | {"eos_token_id": None, "bos_token_id": None})
    write_gguf(tmp_path / "m.gguf", config, "Q4_0")
    exact = load(tmp_path / "m.gguf")
    assert_equal(load(convert(tmp_path / "m.gguf", tmp_path / "exact", dtype="float32")), exact)
    default = convert(tmp_path / "m.gguf", tmp_path / "default", format="safetensors")
    assert describe(default).dtypes[0][0] == "bfloat16"
    assert json.loads((default / "config.json").read_text())["torch_dtype"] == "bfloat16"
    np.testing.assert_array_equal(load(default).embed, exact.embed.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_types(tmp_path: Path, format: Any, dtype: str) -> None:
    write_hf(tmp_path / "hf")
    written = convert(tmp_path / "hf", tmp_path / "out", format=format, dtype=dtype)
    found = describe(written)
    assert (found.format, [name for name, _ in found.dtypes]) == (format, [dtype])
    np.testing.assert_array_equal(load(written, dtype=dtype).embed, load(tmp_path / "hf", dtype=dtype).embed)


def test_orbax_chunks_are_at_most_1_mib(tmp_path: Path) -> None:
    """Loading holds a few chunks in memory, so their size limits what it needs."""
    orbax_streaming.save(tmp_path / "params", {"x": lambda: np.zeros((768, 512), np.float32)})
    store = {"driver": "ocdbt", "base": f"file://{tmp_path}/params", "path": "x/"}
    written = tensorstore.open({"driver": "zarr", "kvstore": store}, open=True).result()
    assert 4 * math.prod(written.chunk_layout.read_chunk.shape) <= 2**20


def test_large_models_are_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hf(tmp_path / "hf")
    monkeypatch.setattr("kvjax.conversion.writing.SHARD_BYTES", 50_000)
    written = convert(tmp_path / "hf", tmp_path / "out", format="safetensors")
    shards = sorted(written.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    assert all(shard.stat().st_size < 55_000 for shard in shards)
    index = json.loads((written / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    assert index["metadata"]["total_size"] == describe(tmp_path / "hf").nbytes
    assert_equal(load(written), load(tmp_path / "hf"))


def test_failures_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hf(tmp_path / "hf")
    before = sorted(tmp_path.iterdir())

    def broken(*args: Any) -> None:
        (args[0] / "half.safetensors").write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setitem(writing._WRITERS, "safetensors", broken)
    with pytest.raises(OSError, match="No space left"):
        convert(tmp_path / "hf", tmp_path / "out", format="safetensors")
    assert sorted(tmp_path.iterdir()) == before

    (tmp_path / "hf/model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="truncated"):
        convert(tmp_path / "hf", tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_failures_keep_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hf(tmp_path / "hf")
    kept = load(convert(tmp_path / "hf", tmp_path / "out"))

    def broken(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(writing._WRITERS, "orbax", broken)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "hf", tmp_path / "out", overwrite=True)
    assert_equal(load(tmp_path / "out"), kept)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_overwriting(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf")
    out = convert(tmp_path / "hf", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"out exists; give another destination, or allow overwriting it"):
        convert(tmp_path / "hf", out)
    convert(tmp_path / "hf", out, format="safetensors", overwrite=True)
    assert describe(out).format == "safetensors"
    assert not (out / "kvjax.json").exists(), "nothing of the old one remains"
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/dear.txt").write_text("Dear …")
    with pytest.raises(CheckpointError, match=r"letters is not a model's directory, so it is not overwritten"):
        convert(tmp_path / "hf", tmp_path / "letters", overwrite=True)


def writes_while(monkeypatch: pytest.MonkeyPatch, format: str, meanwhile: Callable[[], object]) -> None:
    """Something happens as soon as the weights have been written."""
    write = writing._WRITERS[format]

    def writer(*args: Any) -> None:
        write(*args)
        meanwhile()

    monkeypatch.setitem(writing._WRITERS, format, writer)


@pytest.mark.parametrize("comes", ["file", "empty folder", "folder"])
def test_what_has_come_while_it_ran_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    write_hf(tmp_path / "hf")
    out = tmp_path / "out"
    if comes == "file":
        writes_while(monkeypatch, "safetensors", lambda: out.write_text("theirs"))
    else:
        inside = out / "letters" if comes == "folder" else out
        writes_while(monkeypatch, "safetensors", lambda: inside.mkdir(parents=True))
    with pytest.raises(CheckpointError, match="out: something else is there now and was kept"):
        convert(tmp_path / "hf", out, format="safetensors")
    if comes == "file":
        assert out.read_text() == "theirs"
    else:
        assert [path.name for path in out.iterdir()] == ["letters"] * (comes == "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_overwriting_deletes_nothing_but_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what was put beside the model, before or while the new one was written."""
    write_hf(tmp_path / "hf")
    out = convert(tmp_path / "hf", tmp_path / "out")
    says = r"out holds more than a model, so it is not overwritten: notes.txt; move that away"
    writes_while(monkeypatch, "orbax", lambda: (out / "notes.txt").write_text("mine"))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=says):
            convert(tmp_path / "hf", out, overwrite=True)
        assert (out / "notes.txt").read_text() == "mine"
        assert_equal(load(out), load(tmp_path / "hf"))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


@pytest.mark.parametrize("link", ["model", "elsewhere/model"])
def test_a_link_is_followed(tmp_path: Path, link: str) -> None:
    write_hf(tmp_path / "hf")
    target = tmp_path / link
    (tmp_path / "out").symlink_to(target)
    convert(tmp_path / "hf", tmp_path / "out")
    convert(tmp_path / "hf", tmp_path / "out", format="safetensors", overwrite=True)
    assert (tmp_path / "out").is_symlink()
    assert describe(target).format == "safetensors"


KILLED = """
import os, signal, sys
from kvjax._util import files
from kvjax.conversion import convert
files._claim = lambda *places: os.kill(os.getpid(), signal.SIGKILL)
convert(sys.argv[1], sys.argv[2], format="safetensors", overwrite=True)
"""


def test_loading_what_a_killed_run_was_replacing(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf")
    out = convert(tmp_path / "hf", tmp_path / "out")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "hf"), str(out)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists(), "killed between the two renames"
    assert describe(out).format == "orbax"
    assert_equal(load(out), load(tmp_path / "hf"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_damage_found_while_writing_leaves_nothing(tmp_path: Path, format: str) -> None:
    """Orbax is given tensors while it writes: an error there ends it, as itself."""
    write_hf(tmp_path / "hf")
    out = convert(tmp_path / "hf", tmp_path / "orbax")
    _no_data(out)
    with pytest.raises(CheckpointError, match="cannot be restored"):
        convert(out, tmp_path / "out", format=format)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "orbax"]


@pytest.mark.parametrize("name", ["llama", "phi3"])
@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_parameters_in_memory(tmp_path: Path, name: str, format: str) -> None:
    write_hf(tmp_path / "hf", HF_CONFIG | FAMILIES[name], tokenizer=True)
    trained = jax.tree.map(lambda leaf: leaf * 2, kvjax.load(tmp_path / "hf"))
    assert kvjax.save(trained, tmp_path / "out", format=format) == tmp_path / "out"
    assert describe(tmp_path / "out").format == format
    assert_equal(kvjax.load(tmp_path / "out"), trained)
    with pytest.raises(CheckpointError, match="out exists; give another destination"):
        kvjax.save(trained, tmp_path / "out")
    kvjax.save(trained, tmp_path / "out", format=format, dtype="bfloat16", overwrite=True)
    assert describe(tmp_path / "out").own_dtype == "bfloat16"
    half = kvjax.load(tmp_path / "out", dtype="bfloat16")
    kvjax.save(half, tmp_path / "half", format=format)
    assert describe(tmp_path / "half").own_dtype == "bfloat16", "their own type by default"
    assert_equal(kvjax.load(tmp_path / "half", dtype="bfloat16"), half)


def test_what_cannot_be_saved(tmp_path: Path, tiny: Params) -> None:
    for params, message in (
        ({"embed": 1}, "params is of type dict; give what kvjax.load returns"),
        (abstract(tiny.config), "parameter embed is of type ShapeDtypeStruct, which has no numbers"),
        (tiny.replace(tokenizer="gpt2"), "the tokenizer is of type str; give a kvjax.conversion.Tokenizer, or None"),
    ):
        with pytest.raises(TypeError, match=message):
            kvjax.save(params, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"norm has shape \[3\], the configuration asks for \[48\]"):
        kvjax.save(tiny.replace(norm=jnp.ones(3)), tmp_path / "out")
    with pytest.raises(ValueError, match="format='gguf' is not one of orbax, safetensors"):
        kvjax.save(tiny, tmp_path / "out", format="gguf")
    assert not list(tmp_path.iterdir())


def test_a_model_may_replace_itself(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", tokenizer=True)
    original = load(tmp_path / "hf", dtype="bfloat16")
    convert(tmp_path / "hf", tmp_path / "hf", format="safetensors", dtype="bfloat16", overwrite=True)
    assert_equal(load(tmp_path / "hf", dtype="bfloat16"), original)


def test_unknown_formats(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"format='pickle' is not one of orbax, safetensors"):
        convert(tmp_path, tmp_path / "out", format="pickle")
    write_hf(tmp_path / "hf")
    with pytest.raises(ValueError, match=r"dtype='int4' is not one of float32, float16, bfloat16"):
        convert(tmp_path / "hf", tmp_path / "out", dtype="int4")


def _newer(path: Path) -> None:
    header = json.loads((path / "kvjax.json").read_text())
    (path / "kvjax.json").write_text(json.dumps(header | {"version": 3}))


def _unknown(path: Path) -> None:
    header = json.loads((path / "kvjax.json").read_text())
    header["config"]["experts"] = 8
    (path / "kvjax.json").write_text(json.dumps(header))


def _wider(path: Path) -> None:
    header = json.loads((path / "kvjax.json").read_text())
    header["config"]["vocab_size"] = 301
    (path / "kvjax.json").write_text(json.dumps(header))


def _deeper(path: Path) -> None:
    header = json.loads((path / "kvjax.json").read_text())
    header["config"]["layers"].append(0)
    (path / "kvjax.json").write_text(json.dumps(header))


def _no_params(path: Path) -> None:
    shutil.rmtree(path / "params")


def _no_tree(path: Path) -> None:
    for file in (path / "params/d").iterdir():
        file.write_bytes(b"damaged")


def _no_data(path: Path) -> None:
    for file in (path / "params/ocdbt.process_0/d").iterdir():
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_newer, r"kvjax.json: version 3 is not supported; this kvjax reads versions 1 and 2"),
        (_unknown, r"kvjax.json: unknown fields experts of ModelConfig"),
        (_wider, r"tensor embed has shape \[300, 32\], the configuration asks for \[301, 32\]"),
        (_deeper, r"9 tensors missing: layers.2.attn.k, layers.2.attn.o, layers.2.attn.q and 6 more"),
        (_no_params, r"params: not an Orbax checkpoint, or damaged"),
        (_no_tree, r"params: not an Orbax checkpoint, or damaged"),
        (_no_data, r"tensor embed cannot be restored"),
    ],
)
def test_damaged_orbax(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    write_hf(tmp_path / "hf")
    out = convert(tmp_path / "hf", tmp_path / "out")
    damage(out)
    with pytest.raises(CheckpointError, match=message) as raised:
        load(out)
    assert str(out) in str(raised.value)


@pytest.mark.oracle
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_what_is_written(tmp_path: Path, name: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    write_hf(tmp_path / "hf", HF_CONFIG | FAMILIES[name], tokenizer=True)
    out = kvjax.save(load(convert(tmp_path / "hf", tmp_path / "orbax")), tmp_path / "out", format="safetensors")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    tokens = np.arange(40, dtype=np.int32).reshape(2, 20)
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(logits(load(out), tokens), theirs, atol=2e-5)

    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = "hello </s> wörld"
    assert tokenizer.encode(text) == byte_tokenizer().encode(text).ids
    assert tokenizer.eos_token_id == 1
    messages = [{"role": "user", "content": "hell"}]
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert load(out).tokenizer.chat(messages) == theirs["input_ids"]


def test_many_small_arrays_take_no_more_than_their_bytes(tmp_path: Path) -> None:
    """The store writes its index again at each write: 300 of them took twice the bytes of these arrays."""
    numbers = np.random.default_rng(0).integers(0, 256, (300, 5000), np.uint8)
    orbax_streaming.save(tmp_path / "params", {f"p{i}": lambda i=i: numbers[i] for i in range(len(numbers))})
    files = [file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()]
    metadata = sum(file.stat().st_size for file in (tmp_path / "params").glob("_*"))
    assert sum(files) - metadata < 1.05 * numbers.nbytes


@pytest.mark.parametrize("stage", ["read", "write"])
def test_ctrl_c_ends_between_two_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], stage: str
) -> None:
    """No write is left behind that would go on in a directory that is deleted, wherever Ctrl-C arrives."""
    before, seen = signal.getsignal(signal.SIGINT), []
    write = orbax_streaming._Batches._write

    def step(name: str) -> None:
        seen.append(name)
        if seen.count(stage) == 3 and name == stage:
            signal.raise_signal(signal.SIGINT)

    def read(i: int) -> np.ndarray:
        step("read")
        return np.full(1000, i, np.float32)

    async def written(*args: Any) -> None:
        step("write")
        await write(*args)
        seen.append("written")

    monkeypatch.setattr(orbax_streaming, "_BATCH_BYTES", 8000)  # two arrays
    monkeypatch.setattr(orbax_streaming._Batches, "_write", written)
    with pytest.raises(KeyboardInterrupt):
        orbax_streaming.save(tmp_path / "params", {f"p{i}": partial(read, i) for i in range(12)})
    assert seen.count("write") == seen.count("written")
    assert seen.count("read") == {"read": 3, "write": 7}[stage]
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr() == ("", "")
