"""Files of packages from the index that pip would ask, of which a small one runs here."""

import base64
import functools
import hashlib
import http.server
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvjax.conversion import CheckpointError, package_index

WHEEL = "some_package-1.5-py3-none-any.whl"


class Index(http.server.ThreadingHTTPServer):
    """``/simple/some-package/`` and its one wheel, to those with the password if there is one."""

    def __init__(self, root: Path) -> None:
        wheel = root / "files" / WHEEL
        wheel.parent.mkdir(parents=True)
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("some_package/data", bytes(1000))
        self.content, self.password = wheel.read_bytes(), ""
        page = root / "simple/some-package/index.html"
        page.parent.mkdir(parents=True)
        digest = hashlib.sha256(self.content).hexdigest()
        page.write_text(f'<a href="../../files/{WHEEL}#sha256={digest}">{WHEEL}</a>')

        index = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = base64.b64encode(f"me:{index.password}".encode()).decode()
                if index.password and self.headers.get("Authorization") != f"Basic {wanted}":
                    self.send_error(401)
                else:
                    super().do_GET()

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(root)))

    def url(self, user: str = "") -> str:
        """Of the index itself."""
        return f"http://{user}127.0.0.1:{self.server_port}/simple"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index that nothing refers to yet; whatever pip is told on this machine is set aside, and there is no pip."""
    for name in [name for name in package_index.os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setitem(sys.modules, "pip", None)
    with Index(tmp_path / "index") as served:
        thread = threading.Thread(target=served.serve_forever, daemon=True)
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def download(tmp_path: Path) -> bytes:
    folder = tmp_path / "downloads"
    folder.mkdir(exist_ok=True)
    return package_index.download("some-package==1.5", folder, progress=False).read_bytes()


def test_the_index_that_a_variable_names(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url())
    assert download(tmp_path) == index.content


@pytest.mark.parametrize(
    "file",
    ["environment/pip.conf", "HOME/.pip/pip.conf", "XDG_CONFIG_HOME/pip/pip.conf", "XDG_CONFIG_DIRS/pip/pip.conf"],
)
def test_the_index_that_a_file_names(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    index.password = "secret"
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(f"[global]\nindex_url = {index.url('me:secret@')}\n")
    assert download(tmp_path) == index.content
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(CheckpointError, match=r"some-package==1\.5"):
        package_index.download("some-package==1.5", tmp_path, progress=False)


def test_more_indexes_and_folders(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(CheckpointError, match=r"no package index has some-package==1\.5"):
        download(tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index/files"))
    assert download(tmp_path) == index.content
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "empty").as_uri())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{(tmp_path / 'empty').as_uri()} {index.url()}")
    assert download(tmp_path) == index.content


def test_what_cannot_be_had(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url())
    with pytest.raises(CheckpointError, match=r"no package index has some-package==2"):
        package_index.download("some-package==2", tmp_path, progress=False)
    (tmp_path / "index/files" / WHEEL).write_bytes(b"another")
    with pytest.raises(CheckpointError, match=r"some-package==1\.5 cannot be downloaded"):
        download(tmp_path)
    (tmp_path / "index/files" / WHEEL).unlink()
    monkeypatch.setenv("PIP_INDEX_URL", index.url("me:secret@"))
    with pytest.raises(CheckpointError, match="404") as raised:
        download(tmp_path)
    assert "secret" not in str(raised.value)
    (tmp_path / "pip.conf").write_text("index-url = what?")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    with pytest.raises(CheckpointError, match=r"pip\.conf: not a pip configuration file"):
        download(tmp_path)
