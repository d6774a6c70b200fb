"""What the interpreter of TPU kernels saw."""

from jax._src.pallas.mosaic.interpret import interpret_pallas_call


def races_found() -> bool:
    """Whether two accesses to memory of the last interpreted TPU kernel could have come in either order."""
    races = interpret_pallas_call.races
    assert races is not None, "no TPU kernel was interpreted"
    return races.races_found
