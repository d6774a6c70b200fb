"""A short soak of a server's process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_short_soak() -> None:
    """Times of `/health` are left out, as other tests run beside it; so is memory, which has not settled."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "KVJAX_COMPILATION_CACHE": "0"}
    command = [sys.executable, "-m", "benchmarks.soak", "--seconds", "18"]
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=600)
    row = json.loads(done.stdout)
    assert row["wrong"] == []
    assert {name: row["checks"][name] for name in ("answers and refusals", "compilations", "ends well")} == {
        "answers and refusals": True,
        "compilations": True,
        "ends well": True,
    }
