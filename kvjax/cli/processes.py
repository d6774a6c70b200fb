"""A command run by several processes at once, which share a mesh."""

import os
import sys
from typing import Any

HEARTBEAT = 10
"""Seconds without a sign of life after which a process is given up, and the others end."""


def join_processes() -> None:
    """Meet the other processes; from here on all but the first print nothing to standard output.

    Raises:
        ValueError: nothing tells which processes there are.
    """
    import jax

    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    told = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}  # JAX itself reads the address alone
    try:
        numbers: dict[str, Any] = {
            name: int(os.environ[variable]) for name, variable in told.items() if variable in os.environ
        }
        jax.distributed.initialize(**numbers, heartbeat_timeout_seconds=HEARTBEAT)
    except ValueError as error:
        raise ValueError(
            f"--distributed: {error}; start the processes by a launcher that JAX knows, or set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
            "JAX_PROCESS_ID"
        ) from None
    if jax.process_index() > 0:
        sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever holds the stream
