"""MLIR helpers for code of individual threads in Mosaic GPU kernels. The other modules of this folder use them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

REF = plgpu.RefType()
"""Marks an argument of `inline` as a reference."""

SCALAR = plgpu.Layout.WG_SPLAT(())
"""Layout of a scalar argument of `inline`."""


def inline(*types: Any, returns: Any = None) -> Callable[[Any], Any]:
    """Decorate a function that emits MLIR for every thread. Arguments are references, or arrays in these layouts."""
    return plgpu.inline_mgpu(arg_types=types, return_type=returns)


def int_of(value: int) -> Any:
    """Return a 32-bit integer constant."""
    kind = ir.IntegerType.get_signless(32)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value))


def float_of(value: float) -> Any:
    """Return a float32 constant."""
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), value))


def indices(*values: Any) -> list[Any]:
    """Return indices of an array in memory."""
    return [arith.index_cast(ir.IndexType.get(), int_of(at) if isinstance(at, int) else at) for at in values]


def equal(a: Any, b: Any) -> Any:
    """Return whether two integers are equal."""
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def below(a: Any, b: int) -> Any:
    """Return whether an integer is less than a constant, both unsigned."""
    return arith.cmpi(arith.CmpIPredicate.ult, a, int_of(b))


def item(vector_register: Any, place: int) -> Any:
    """Return one element of a vector register."""
    return vector.extract(vector_register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([place]))


def if_then(condition: Any) -> Any:
    """Return the insertion point of a branch, whose code must end with `scf.yield_([])`."""
    return ir.InsertionPoint(scf.IfOp(condition).then_block)


def thread_index() -> Any:
    """Return the thread's index in its warpgroup."""
    return arith.remui(utils.thread_idx(), int_of(128))


def warp_and_lane() -> tuple[Any, Any]:
    """Return the thread's warp in its warpgroup, and its lane in the warp."""
    return arith.divui(thread_index(), int_of(32)), arith.remui(thread_index(), int_of(32))


def sum_over(value: Any, distances: list[int]) -> Any:
    """Add the values of the lanes whose indices differ in these bits."""
    for distance in distances:
        value = arith.addf(value, utils.shfl_bfly(value, distance))
    return value


def words_layout(count: int) -> Any:
    """Return the layout of an array with `count` words per thread, in vectors of four."""
    return plgpu.Layout.WG_STRIDED((128 * count,), vec_size=4)


def word() -> Any:
    """Return the 32-bit integer type."""
    return ir.IntegerType.get_signless(32)


def pack_words(words: Sequence[Any]) -> Any:
    """Return the words of each thread, a multiple of four, as an array."""
    four = ir.VectorType.get((4,), word())
    registers = [vector.from_elements(four, list(words[i : i + 4])) for i in range(0, len(words), 4)]
    layout = words_layout(len(words)).to_mgpu()
    return FragmentedArray(_registers=np.array(registers, dtype=object), _layout=layout, _is_signed=True)


def unpack_words(words: Any) -> list[Any]:
    """Return each thread's words of an array made by `pack_words`."""
    return [item(register, place) for register in words.registers.flat for place in range(4)]


def words_type(count: int) -> Any:
    """Return the type of an array with `count` words per thread, as a return type of `inline`."""
    return plgpu.ShapeDtypeStruct((128 * count,), jnp.int32, layout=words_layout(count))


def address_of(ref: Any, offset: Any = None) -> Any:
    """Return the address of an array in global memory, plus an offset in bytes."""
    wide = ir.IntegerType.get_signless(64)
    start = llvm.ptrtoint(wide, utils.memref_ptr(ref))
    return start if offset is None else arith.addi(start, arith.extui(wide, offset))


def load_words(address: Any, kind: str) -> list[Any]:
    """Load one or four words of global memory, bypassing the L1 cache. `kind` is "u16", "b32" or "v4.b32".

    The compiler does not move the load past other instructions with side effects.
    """
    count = 4 if "v4" in kind else 1
    out = "{$0, $1, $2, $3}" if count == 4 else "$0"
    text = f"ld.relaxed.gpu.global.{kind} {out}, [${count}];"
    constraints = ",".join(["=r"] * count + ["l"])
    if count == 1:
        return [llvm.inline_asm(word(), [address], text, constraints, has_side_effects=True)]
    four: Any = llvm.inline_asm(
        llvm.StructType.get_literal([word()] * 4), [address], text, constraints, has_side_effects=True
    )
    return [llvm.extractvalue(word(), four, [i]) for i in range(4)]


def shared_address(ref: Any) -> Any:
    """Return the address of an array in shared memory."""
    return llvm.ptrtoint(word(), utils.memref_ptr(ref))


def store_four(words: list[Any], ref: Any, offset: Any) -> None:
    """Store four words in an array in shared memory, at an offset in bytes."""
    there = llvm.inttoptr(llvm.PointerType.get(3), arith.addi(shared_address(ref), offset))
    llvm.store(vector.from_elements(ir.VectorType.get((4,), word()), words), there, alignment=16)
