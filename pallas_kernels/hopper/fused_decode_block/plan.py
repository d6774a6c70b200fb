"""How the Hopper kernel divides its work.

A matrix [O, I] is seen as [O · s, I / s], inputs [B, I] as [B · s, I / s]: without moving anything, 64 rows of a matrix, which is what
the matrix units take, are then 64 / s outputs, few enough that all programs have equal shares. An output is the sum of the diagonal of
a block of s by s products.
"""

from typing import NamedTuple

PROGRAMS = 128
"""One a multiprocessor, all at once: each waits for the others."""

ROWS, HALF = 64, 32
"""Rows of a matrix that are multiplied at a time, and half of them: a slot holds as many of the gate as of the up projection."""

WARPGROUPS = {16: 2, 8: 2, 4: 3}
"""Warpgroups that multiply, taking turns, by bits of a weight: levels of 4 bits are made floats on the way, and scaled, which takes a warpgroup
longer than to wait for them; another one would take memory from slots.
"""

WHOLE = 2
"""Chunks of a block up to which a warpgroup multiplies levels of whole blocks: then it adds up half as often."""

SHARED = 227 * 1024
"""Bytes of shared memory of a program."""

CHUNKS = {16: (128,), 8: (256, 128), 4: (256,)}
"""Inputs of a part that are multiplied at a time, by bits of a weight: the first that all inputs are multiples of."""

SLOT = 2 * 128
"""Bytes of a row of weights that `SLOTS` counts."""

SLOTS = {16: (10, 8, 6, 4), 8: (8, 6, 4), 4: (5, 4, 3)}
"""Chunks of weights under way, by bits of a weight, as many as fit; twice as many of int8 in chunks of 128. More take longer to arrive, and keep
what programs tell one another from arriving, but bridge more of what those wait: on an H200 it differs by one to three percent of a layer of
Llama-3.1-8B's shape (`python -m benchmarks.kernels --tune fused_decode_block`).
"""

TALL = 2
"""Blocks of `ROWS` rows that a slot has room for, if weights are in 4 bits: they are few bytes, in three copies. Four rows' products with two
blocks would not fit into registers.
"""

GROUP = 32
"""Inputs that share a scale, of weights in 4 bits."""

BYTES = GROUP // 2
"""Rows of bytes of an output in 4 bits: in each of them a group has one byte, which is two weights."""

LINE = 64
"""Groups in a row of a slot with weights in 4 bits: of all parts together."""

GROUPS = 8
"""Those of one part."""

BARRIERS = 32
"""That a kernel has at most in one array: one for each slot and warpgroup that multiplies."""

SCALES = 6
"""Rows that a program's scales are kept in: of o, gate, up, down, q, and of k and v together."""

PARTS = {1: 8, 2: 8, 4: 2, 8: 2}
"""s, by rows of inputs; of weights in 4 bits as many as a line has."""


class Plan(NamedTuple):
    """Sizes of one program's share.

    Attributes:
        rows: tokens, B.
        parts: s.
        outputs: of the residual stream.
        wide: of the gate, and of the up projection.
        heads: of q, and of k and of v.
        chunk: inputs of a part that are multiplied at a time.
        slots: chunks of weights under way.
        inputs: chunks of inputs that are held at a time.
        bits: of a weight, 16 for bfloat16, 8 or 4.
        warpgroups: that multiply.
        most: blocks of `ROWS` rows that a slot has room for.
    """

    rows: int
    parts: int
    outputs: int
    wide: int
    heads: tuple[int, int]
    chunk: int
    slots: int
    inputs: int
    bits: int = 16
    warpgroups: int = 2
    most: int = 1

    def whole(self, blocks: int, chunks: int) -> bool:
        """Whether a warpgroup multiplies whole blocks of a product that has so many of so many chunks, and not some chunks of every block."""
        # Never of a pair, such as keys and values, whose blocks are ordered one by one.
        return self.bits < 16 and chunks <= min(WHOLE, self.inputs) and blocks >= max(self.warpgroups, 3)

    def tall(self, outputs: int) -> int:
        """Blocks of `ROWS` rows in each slot of a product of so many outputs: all that there is room for, if that leaves none over."""
        return 1 if outputs * self.parts % (self.most * ROWS) else self.most

    def blocks(self, outputs: int) -> int:
        """Slots for so many outputs, by chunks of all inputs."""
        return outputs * self.parts // (self.tall(outputs) * ROWS)


