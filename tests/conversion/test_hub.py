"""Models by hub id, from a small server on this machine that speaks the part of the hub's protocol that downloads need."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import write_hf

from kvjax.conversion import default_model, load

COMMIT = "0123456789abcdef0123456789abcdef01234567"

# The hub client reads its settings when it is imported. So each request has a process of its own: a fork of one that has imported
# all the rest, and has not computed yet.
LOADER = """
import json, os, sys
from kvjax.conversion import CheckpointError, describe, load
assert "huggingface_hub" not in sys.modules

def answer(model, what, options):
    try:
        if what == "describe":
            found = describe(model, progress=False, **options)
            return {"parameters": found.parameters, "dtypes": found.dtypes, "vocab": found.tokenizer.vocab_size}
        params = load(model, progress=False, **options)
        found = {"layers": params.config.num_layers, "sum": float(params.embed.sum())}
        return found | {"chat": params.tokenizer.chat_template}
    except CheckpointError as error:
        return {"error": str(error)}

for line in sys.stdin:
    request = json.loads(line)
    if not (child := os.fork()):
        with open(request["stderr"], "w") as errors:
            os.dup2(errors.fileno(), 2)
        os.environ.update(request["environment"])
        found = answer(*request["arguments"])
        with open(request["stdout"], "w") as out:
            json.dump(found, out)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Hub:
    """Serves the folders below `root` as repositories ``owner/name``, to those with the `token` if there is one.

    `asked` lists the files that were downloaded, `revisions` what of.
    """

    def __init__(self, root: Path) -> None:
        self.asked: list[str] = []
        self.revisions: set[str] = set()
        self.token: str | None = None
        self.loader: subprocess.Popen[str] | None = None
        self._root = root
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(body=False)

            def do_GET(self) -> None:
                self._answer(body=True)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

            def _answer(self, body: bool) -> None:
                content = None
                if hub.token is None or self.headers.get("Authorization") == f"Bearer {hub.token}":
                    content = hub.content(self.path.split("?")[0].strip("/"), download=body)
                if content is None:
                    self.send_response(404)
                    self.send_header("X-Error-Code", "RepoNotFound" if "/api/" in self.path else "EntryNotFound")
                    content = b""
                else:
                    self.send_response(200)
                    self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                    self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if body:
                    self.wfile.write(content)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def content(self, path: str, download: bool) -> bytes | None:
        """What is at a path: the state of a repository, the list of its files, or a file; None is not found."""
        match path.split("/"):
            case ["api", "models", owner, name, "revision" | "tree" as what, at] if (
                self._root / owner / name
            ).is_dir():
                self.revisions.add(at)
                folder = self._root / owner / name
                files = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
                if what == "tree":
                    found = [
                        {"type": "file", "path": path, "size": file.stat().st_size, "oid": "0" * 40}
                        for path, file in files.items()
                    ]
                else:
                    found = {
                        "id": f"{owner}/{name}",
                        "sha": COMMIT,
                        "siblings": [{"rfilename": path} for path in files],
                    }
                return json.dumps(found).encode()
            case [owner, name, "resolve", at, *parts] if (self._root / owner / name).joinpath(*parts).is_file():
                self.revisions.add(at)
                if download:
                    self.asked.append("/".join(parts))
                return (self._root / owner / name).joinpath(*parts).read_bytes()
        return None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(scope="module")
def loader() -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", LOADER], env=environment, stdin=pipe, stdout=pipe, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0


@pytest.fixture
def hub(tmp_path: Path, loader: subprocess.Popen[str]) -> Iterator[Hub]:
    served = Hub(tmp_path / "hub")
    served.loader = loader
    yield served
    served.close()


def loaded(model: str, home: Path, hub: Hub, what: str = "load", offline: bool = False, **options: str) -> dict:
    stdout, stderr = home.parent / "stdout", home.parent / "stderr"
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    environment["HF_HUB_OFFLINE"] = str(int(offline))
    request = {"arguments": [model, what, options], "environment": environment}
    assert hub.loader is not None
    assert hub.loader.stdin is not None
    assert hub.loader.stdout is not None
    home.parent.mkdir(exist_ok=True)
    hub.loader.stdin.write(json.dumps(request | {"stdout": str(stdout), "stderr": str(stderr)}) + "\n")
    hub.loader.stdin.flush()
    assert hub.loader.stdout.readline() == "0\n", stderr.read_text()
    assert "%|" not in stderr.read_text(), "no progress bars where nobody watches"
    return json.loads(stdout.read_text())


def test_downloads_what_it_needs_and_no_more(tmp_path: Path, hub: Hub) -> None:
    repository = tmp_path / "hub/some-org/some.model"
    tensors = write_hf(repository, files=2, tokenizer=True)
    for name in ("pytorch_model.bin", "original/model.safetensors", "consolidated.safetensors", "README.md", "run.py"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_bytes(b"not for us")
    found = loaded("some-org/some.model", tmp_path / "home", hub)
    assert found["layers"] == 2
    assert found["sum"] == pytest.approx(float(tensors["model.embed_tokens.weight"].sum()), abs=1e-3)
    assert "add_generation_prompt" in found["chat"]
    assert sorted(hub.asked) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    # Once here, it loads without a connection.
    hub.asked.clear()
    assert loaded("some-org/some.model", tmp_path / "home", hub, offline=True) == found
    assert hub.asked == []


def test_describing_fetches_no_weights(tmp_path: Path, hub: Hub) -> None:
    tensors = write_hf(tmp_path / "hub/some-org/some.model", files=2, tokenizer=True)
    count = sum(value.size for value in tensors.values())
    found = loaded("some-org/some.model", tmp_path / "home", hub, "describe")
    assert found == {"parameters": count, "dtypes": [["float32", 4 * count]], "vocab": 261}
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_says_why_not(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "hub/some-org/pickled").mkdir(parents=True)
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / "hub/some-org/pickled" / name).write_text("{}")
    home = tmp_path / "home"
    error = loaded("some-org/pickled", home, hub)["error"]
    assert error == "some-org/pickled: the repository has no safetensors weights; pickled ones are not downloaded"
    assert "pytorch_model.bin" not in hub.asked
    assert loaded("some-org/pickled", home, hub, "describe")["error"] == error
    error = loaded("some-org/absent", home, hub)["error"]
    assert error.startswith("some-org/absent: not available from the Hugging Face hub")
    assert "\n" not in error
    error = loaded("some-org/other", home, hub, offline=True)["error"]
    assert error.startswith("some-org/other: not available from the Hugging Face hub")


def test_revisions_and_tokens_reach_the_hub(tmp_path: Path, hub: Hub) -> None:
    write_hf(tmp_path / "hub/some-org/some.model", tokenizer=True)
    hub.token, home = "hf_secret", tmp_path / "home"
    assert "not available" in loaded("some-org/some.model", home, hub)["error"]
    for what in ("load", "describe"):
        hub.revisions.clear()
        found = loaded("some-org/some.model", home / what, hub, what, revision="v1.5", token="hf_secret")
        assert "error" not in found
        assert hub.revisions == {"v1.5", COMMIT}, "the revision, and the commit that it was found to be"


def test_revisions_of_what_is_not_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hf(tmp_path / "here")
    monkeypatch.setattr(default_model, "locate", None)  # nothing is fetched before
    for source in (tmp_path / "here", "nowhere", None):
        with pytest.raises(ValueError, match=r"revision='v2' is for models on the hub, which .* is not"):
            load(source, revision="v2")
