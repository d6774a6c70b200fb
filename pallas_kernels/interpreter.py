"""How a TPU kernel is interpreted."""

from typing import Any

from jax.experimental.pallas import tpu as pltpu


def interpreter(interpret: bool) -> Any:
    """What `pallas_call` of a TPU kernel takes as `interpret`: an interpreter that simulates memories and copies and finds races."""
    if not interpret:
        return False
    return pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