def plan(rows: int, attended: int, width: int, wide: int, heads: tuple[int, int], bits: int = 16) -> Plan | str:
    """The sizes for inputs [rows, attended], a residual stream of `width`, an MLP of `wide` and q, k of `heads` outputs; or why none fit.

    Args:
        bits: of a weight.
    """
    if rows not in PARTS:
        return f"{rows} rows, not one of {list(PARTS)}"
    if bits == 4 and rows > 4:
        return f"{rows} rows by weights in 4 bits"
    parts = LINE // GROUPS if bits == 4 else PARTS[rows]
    most = TALL if bits == 4 and rows < 4 else 1
    for name, size in {"width": width, "MLP": wide, "queries": heads[0], "keys": heads[1]}.items():
        if size % PROGRAMS:
            return f"{name} of {size} is not a multiple of {PROGRAMS}"
    own, own_wide, q, k = (size // PROGRAMS for size in (width, wide, *heads))
    if own * parts % ROWS or own_wide * parts % HALF or q * parts % ROWS or k < 8 or k * parts not in (16, 32, 64):
        return f"shares of {own}, {own_wide}, {q} and {k} outputs, by {parts}, are not whole blocks"
    if bits == 4 and own_wide * parts % ROWS:
        return f"shares of {own_wide} outputs, by {parts}, are not whole blocks of weights in 4 bits"
    if max(own, q) > 64 or k > 64:
        return f"shares of {own}, {own_wide}, {q} and {k} outputs do not fit"
    chunks = [chunk for chunk in CHUNKS[bits] if not any(size % (parts * chunk) for size in (attended, width, wide))]
    if not chunks:
        return f"{attended}, {width} and {wide} inputs, by {parts}, are not multiples of {CHUNKS[bits][-1]}"
    chunk = chunks[0]
    short, long = max(attended, width) // parts // chunk, wide // parts // chunk
    for slots in SLOTS[bits]:
        for inputs in (max(short, long), short + short % 2)[: 1 if bits == 4 else 2]:
            groups = WARPGROUPS[bits]
            ahead = min(slots if bits == 4 else 8 * slots * SLOT // (bits * chunk), BARRIERS // groups)
            found = Plan(rows, parts, own, own_wide, (q, k), chunk, ahead, inputs, bits, groups, most)
            if _bytes(found) <= SHARED and (inputs >= long or _turns(found, attended, width)):
                return found
    return f"{rows} rows of {max(attended, width, wide)} inputs do not fit into shared memory"


def _turns(plan: Plan, attended: int, width: int) -> bool:
    """Whether inputs that do not fit at once can be read in turns: a single block, of which each warpgroup has its own chunks."""
    chunks = [size // plan.parts // plan.chunk for size in (attended, width)]
    blocks = plan.outputs * plan.parts // ROWS, plan.wide * plan.parts // HALF
    before = blocks[0] * chunks[0] + blocks[1] * chunks[1]
    even = before % plan.warpgroups == 0 and plan.inputs % plan.warpgroups == 0
    return blocks[0] == 1 and even and plan.inputs <= BARRIERS


def _bytes(plan: Plan) -> int:
    """Shared memory: chunks of weights and of inputs, what products are gathered in, and what levels are multiplied by."""
    slot = plan.chunk * plan.bits * plan.most * ROWS // 8
    chunks = slot * plan.slots + 2 * plan.chunk * plan.inputs * plan.rows * plan.parts
    sums = 4 * plan.warpgroups * 8 * (64 + 2 * columns(plan.wide))
    if plan.bits == 8:
        sums += -(-4 * SCALES * columns(plan.wide) // 1024) * 1024
    if plan.bits == 4:
        # A scale and a minimum of 16 bits for each group of a slot, and sums of all groups of inputs; barriers, and what fills arrays up.
        sums += 2 * 2 * slot * 2 // GROUP * plan.slots
        sums += 4 * plan.inputs * plan.rows * plan.parts * GROUPS + 2048
    return chunks + sums + 2 * 8 * 3 * 64 + 4 * 8 * PROGRAMS + 2048


def columns(count: int) -> int:
    """Columns of an array in shared memory that has `count`: 16 threads share a row evenly, and k and v have room beside each other."""
    return max(-(-count // 64) * 64, 128)
