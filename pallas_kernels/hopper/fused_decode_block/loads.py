"""Loads of the Hopper kernel's inputs, norms and scales from global memory by threads, in Mosaic's MLIR dialect.

`plan.py` defines the words. Each load is two calls, so that several can be in flight: `read`, `read_inputs` or
`read_squares` issues it, and the `write` function of the same name waits and stores the result in shared memory. They
do not use the TMA, which would process them after all copies of weights that were issued before.
"""

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf
from jaxtyping import Array

from .mlir_helpers import (
    REF,
    SCALAR,
    address_of,
    below,
    equal,
    float_of,
    if_then,
    indices,
    inline,
    int_of,
    load_words,
    pack_words,
    store_four,
    sum_over,
    thread_index,
    unpack_words,
    words_layout,
    words_type,
)
from .plan import GROUP, PROGRAMS


class Piece(NamedTuple):
    """Columns of an array in global memory, and their destination in shared memory.

    Attributes:
        source: [B, _], or [_] for the same values in every row.
        first: first column of the source.
        out: [rows, _], or [_] for a single row. It is written from its first column on.
        columns: number of columns.
        rows: number of rows.
        factor: factor on float32 values.
    """

    source: Any
    first: Array
    out: Any
    columns: int
    rows: int = 1
    factor: float = 1.0


def _steps(piece: Piece) -> Iterator[tuple[Any, Any, Any]]:
    """Yield a thread's elements of a piece: row, column, and whether the element exists."""
    index, size = thread_index(), piece.columns * piece.rows
    for start in range(0, size, 128):
        at = arith.addi(index, int_of(start))
        inside = arith.minui(at, int_of(size - 1))
        yield arith.divui(inside, int_of(piece.columns)), arith.remui(inside, int_of(piece.columns)), below(at, size)


