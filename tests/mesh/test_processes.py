"""Two processes of two devices each, on one machine: the same text in both, and an end when one of them is gone."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import kvjax

from .conftest import model

PROCESS = """
import json, os, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_disable_most_optimizations", True)
address, process, mesh, prompts, leave = sys.argv[1:]
jax.distributed.initialize(address, 2, int(process), heartbeat_timeout_seconds=10)
import kvjax
from mesh.conftest import model
params = model(4, 2, 16)
options = dict(policy="tova", budget=16, max_new_tokens=12, ignore_eos=True, mesh=mesh)
print(json.dumps([result.tokens for result in kvjax.generate(params, json.loads(prompts), **options)]), flush=True)
if leave:
    if process == "1":
        os._exit(9)
    while True:
        kvjax.generate(params, json.loads(prompts), **options)
"""


def run(mesh: str, prompts: list[list[list[int]]], *, leave: bool = False) -> list[subprocess.CompletedProcess[str]]:
    """Both processes, each with its prompts, to their ends; if the second is to `leave`, the first has 30 seconds after that."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    root = Path(__file__).parents[2]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    arguments = [[address, str(i), mesh, json.dumps(own), "yes" if leave else ""] for i, own in enumerate(prompts)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    started = [subprocess.Popen([sys.executable, "-c", PROCESS, *given], **pipes) for given in arguments]
    ended = {}
    try:
        for process in started[::-1]:
            out, error = process.communicate(timeout=30 if leave and ended else 120)
            ended[process] = subprocess.CompletedProcess(process.args, process.returncode, out, error)
    finally:
        for process in started:
            process.kill()
    return [ended[process] for process in started]


def texts(process: subprocess.CompletedProcess[str]) -> list[list[list[int]]]:
    """What it printed, but for lines of the library by which processes talk."""
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("[[")]


@pytest.mark.parametrize("mesh", ["model=4", "data=2,model=2"])
def test_both_have_the_whole_text(mesh, prompts):
    ended = run(mesh, [prompts[:3]] * 2)
    expected = kvjax.generate(model(4, 2, 16), prompts[:3], "tova", 16, 12, ignore_eos=True)
    for process in ended:
        assert process.returncode == 0, process.stderr[-2000:]
        assert texts(process) == [[result.tokens for result in expected]]


def test_prompts_that_differ_are_refused(prompts):
    for process in run("model=4", [prompts[:2], prompts[1:3]]):
        assert "not the same in all 2 processes" in process.stderr
        assert not texts(process)


def test_one_that_is_killed_ends_the_other(prompts):
    left, killed = run("model=4", [prompts[:1]] * 2, leave=True)
    assert killed.returncode == 9
    assert left.returncode != 0
    assert "another process of the mesh" in left.stderr
