"""What the interpreters of TPU and Mosaic GPU kernels saw."""

from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks


def races_found() -> bool:
    """Whether two accesses to memory of the last interpreted TPU kernel could have come in either order."""
    races = interpret_pallas_call.races
    assert races is not None, "no TPU kernel was interpreted"
    return races.races_found


def gpu_races_found() -> bool:
    """The same of the last Mosaic GPU kernel."""
    return gpu_callbacks.get_races().races_found
