"""What code of threads' own is made of, in Mosaic's dialect."""

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


def places(*indices: Any) -> list[Any]:
    """Indices of an array in memory."""
    return [arith.index_cast(ir.IndexType.get(), int_of(at) if isinstance(at, int) else at) for at in indices]


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


def thread() -> Any:
    """A thread's place in its warpgroup."""
    return arith.remui(utils.thread_idx(), int_of(128))


def warp_and_lane() -> tuple[Any, Any]:
    """A thread's warp of its warpgroup, and its place in it."""
    return arith.divui(thread(), int_of(32)), arith.remui(thread(), int_of(32))


def sum_over(value: Any, distances: list[int]) -> Any:
    """Over the lanes that differ in these bits."""
    for distance in distances:
        value = arith.addf(value, utils.shfl_bfly(value, distance))
    return value


def words_of(count: int) -> Any:
    """So many words of each thread's own, four and four."""
    return plgpu.Layout.WG_STRIDED((128 * count,), vec_size=4)


def word() -> Any:
    """The type of 32 bits."""
    return ir.IntegerType.get_signless(32)


def told(words: Sequence[Any]) -> Any:
    """What a step of threads' own returns: words of each thread's, a multiple of four."""
    four = ir.VectorType.get((4,), word())
    registers = [vector.from_elements(four, list(words[i : i + 4])) for i in range(0, len(words), 4)]
    layout = words_of(len(words)).to_mgpu()
    return FragmentedArray(_registers=np.array(registers, dtype=object), _layout=layout, _is_signed=True)


def held_by(words: Any) -> list[Any]:
    """The words that `told` was given."""
    return [item(register, place) for register in words.registers.flat for place in range(4)]


def kind_of(count: int) -> Any:
    """What is returned by a step that returns so many words of each thread's."""
    return plgpu.ShapeDtypeStruct((128 * count,), jnp.int32, layout=words_of(count))


def address_of(ref: Any, offset: Any = None) -> Any:
    """Where an array in global memory begins, or a place so many bytes further on."""
    wide = ir.IntegerType.get_signless(64)
    start = llvm.ptrtoint(wide, utils.memref_ptr(ref))
    return start if offset is None else arith.addi(start, arith.extui(wide, offset))


def load_words(address: Any, kind: str) -> list[Any]:
    """One or four words of global memory, begun before all that follows. No cache of this multiprocessor's is asked."""
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


def shared(ref: Any) -> Any:
    """Where an array in shared memory begins."""
    return llvm.ptrtoint(word(), utils.memref_ptr(ref))


def store_four(words: list[Any], ref: Any, offset: Any) -> None:
    """Four words into an array in shared memory, so many bytes after its start."""
    there = llvm.inttoptr(llvm.PointerType.get(3), arith.addi(shared(ref), offset))
    llvm.store(vector.from_elements(ir.VectorType.get((4,), word()), words), there, alignment=16)
