"""Connects the processes of a command that runs over a mesh of several processes."""

import os
import sys
from typing import Any

HEARTBEAT = 10
"""Seconds without a heartbeat after which a process counts as lost, and the others end."""


def join_processes() -> None:
    """Connect to the other processes. Afterwards, only the first process prints to standard output.

    Raises:
        ValueError: the processes are not configured.
    """
    import jax

    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    told = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}  # JAX itself reads only the address
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for whoever holds the stream
