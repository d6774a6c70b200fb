"""Sizes of the Hopper kernel: how its work is divided among programs, warpgroups and shared memory.

The matrix units multiply 64 rows of a matrix at a time. If these were 64 outputs, programs could not have equal shares
of them. A matrix [O, I] is therefore viewed as [O · s, I / s] and the inputs [B, I] as [B · s, I / s], without moving
data. 64 rows are then 64 / s outputs. Of the products, [64, B · s], only those of equal parts are needed: an output is
the sum of the diagonal of s by s of them (`epilogue.add_diagonals`).

The modules of this folder use these words:

- program: thread block of the kernel. There is one per multiprocessor, and each computes an equal share of the outputs
  of every matmul.
- sequence: row of the inputs [B, I], the token that one sequence decodes.
- part: one of s equal shares of the inputs. A row of the view of a matrix is an (output, part), and a row of the view
  of the inputs is a (sequence, part). Part p has inputs p · I / s to (p + 1) · I / s. 4-bit weights are different,
  because their groups are adjacent: part p has the p-th 256 inputs of each chunk.
- block: 64 rows of the view of a matrix.
- chunk: the inputs that are multiplied at a time, `Plan.chunk` of every part. Of 4-bit weights, a chunk is 8 · 256
  adjacent inputs.
- slot: buffer in shared memory for one chunk of a block's weights, or of two blocks' 4-bit weights. Slots are a ring:
  the k-th chunk that a program copies is in slot k modulo `Plan.slots`.
- group: 32 adjacent inputs, for which 4-bit weights have a scale, and optionally a minimum. Warpgroups (four warps) are
  always called warpgroups.
"""

from typing import NamedTuple

PROGRAMS = 128
"""Number of programs, one per multiprocessor. All run at once, since each waits for the others."""

ROWS, HALF = 64, 32
"""Rows of a block, and half of them. Of bfloat16 and int8 weights, a block can have `HALF` rows of the gate projection
and `HALF` rows of the up projection.
"""

WARPGROUPS = {16: 2, 8: 2, 4: 3}
"""Consumer warpgroups, by bits per weight.

4-bit codes are converted and scaled in registers, which takes a warpgroup longer than waiting for them. A third
warpgroup hides this, but takes memory from slots.
"""

WHOLE = 2
"""Maximum number of chunks per block for which a warpgroup multiplies whole blocks of codes. It then adds up half as
often.
"""

SHARED = 227 * 1024
"""Shared memory per program, in bytes."""

CHUNKS = {16: (128,), 8: (256, 128), 4: (256,)}
"""Inputs per part of a chunk, by bits per weight. The first one that divides all numbers of inputs is used."""

SLOT = 2 * 128
"""Bytes per row of a slot for which `SLOTS` counts slots. Smaller slots are used in proportionally larger numbers."""

SLOTS = {16: (10, 8, 6, 4), 8: (8, 6, 4), 4: (5, 4, 3)}
"""Number of slots, by bits per weight: the largest that fits. int8 weights in chunks of 128 use twice as many.

More slots take longer to fill and delay the data of a grid barrier, but cover more of its latency. On an H200 the
choice changes the time of a Llama-3.1-8B layer by one to three percent (`python -m benchmarks.kernels --tune
fused_decode_block`).
"""

TALL = 2
"""Maximum number of blocks per slot of 4-bit weights.

Such blocks have few bytes, in three copies. For four sequences, the products with two blocks would not fit into
registers.
"""

GROUP = 32
"""Inputs per scale of 4-bit weights."""

BYTES = GROUP // 2
"""Rows of bytes per output of 4-bit weights. Each row has one byte per group, with the codes of two inputs."""

LINE = 64
"""Groups per chunk of 4-bit weights, of all parts."""

GROUPS = 8
"""Groups per chunk and part of 4-bit weights."""

BARRIERS = 32
"""Maximum number of barriers in one array: one per slot and consumer warpgroup."""

SCALES = 6
"""Rows of an int8 program's scales in shared memory: of o, gate, up, down, q, and of k and v together."""

PARTS = {1: 8, 2: 8, 4: 2, 8: 2}
"""s, by number of sequences. 4-bit weights always have `LINE` / `GROUPS` = 8 parts."""


