"""Interpret mode of the TPU kernels."""

from typing import Any

from jax.experimental.pallas import tpu as pltpu


def interpreter(interpret: bool) -> Any:
    """Return the `interpret` argument of `pallas_call` for a TPU kernel.

    The interpreter simulates the memories and the asynchronous copies, and reports races.
    """
    if not interpret:
        return False
    return pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
