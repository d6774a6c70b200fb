"""Files and folders appear whole or not at all, and take the place of nothing that has to stay."""

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax import plots
from kvjax._util import files
from kvjax.evals import report
from kvjax.evals.checkpoint import Checkpoint
from kvjax.policies import HeadProfile

KILLED = """
import os, signal, sys
from kvjax._util import files

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

with files.directory(sys.argv[1], check=lambda old: None) as folder:
    (folder / "weights").write_text("new")
    if sys.argv[2] == "writing":
        die()
    files._claim = die
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def killed(path: Path, when: str) -> None:
    """A process that is killed while it writes a folder, or between putting the old one aside and the new one in its place."""
    environment = os.environ | {"PYTHONPATH": str(Path(kvjax.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), when], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep/er/result.json"
    with files.writing(path) as stream:
        stream.write(b"a")
        assert not path.exists()

    def interrupted() -> None:
        with files.writing(path) as stream:
            stream.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    assert path.read_text() == "a"
    files.write(path, "ä")
    assert path.read_text(encoding="utf-8") == "ä"
    assert names(path.parent) == ["result.json"]


def test_nothing_can_be_made_in_a_file(tmp_path: Path) -> None:
    files.write(tmp_path / "file", "a")
    with pytest.raises(NotADirectoryError, match="file is not a folder"), files.directory(tmp_path / "file/model"):
        pass


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "result", tmp_path / "link"
    files.write(path, "a")
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    path.chmod(0o640)
    link.symlink_to("result")
    files.write(link, "b")
    assert link.is_symlink()
    assert path.read_text() == "b"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    """As ``/dev/null`` and ``/dev/stdout``, which are no files either."""
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    files.write(pipe, "through")
    reader.join()
    assert read == [b"through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert names(tmp_path) == ["pipe"]


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PATIENCE", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a pipe that nobody reads"):
        files.write(tmp_path / "pipe", "x")


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device") as raised:
        files.append("/dev/full", "x")
    assert raised.value.filename == "/dev/full"
    with pytest.raises(OSError, match="No space left on device") as raised, files.writing(tmp_path / "file"):
        raise OSError(errno.ENOSPC, "No space left on device")  # as a stream has it, without a name
    assert raised.value.filename == str(tmp_path / "file")
    assert names(tmp_path) == []


def draw_and_save(path: Path) -> None:
    from matplotlib.figure import Figure

    plots.save(Figure(), path)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: report.write(path, "{}"),
        lambda path: report.ResultFile(path, {"settings": {}, "versions": {}}),
        lambda path: Checkpoint(path, {}).save((), 0, np.zeros(1)),
        lambda path: HeadProfile("catekv", "model", "text", (), scores=((0.5,),), labels=(("adaptive",),)).save(path),
        draw_and_save,
    ],
    ids=["results", "rows", "checkpoint", "profile", "picture"],
)
def test_whoever_writes_a_file_replaces_only_files(
    tmp_path: Path, write: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as held:
        held.bind("socket")
        with pytest.raises(OSError, match="not a file, so it is not replaced"):
            write(Path("socket"))
        assert stat.S_ISSOCK(os.stat("socket").st_mode)
    assert names(tmp_path) == ["socket"]


def test_what_is_not_a_file_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)  # names of sockets have to be short
    with socket.socket(socket.AF_UNIX) as held:
        held.bind("socket")
        for name in ("folder", "socket"):
            with pytest.raises(OSError, match="not a file, so it is not replaced") as raised:
                files.write(tmp_path / name, "x")
            assert raised.value.filename == str(tmp_path / name)
        assert stat.S_ISSOCK(os.stat("socket").st_mode)
    assert names(tmp_path) == ["folder", "socket"]


@pytest.mark.parametrize("comes", ["file", "empty folder", "folder"])
def test_what_has_come_meanwhile_stays(tmp_path: Path, comes: str) -> None:
    path, inodes = tmp_path / "model", []

    def too_late() -> None:
        with files.directory(path) as new:
            (new / "weights").write_text("new")
            if comes == "file":
                path.write_text("theirs")
            else:
                path.mkdir()
                if comes == "folder":
                    (path / "letter").write_text("theirs")
            inodes.append(path.stat().st_ino)

    with pytest.raises(FileExistsError, match="something else is there now and was kept"):
        too_late()
    assert [path.stat().st_ino] == inodes
    assert path.read_text() == "theirs" if comes == "file" else names(path) == ["letter"] * (comes == "folder")
    assert names(tmp_path) == ["model"]


def test_what_may_not_be_replaced_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()

    def refuse(old: Path) -> None:
        raise ValueError(*names(old))

    with pytest.raises(ValueError, match="letter"), files.directory(path, refuse):
        (path / "letter").write_text("come while the new one was written")
    assert names(path) == ["letter"]
    assert names(tmp_path) == ["model"]


def test_both_are_kept_where_a_third_takes_the_place(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "weights").write_text("old")
    with (
        pytest.raises(FileExistsError, match=r"was kept; what was there before is in .*\.kvjax/old"),
        files.directory(path, lambda old: path.write_text("theirs")),
    ):
        pass
    assert path.read_text() == "theirs"
    files.recover(path)
    assert next(tmp_path.glob(".model.*.kvjax/old/weights")).read_text() == "old"
    path.unlink()
    files.recover(path)
    assert (path / "weights").read_text() == "old"
    assert names(tmp_path) == ["model"]


def test_what_a_killed_run_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    killed(tmp_path / "model", "writing")
    assert len(names(tmp_path)) == 1
    (tmp_path / ".model.abcdefgh.kvjax").mkdir()  # by its name alone nobody knows whose it is
    with files.directory(tmp_path / "model") as new:
        (new / "weights").write_text("new")
    assert names(tmp_path) == [".model.abcdefgh.kvjax", "model"]


def test_what_a_killed_run_had_put_aside_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "weights").write_text("old")
    killed(path, "replacing")
    assert not path.exists()
    files.recover(path)
    assert (path / "weights").read_text() == "old"
    assert names(tmp_path) == ["model"]


def test_a_living_run_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "model"

    def overtaken() -> None:
        with files.directory(path) as new:
            (new / "weights").write_text("first")
            with files.directory(path) as other:
                (other / "weights").write_text("second")
            assert (new / "weights").read_text() == "first"

    with pytest.raises(FileExistsError):
        overtaken()
    assert (path / "weights").read_text() == "second"
    assert names(tmp_path) == ["model"]