class Plan(NamedTuple):
    """Sizes of one program's share.

    Attributes:
        rows: number of sequences, B.
        parts: number of parts, s.
        outputs: outputs of the output projection and of the down projection, each.
        wide: outputs of the gate projection, and of the up projection.
        heads: outputs of q, and of k and v each.
        chunk: inputs per part of a chunk.
        slots: number of slots.
        inputs: chunks of inputs in shared memory at a time.
        bits: bits per weight: 16 for bfloat16, 8 or 4.
        warpgroups: consumer warpgroups.
        most: maximum number of blocks per slot.
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
        """Return whether each warpgroup multiplies whole blocks of a matmul, instead of some chunks of every block."""
        # Never for a pair, such as keys and values, whose blocks are copied one at a time.
        return self.bits < 16 and chunks <= min(WHOLE, self.inputs) and blocks >= max(self.warpgroups, 3)

    def tall(self, outputs: int) -> int:
        """Return the blocks per slot for a matmul with `outputs`: the maximum if it divides them, else 1."""
        return 1 if outputs * self.parts % (self.most * ROWS) else self.most

    def blocks(self, outputs: int) -> int:
        """Return the number of slots that one chunk of a matmul with `outputs` needs."""
        return outputs * self.parts // (self.tall(outputs) * ROWS)


def plan(rows: int, attended: int, width: int, wide: int, heads: tuple[int, int], bits: int = 16) -> Plan | str:
    """Choose the sizes for a case, or return why none fit.

    Args:
        rows: number of sequences, B.
        attended: inputs of the output projection, A.
        width: channels of the residual stream, D.
        wide: outputs of the gate and up projections, F.
        heads: outputs of q, and of k and v each.
        bits: bits per weight.
    """
    if rows not in PARTS:
        return f"{rows} rows are not one of {list(PARTS)}"
    if bits == 4 and rows > 4:
        return f"{rows} rows are too many for 4-bit weights"
    parts = LINE // GROUPS if bits == 4 else PARTS[rows]
    most = TALL if bits == 4 and rows < 4 else 1
    for name, size in {"width": width, "MLP": wide, "queries": heads[0], "keys": heads[1]}.items():
        if size % PROGRAMS:
            return f"{name} of {size} is not a multiple of {PROGRAMS}"
    narrow, share_wide, q, k = (size // PROGRAMS for size in (width, wide, *heads))
    if narrow * parts % ROWS or share_wide * parts % HALF or q * parts % ROWS or k < 8 or k * parts not in (16, 32, 64):
        return f"{narrow}, {share_wide}, {q} and {k} outputs per program in {parts} parts are not whole blocks"
    if bits == 4 and share_wide * parts % ROWS:
        return f"{share_wide} outputs per program in {parts} parts are not whole blocks of 4-bit weights"
    if max(narrow, q) > 64 or k > 64:
        return f"{narrow}, {share_wide}, {q} and {k} outputs per program are too many"
    chunks = [chunk for chunk in CHUNKS[bits] if not any(size % (parts * chunk) for size in (attended, width, wide))]
    if not chunks:
        return f"{attended}, {width} and {wide} inputs in {parts} parts are not multiples of {CHUNKS[bits][-1]}"
    chunk = chunks[0]
    short, long = max(attended, width) // parts // chunk, wide // parts // chunk
    for slots in SLOTS[bits]:
        for inputs in (max(short, long), short + short % 2)[: 1 if bits == 4 else 2]:
            groups = WARPGROUPS[bits]
            ahead = min(slots if bits == 4 else 8 * slots * SLOT // (bits * chunk), BARRIERS // groups)
            found = Plan(rows, parts, narrow, share_wide, (q, k), chunk, ahead, inputs, bits, groups, most)
            if _bytes(found) <= SHARED and (inputs >= long or _fits_in_phases(found, attended, width)):
                return found
    return f"{rows} rows of {max(attended, width, wide)} inputs do not fit into shared memory"


def _fits_in_phases(plan: Plan, attended: int, width: int) -> bool:
    """Return whether inputs that do not fit at once can be loaded in phases.

    This requires a single block, in which each warpgroup has its own chunks.
    """
    chunks = [size // plan.parts // plan.chunk for size in (attended, width)]
    blocks = plan.outputs * plan.parts // ROWS, plan.wide * plan.parts // HALF
    before = blocks[0] * chunks[0] + blocks[1] * chunks[1]
    even = before % plan.warpgroups == 0 and plan.inputs % plan.warpgroups == 0
    return blocks[0] == 1 and even and plan.inputs <= BARRIERS


def _bytes(plan: Plan) -> int:
    """Return the bytes of shared memory: chunks of weights and inputs, sums of products, and scales."""
    slot = plan.chunk * plan.bits * plan.most * ROWS // 8
    chunks = slot * plan.slots + 2 * plan.chunk * plan.inputs * plan.rows * plan.parts
    sums = 4 * plan.warpgroups * 8 * (64 + 2 * columns(plan.wide))
    if plan.bits == 8:
        sums += -(-4 * SCALES * columns(plan.wide) // 1024) * 1024
    if plan.bits == 4:
        # A 16-bit scale and minimum per group of a slot; the sums of all groups of inputs; barriers and padding.
        sums += 2 * 2 * slot * 2 // GROUP * plan.slots
        sums += 4 * plan.inputs * plan.rows * plan.parts * GROUPS + 2048
    return chunks + sums + 2 * 8 * 3 * 64 + 4 * 8 * PROGRAMS + 2048


def columns(count: int) -> int:
    """Return the padded columns of an array in shared memory: 16 threads share a row evenly, and k and v fit beside
    each other.
    """
    return max(-(-count // 64) * 64, 128)
