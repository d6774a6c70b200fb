"""Five hundred mutated checkpoints: each ends in a clear error or in a right model, within seconds and little memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fuzzing
import pytest


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of peak memory")
@pytest.mark.parametrize("last", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_mutated_checkpoints(tmp_path: Path, last: int) -> None:
    """The cases are the same each time; `fuzzing.mutate` makes one again from its number alone."""
    done = subprocess.run(
        [sys.executable, fuzzing.__file__, str(tmp_path), "0", str(last)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    cases = [case | report for case, report in zip(lines[::2], lines[1::2], strict=False)]
    wrong = [
        case
        for case in cases
        if case["outcome"] not in ("refused", "loaded")
        or case["seconds"] > fuzzing.SECONDS
        or case["bytes"] > fuzzing.BYTES
    ]
    assert not wrong, "\n\n".join(f"case {case['case']}: {case['what']}\n{case['outcome']}" for case in wrong)
    assert done.returncode == 0, f"{lines[-1:]} ended the process: {done.stderr[-3000:]}"
    assert len(cases) == last
    outcomes = [case["outcome"] for case in cases]
    assert min(outcomes.count("refused"), outcomes.count("loaded")) > last / 10, "the mutations reach both ends"
