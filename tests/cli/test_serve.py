"""`kvjax serve`: what it refuses, and a server as a process of its own."""

import configparser
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml  # huggingface_hub requires it

import kvjax

pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--rows", "0"], 2, "give a number from 1 to 4096, or auto"),
        (["--rows", "some"], 2, "give a number from 1 to 4096, or auto"),
        (["--sampling", "temperature,typical"], 2, "'typical': give some of temperature,top_k,top_p,min_p"),
        (["--max-total-tokens", "64", "--max-new-tokens", "64"], 2, "leave room for a prompt"),
        (["--first-seconds", "0"], 2, "give a number above 0"),
        (["--policy", "treekvv"], 1, "unknown policy 'treekvv'"),
        (["--policy", "offloaded(clusterkv)"], 1, "caches in host memory are not supported"),
        (["--policy", "kvzip:64", "--prefill-block", "16"], 1, "kvzip"),
        (["--host", "0.0.0.0"], 2, "give --api-keys or set KVJAX_API_KEY"),
        (["--host", "models.example"], 2, "give --api-keys or set KVJAX_API_KEY"),
        (["--api-keys", "/no/such/file"], 1, "/no/such/file"),
        (["--mesh", "data=2"], 2, "start a server for each copy"),
        (["--distributed"], 2, "runs in one process"),
        (["--prefix-bytes", "1GB"], 2, "give --prefill-block"),
        (["--sessions", "saved"], 2, "give --prefill-block"),
        (["--session-bytes", "much"], 1, "is not a memory size"),
        (["--prefix-host-bytes", "1GB"], 2, "give --prefill-block"),
        (["--prefix-host-bytes", "1GB", "--prefix-bytes", "0", "--prefill-block", "16"], 2, "more than 0"),
        (["--prefix-bytes", "much", "--prefill-block", "16"], 1, "is not a memory size"),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(
    kvjax_command: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, says: str
) -> None:
    monkeypatch.delenv("KVJAX_API_KEY", raising=False)
    result = kvjax_command("serve", "/no/such/model", *arguments)
    assert result.exit_code == code
    assert says in " ".join(result.stderr.replace("│", " ").split())


PAGE = (Path(kvjax.__file__).parents[1] / "docs/howto/servers.md").read_text(encoding="utf-8")


def test_commands_of_the_page_are_understood(kvjax_command: Any, tmp_path: Path) -> None:
    """Those of a shell, of the container and of the service. Only the model is another one, which does not exist."""
    blocks = dict(re.findall(r"```(dockerfile|yaml|ini)\n(.*?)```", PAGE, re.DOTALL))
    (service,) = yaml.safe_load(blocks["yaml"])["services"].values()
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", blocks["dockerfile"], re.MULTILINE)
    unit = configparser.ConfigParser()
    unit.optionxform = str
    unit.read_string(blocks["ini"])
    commands = re.findall(r"^kvjax serve .*$", PAGE.replace("\\\n", ""), re.MULTILINE)
    assert len(commands) == 2
    (keys := tmp_path / "keys").write_text("sesame\n")
    for words in (
        *map(str.split, commands),
        [*json.loads(entry), *service["command"].replace("/run/secrets/keys", str(keys)).split()],
        unit["Service"]["ExecStart"].split(),
    ):
        assert (Path(words[0]).name, words[1]) == ("kvjax", "serve")
        result = kvjax_command("serve", "/no/such/model", *words[2:])
        assert (result.exit_code, "/no/such/model" in result.stderr) == (1, True)


def request(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"Content-Type": "application/json", "Authorization": "Bearer sesame"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@pytest.mark.slow
def test_a_server_as_a_process(checkpoint: Path, tmp_path: Path) -> None:
    """It compiles, answers, finishes what runs after SIGTERM, and ends well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = str(Path(kvjax.__file__).parents[1])
    paths = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "KVJAX_API_KEY": "sesame", "KVJAX_COMPILATION_CACHE": "0"}
    sizes = [
        "--rows",
        "auto",
        "--max-total-tokens",
        "100",
        "--max-new-tokens",
        "60",
        "--steps",
        "1",
        "--port",
        str(port),
    ]
    command = [sys.executable, "-m", "kvjax", "serve", str(checkpoint), "--policy", "treekv:16", "--name", "small"]
    process = subprocess.Popen([*command, *sizes], env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(2000):
            try:
                if request(port, "GET", "/ready")[0] == 200:
                    break
            except OSError:
                assert process.poll() is None
            time.sleep(0.2)
        body = {"prompt": "hello", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        status, whole = request(port, "POST", "/v1/completions", body)
        assert (status, whole["usage"]["completion_tokens"]) == (200, 60)
        found: list[Any] = []
        running = threading.Thread(target=lambda: found.append(request(port, "POST", "/v1/completions", body)))
        running.start()
        while 'num_requests_running{model_name="small"} 1' not in _metrics(port):
            assert running.is_alive()
        process.send_signal(signal.SIGTERM)
        running.join(60)
        ((status, again),) = found
        assert (status, again["choices"]) == (200, whole["choices"])
        assert process.wait(60) == 0
    finally:
        process.kill()
        assert process.stderr is not None
        said = process.stderr.read()
        process.stderr.close()
    assert f"serving small at http://127.0.0.1:{port}/v1" in said
    assert "Traceback" not in said


def _metrics(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/metrics", headers={"Authorization": "Bearer sesame"})
        return connection.getresponse().read().decode()
    finally:
        connection.close()
