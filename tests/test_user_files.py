"""Files that users name: regular ones alone are read, no larger than fits in memory; and nothing reads a file in another way."""

import ast
import os
from pathlib import Path

import pytest

import kvjax
from kvjax._util import files, user_files


def test_home_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_files.expanded("~/a") == tmp_path / "a"
    assert user_files.expanded(Path("~")) == tmp_path
    assert user_files.expanded("~no such user/a") == Path("~no such user/a")
    assert user_files.expanded("a/~/b") == Path("a/~/b")
    (tmp_path / "a").write_text("text")
    assert (user_files.size("~/a"), user_files.read_text("~/a")) == (4, "text")
    files.write("~/b/c", "new")
    files.append("~/b/c", " and old")
    assert (tmp_path / "b" / "c").read_text() == "new and old"


def test_regular_files_alone_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name, kind in (("pipe", "pipe, socket or device"), ("link", "pipe, socket or device"), (".", "directory")):
        with pytest.raises(user_files.NotRegularError, match=f"a regular file was expected, not a {kind}"):
            user_files.read_bytes(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        user_files.read_bytes(tmp_path / "missing")


def test_sizes_are_bounded_before_reading(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert user_files.read_bytes(file, 5) == b"12345"
    with pytest.raises(ValueError, match="file: 5 bytes; files of at most 4 bytes are read here"):
        user_files.read_bytes(file, 4)
    with file.open("wb") as stream:
        stream.truncate(1 << 36)
    for read in (user_files.read_bytes, user_files.read_text):
        with pytest.raises(ValueError, match="68719476736 bytes"):
            read(file)


def test_a_file_that_says_it_is_empty_is_bounded_too() -> None:
    """As those of the kernel do."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system has no /proc")
    assert maps.stat().st_size == 0
    with pytest.raises(ValueError, match="more than 100 bytes"):
        user_files.read_bytes(maps, 100)


def test_a_file_that_cannot_be_read_is_named() -> None:
    memory = Path("/proc/self/mem")  # whose first bytes nobody can read
    if not memory.exists():
        pytest.skip("this system has no /proc")
    with pytest.raises(OSError, match="/proc/self/mem"):
        user_files.read_bytes(memory)


def test_text(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes("a\r\nb\rc\u2028ä".encode())
    assert user_files.read_text(tmp_path / "file") == "a\nb\nc\u2028ä"
    (tmp_path / "file").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"file: not UTF-8 text .invalid start byte at byte 2\)"):
        user_files.read_text(tmp_path / "file")


READERS = {"read_text", "read_bytes", "open", "np.load", "safe_open", "ZipFile", "fdopen", "fromfile", "memmap"}
"""Functions that open a file, whosoever they are: `Path.open`, `np.load`, `zipfile.ZipFile`."""

ALLOWED = {
    "_util/user_files.py": "the place for it",
    "_util/files.py": "writes",
    "_util/standard_streams.py": "standard input",
    "cli/processes.py": "/dev/null",
    "conversion/writing.py": "writes into its own folder",
    "conversion/default_model.py": "the package and the model that it has downloaded itself",
    "conversion/huggingface.py": "after `present`",
    "conversion/mapped.py": "after `present`: maps the weights' files",
    "conversion/orbax_directory.py": "after `present`",
    "policies/kvzap.py": "after `surrogates.load` has checked it",
    "_util/torch_files.py": "after `surrogates.load` has checked it",
    "evals/checkpoint.py": "from a stream of `user_files.opened`",
    "evals/longbench/__init__.py": "resources of the package",
    "policies/profile.py": "resources of the package",
    "serve/page.py": "resources of the package",
    "pallas_kernels/tuning.py": "resources of the package",
    "bench/worker.py": "its own standard output",
}
"""Files of the source that open others by themselves, and why they may."""


def opens(tree: ast.AST) -> set[str]:
    """The functions of `READERS` that are called, unless they are this package's own."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        ours = owner in ("user_files", "inputs", "self", "conversion", "checkpoint", "texts", "json")
        known = {name, ast.unparse(node.func)} & READERS
        if known and not ours and (owner or name in ("open", "safe_open")):
            found.add(ast.unparse(node.func))
    return found


def test_nothing_else_opens_files() -> None:
    root = Path(kvjax.__file__).parent
    found = {}
    for folder in (root, *(root / name for name in ("models", "conversion", "pallas_kernels"))):
        for file in folder.rglob("*.py"):
            name = file.relative_to(root).as_posix()
            if calls := opens(ast.parse(file.read_text())):
                found[name] = calls
    strangers = {name: calls for name, calls in found.items() if name not in ALLOWED}
    assert not strangers, f"open these by kvjax._util.user_files: {strangers}"
    assert ALLOWED.keys() - found.keys() <= {"_util/user_files.py"}, (
        "these open nothing any more; take them out of ALLOWED"
    )
