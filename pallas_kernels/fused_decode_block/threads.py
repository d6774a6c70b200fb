"""What code of threads' own is made of, in Mosaic's dialect."""

from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

REF = plgpu.RefType()
SCALAR = plgpu.Layout.WG_SPLAT(())


def inline(*types: Any, returns: Any = None) -> Callable[[Any], Any]:
    """Code of threads' own, of arguments in these layouts or references."""
    return plgpu.inline_mgpu(arg_types=types, return_type=returns)


def int_of(value: int) -> Any:
    """A constant of 32 bits."""
    kind = ir.IntegerType.get_signless(32)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value))


def float_of(value: float) -> Any:
    """A constant of float32."""
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), value))


def places(*places: Any) -> list[Any]:
    """Indices of an array in memory."""
    return [arith.index_cast(ir.IndexType.get(), int_of(at) if isinstance(at, int) else at) for at in places]


def equal(a: Any, b: Any) -> Any:
    """Whether two integers are the same."""
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def below(a: Any, b: int) -> Any:
    """Whether an integer is less than a constant."""
    return arith.cmpi(arith.CmpIPredicate.ult, a, int_of(b))


def item(vector_register: Any, place: int) -> Any:
    """One number of a register that has several."""
    return vector.extract(vector_register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([place]))


def where(condition: Any) -> Any:
    """The inside of a branch; it ends with `scf.yield_([])`."""
    return ir.InsertionPoint(scf.IfOp(condition).then_block)


def warp_and_lane() -> tuple[Any, Any]:
    """A thread's warp of its warpgroup, and its place in it."""
    thread = arith.remui(utils.thread_idx(), int_of(128))
    return arith.divui(thread, int_of(32)), arith.remui(thread, int_of(32))


def sum_over(value: Any, distances: list[int]) -> Any:
    """Over the lanes that differ in these bits."""
    for distance in distances:
        value = arith.addf(value, utils.shfl_bfly(value, distance))
    return value
