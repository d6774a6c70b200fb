"""Two processes of two devices each that run together on one machine."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def kvjax(arguments: Sequence[str], *outs: Path, failing: bool = False) -> list[str]:
    """`run_both` of `kvjax ARGUMENTS --distributed`, of which each gets its own `--out`."""
    command = ["-m", "kvjax", *arguments, "--distributed", "--no-compilation-cache", "--out"]
    return run_both(*([*command, str(out)] for out in outs), failing=failing)


def run_both(*arguments: Sequence[str], timeout: int = 120, failing: bool = False) -> list[str]:
    """What each prints, by the arguments of its Python; both have to end well, or where they are `failing` not, and it is their errors."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    root = Path(__file__).parents[2]
    common = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}",
    }
    started = [
        subprocess.Popen(
            [sys.executable, *own],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | common | {"JAX_PROCESS_ID": str(i)},
        )
        for i, own in enumerate(arguments)
    ]
    try:
        ended = [(process, *process.communicate(timeout=timeout)) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    for process, _, error in ended:
        assert (process.returncode != 0) == failing, error[-3000:]
    if failing:
        return [error for _, _, error in ended]
    # The library by which they talk prints lines of its own, from several threads into one another.
    return ["".join(x for x in out.splitlines(keepends=True) if "peer ranks" not in x) for _, out, _ in ended]
