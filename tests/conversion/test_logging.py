"""A program's logging is its own: loading and saving models leaves it as it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import write_hf

SCRIPT = """
import logging, sys

def state():
    found = {}
    for name in (None, "absl", "kvjax", "jax", "orbax"):
        logger = logging.getLogger(name)
        found[name] = [str(handler) for handler in logger.handlers], logger.level, logger.propagate, logger.disabled
    return found, logging.raiseExceptions, logging.getLoggerClass(), logging.root.manager.disable

if sys.argv[3] == "configured":
    logging.basicConfig(level=logging.ERROR)
    logging.getLogger("absl").setLevel(logging.CRITICAL)
import jax
before = state()
import kvjax
params = kvjax.load(sys.argv[1])
assert state() == before, ("safetensors", before, state())
kvjax.save(params, sys.argv[2])
assert state() == before, ("saving", before, state())
kvjax.load(sys.argv[2])
assert state() == before, ("orbax", before, state())
"""


@pytest.mark.parametrize("program", ["plain", "configured"])
def test_logging_stays_as_it_was(tmp_path: Path, program: str) -> None:
    write_hf(tmp_path / "hf")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "hf"), str(tmp_path / "orbax"), program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