def _read_count(pieces: Sequence[Piece]) -> int:
    return -(-sum(-(-piece.columns * piece.rows // 128) for piece in pieces) // 4) * 4


def read(pieces: Sequence[Piece]) -> Array:
    """Issue the loads of all pieces; `write` waits for them."""
    count = _read_count(pieces)

    @inline(*(kind for _ in pieces for kind in (REF, SCALAR)), returns=words_type(count))
    def _read(_: Any, *arguments: Any) -> Any:
        words = []
        for i, piece in enumerate(pieces):
            source, first = arguments[2 * i : 2 * i + 2]
            size = utils.bytewidth(source.type.element_type)
            for row, column, _ in _steps(piece):
                place = arith.addi(first.registers.item(), column)
                if len(piece.source.shape) == 2:
                    place = arith.addi(place, arith.muli(row, int_of(piece.source.shape[1])))
                words += load_words(address_of(source, arith.muli(place, int_of(size))), "u16" if size == 2 else "b32")
        return pack_words(words + [int_of(0)] * (count - len(words)))

    return _read(*(part for piece in pieces for part in piece[:2]))


def write(words: Array, pieces: Sequence[Piece]) -> None:
    """Store what `read` returned in shared memory."""

    @inline(words_layout(_read_count(pieces)), *(REF for _ in pieces))
    def _write(_: Any, words: Any, *outs: Any) -> None:
        left = iter(unpack_words(words))
        for piece, out in zip(pieces, outs, strict=True):
            kind = out.type.element_type
            for row, column, exists in _steps(piece):
                bits = next(left)
                if utils.bytewidth(kind) == 2:
                    bits = arith.trunci(ir.IntegerType.get_signless(16), bits)
                value = arith.bitcast(kind, bits)
                if piece.factor != 1:
                    value = arith.mulf(value, float_of(piece.factor))
                with if_then(exists):
                    memref.store(value, out, indices(*(row, column)[2 - len(piece.out.shape) :]))
                    scf.yield_([])

    _write(words, *(piece.out for piece in pieces))


class Inputs(NamedTuple):
    """Layout of a matmul's inputs [B, size] in shared memory, [chunks, B s, chunk].

    Attributes:
        transforms: tiling and swizzle of that array.
        rows: B.
        parts: number of parts, s.
        chunk_size: inputs per part of a chunk.
        adjacent: True if the s parts of a chunk are adjacent in a sequence's inputs, as for 4-bit weights. False if the
            chunks of a part are.
    """

    transforms: Any
    rows: int
    parts: int
    chunk_size: int
    adjacent: bool

    def steps(self, chunks: int) -> int:
        """Return the number of steps in which 128 threads load 16 bytes each."""
        return chunks * self.rows * self.parts * self.chunk_size // 8 // 128

    def place(self, step: int) -> tuple[int, Any, Any]:
        """Return what a thread loads in a step: a chunk, its row (sequence, part), and a 16-byte piece of this row."""
        each, pieces = self.chunk_size // 8, self.rows * self.parts * self.chunk_size // 8
        chunk, first = divmod(128 * step, pieces)
        at = arith.addi(thread_index(), int_of(first))
        return chunk, arith.divui(at, int_of(each)), arith.remui(at, int_of(each))

    def number(self, size: int, chunk: int, row: Any, piece: Any) -> Any:
        """Return the index of a piece's first input in the array [B, size] in global memory."""
        if self.adjacent:
            of_row = arith.muli(arith.divui(row, int_of(self.parts)), int_of(size))
            line = arith.addi(arith.remui(row, int_of(self.parts)), int_of(chunk * self.parts))
            of_part = arith.muli(line, int_of(self.chunk_size))
        else:
            of_row, of_part = arith.muli(row, int_of(size // self.parts)), int_of(chunk * self.chunk_size)
        return arith.addi(arith.addi(of_row, of_part), arith.muli(piece, int_of(8)))

    def offset(self, chunk: int, row: Any, piece: Any) -> Any:
        """Return a piece's byte offset in shared memory, which has swizzled tiles of eight rows of 128 bytes."""
        inside, tiles = arith.remui(row, int_of(8)), int_of(self.chunk_size // 64)
        tile = arith.addi(arith.muli(arith.divui(row, int_of(8)), tiles), arith.divui(piece, int_of(8)))
        within = arith.muli(arith.xori(arith.remui(piece, int_of(8)), inside), int_of(16))
        within = arith.addi(arith.muli(inside, int_of(128)), within)
        begin = int_of(2 * chunk * self.rows * self.parts * self.chunk_size)
        return arith.addi(begin, arith.addi(arith.muli(tile, int_of(1024)), within))


def read_inputs(source: Any, how: Inputs, steps: range) -> Array:
    """Issue the loads of inputs [B, size], in any shape, from global memory. `write_inputs` waits for them."""
    size = math.prod(source.shape) // how.rows

    @inline(REF, returns=words_type(4 * len(steps)))
    def _read(_: Any, source: Any) -> Any:
        words = []
        for step in steps:
            number = how.number(size, *how.place(step))
            words += load_words(address_of(source, arith.muli(number, int_of(2))), "v4.b32")
        return pack_words(words)

    return _read(source)


def write_inputs(words: Array, out: Any, how: Inputs, steps: range, sums: Any = None) -> None:
    """Store what `read_inputs` returned in shared memory.

    Args:
        words: what `read_inputs` returned.
        out: inputs in shared memory.
        how: their layout.
        steps: the steps that `words` has.
        sums: array for the sum of each group of inputs, [chunks, B s · groups], in shared memory; None if the sums are
            not needed.
    """
    others = () if sums is None else (sums,)

    @inline(words_layout(4 * len(steps)), plgpu.RefType(how.transforms), *(REF for _ in others))
    def _write(_: Any, words: Any, out: Any, *others: Any) -> None:
        unpacked = unpack_words(words)
        for i, step in enumerate(steps):
            four, place = unpacked[4 * i : 4 * i + 4], how.place(step)
            store_four(four, out, how.offset(*place))
            for group_sums in others:
                _write_sum(four, place, group_sums, how.chunk_size // GROUP)

    _write(words, out, *others)


def _write_sum(four: list[Any], place: tuple[int, Any, Any], sums: Any, groups: int) -> None:
    """Store the sum of one group of inputs. Each of four threads has a piece of the group."""
    chunk, row, piece = place
    # A word has two bfloat16 values.
    numbers = [bits for word in four for bits in (arith.shli(word, int_of(16)), arith.andi(word, int_of(-65536)))]
    total = sum_over(reduce(arith.addf, [arith.bitcast(ir.F32Type.get(), bits) for bits in numbers]), [1, 2])
    with if_then(equal(arith.remui(piece, int_of(4)), int_of(0))):
        group = arith.addi(arith.muli(row, int_of(groups)), arith.divui(piece, int_of(4)))
        memref.store(total, sums, indices(chunk, group))
        scf.yield_([])


SQUARES = PROGRAMS * 8 // 128
"""Number of sums of squares that each thread loads."""


def read_squares(source: Any) -> Array:
    """Issue the loads of every program's sums of squares [programs, 8]; `write_squares` waits for them."""

    @inline(REF, returns=words_type(SQUARES))
    def _read(_: Any, source: Any) -> Any:
        start = arith.muli(thread_index(), int_of(4 * SQUARES))
        words = []
        for first in range(0, SQUARES, 4):
            words += load_words(address_of(source, arith.addi(start, int_of(4 * first))), "v4.b32")
        return pack_words(words)

    return _read(source)


def write_squares(words: Array, out: Any) -> None:
    """Store what `read_squares` returned in shared memory, [programs, 8]."""

    @inline(words_layout(SQUARES), REF)
    def _write(_: Any, words: Any, out: Any) -> None:
        start = arith.muli(thread_index(), int_of(4 * SQUARES))
        unpacked = unpack_words(words)
        for first in range(0, SQUARES, 4):
            store_four(unpacked[first : first + 4], out, arith.addi(start, int_of(4 * first)))

    _write(words, out)
