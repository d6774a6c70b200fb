"""From one attention to the next: the plain products against NumPy in float64, and how the Hopper kernel divides them.

That body runs on the GPU alone; `python -m benchmarks.kernels fused_decode_block` compares it there with NumPy in float64.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from kernels.lowering import decoding_step, on

from kvjax.bench.case import Case
from kvjax.pallas_kernels import BlockWeights, GroupedMatrix, Int8Matrix, Norm, fused_decode_block
from kvjax.pallas_kernels.hopper.fused_decode_block import pallas_mosaic_gpu
from kvjax.pallas_kernels.hopper.fused_decode_block.plan import (
    BARRIERS,
    BYTES,
    GROUPS,
    HALF,
    LINE,
    PROGRAMS,
    ROWS,
    Plan,
    plan,
)
from kvjax.pallas_kernels.op import WITHOUT, Unsupported

LLAMA = {"attended": 4096, "width": 4096, "wide": 14336, "heads": (4096, 1024)}


def draw(rows, attended, width, wide, heads, dtype=jnp.float32, weights=None, offset=None):
    """Inputs, residual stream and weights; where they are large, only their shapes.

    Args:
        weights: what makes a matrix of one's shape and position among the seven, if not all are floats.
        offset: of the gains of norms.
    """
    random = np.random.default_rng(0)

    def normal(*shape):
        if width > 1024:
            return jax.ShapeDtypeStruct(shape, dtype)
        return to_jax(random.normal(size=shape) * shape[-1] ** -0.5, dtype)

    q, k = heads
    o, gate, up, down = normal(width, attended), normal(wide, width), normal(wide, width), normal(width, wide)
    norms = [Norm(normal(width), 1e-5, offset) for _ in range(2)]
    matrices = o, gate, up, down, normal(q, width), normal(k, width), normal(k, width)
    if weights is not None:
        matrices = [weights(i, matrix.shape) for i, matrix in enumerate(matrices)]
    block = BlockWeights(matrices[0], norms[0], *matrices[1:4], norms[1], *matrices[4:])
    return normal(rows, attended), normal(rows, width), block


def int8(_, shape):
    return Int8Matrix(jax.ShapeDtypeStruct(shape, jnp.int8), jax.ShapeDtypeStruct(shape[:1], jnp.float32))


def int4(_, shape, group=32, dtype=jnp.float16, minima=True, units=0):
    outputs, inputs = shape
    groups = inputs // group
    scale = jax.ShapeDtypeStruct((outputs, groups), dtype)
    unit = jax.ShapeDtypeStruct((outputs, units), jnp.float16) if units else None
    levels = jax.ShapeDtypeStruct((outputs, group // 2, groups), jnp.uint8)
    return GroupedMatrix(levels, scale, scale if minima else None, unit)


def mixed(at, shape):
    return int8(at, shape) if at < 4 else jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@pytest.mark.parametrize("implementation", ["auto", "xla"])
def test_products(implementation):
    attended, x, weights = draw(3, 48, 32, 80, (48, 16))
    moved = fused_decode_block(attended, x, weights, implementation=implementation)
    exact = jax.tree.map(lambda a: np.asarray(a, np.float64), (attended, x, weights))
    attended, x, w = exact

    def normed(x, norm):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + norm.eps) * norm.gain

    x = x + attended @ w.o.T
    h = normed(x, w.mlp_norm)
    gate = h @ w.gate.T
    x = x + (gate / (1 + np.exp(-gate)) * (h @ w.up.T)) @ w.down.T
    h = normed(x, w.attn_norm)
    for got, want in zip(moved, (x, h @ w.q.T, h @ w.k.T, h @ w.v.T), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("shape", "served", "in_groups"),
    [
        (LLAMA, (1, 2, 4, 8), (1, 2, 4)),
        ({"attended": 3072, "width": 3072, "wide": 8192, "heads": (3072, 1024)}, (1, 2), ()),
        ({"attended": 4096, "width": 4096, "wide": 12288, "heads": (4096, 1024)}, (1, 2, 4, 8), (1, 2, 4)),
    ],
)
def test_shares_cover_everything(rows, shape, served, in_groups, bits):
    """Every program has whole blocks, all programs together all outputs, chunks all inputs; what is held at a time suffices."""
    sizes = plan(rows, **shape, bits=bits)
    if rows not in (in_groups if bits == 4 else served):
        assert isinstance(sizes, str)
        return
    assert isinstance(sizes, Plan)
    assert sizes.bits == bits
    assert bits * sizes.chunk % (8 * 128) == 0  # whole rows of shared memory that are interleaved
    assert PROGRAMS * sizes.outputs == shape["width"]
    assert PROGRAMS * sizes.wide == shape["wide"]
    assert tuple(PROGRAMS * count for count in sizes.heads) == shape["heads"]
    for count in (sizes.outputs, sizes.heads[0]):
        assert count * sizes.parts % ROWS == 0
    assert sizes.wide * sizes.parts % HALF == 0
    for count in (sizes.outputs, sizes.wide, *sizes.heads) if bits == 4 else ():
        assert sizes.blocks(count) * sizes.tall(count) * ROWS == count * sizes.parts
    for size in (shape["attended"], shape["width"], shape["wide"]):
        assert size % (sizes.parts * sizes.chunk) == 0
    # Each warpgroup has a barrier of its own for each slot.
    assert sizes.slots * sizes.warpgroups <= BARRIERS
    assert sizes.inputs >= shape["width"] // sizes.parts // sizes.chunk
    assert sizes.inputs % 2 == 0 or sizes.inputs >= shape["wide"] // sizes.parts // sizes.chunk


@pytest.mark.parametrize(("rows", "attended"), [(8, 4096), (4, 9216)])
def test_inputs_in_turns_have_barriers(rows, attended):
    """One for each chunk that is held, if not all are: where that would be too many, all are, and fewer weights are under way."""
    sizes = plan(rows, **LLAMA | {"attended": attended})
    chunks = LLAMA["wide"] // sizes.parts // sizes.chunk
    assert sizes.inputs <= (BARRIERS if sizes.inputs < chunks else chunks)
    assert (sizes.inputs < chunks) == (attended == 4096)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_as_many_bytes_under_way(rows):
    """Of int8 as of bfloat16, but for what its scales take of the memory; in chunks of twice as many inputs, of as many bytes."""
    floats, levels = plan(rows, **LLAMA), plan(rows, **LLAMA, bits=8)
    assert levels.chunk == 2 * floats.chunk
    assert floats.slots - 2 <= levels.slots <= floats.slots


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_outputs_are_sums_of_diagonals(rows):
    """What the plan says of matrices and inputs seen in parts."""
    parts = plan(rows, **LLAMA).parts
    random = np.random.default_rng(0)
    w, x = random.normal(size=(24, 64)), random.normal(size=(rows, 64))
    products = w.reshape(24 * parts, -1) @ x.reshape(rows * parts, -1).T
    diagonals = np.einsum("opbp->bo", products.reshape(24, parts, rows, parts))
    np.testing.assert_allclose(diagonals, x @ w.T)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_parts_of_weights_in_groups(rows):
    """Rows of 64 groups' bytes have all parts of a chunk, whose inputs are in their own order: chunks of them side by side, then parts."""
    parts = plan(rows, **LLAMA, bits=4).parts
    random = np.random.default_rng(0)
    outputs, groups = 16, 2 * LINE
    levels = random.integers(0, 256, (outputs, BYTES, groups), np.uint8)
    scale, minimum = random.normal(size=(2, outputs, groups)).astype(np.float16)
    x = random.normal(size=(rows, 2 * BYTES * groups)).astype(np.float32)
    chunk = 2 * BYTES * GROUPS
    inputs = x.reshape(rows, -1, parts, chunk).swapaxes(0, 1).reshape(-1, rows * parts, chunk)
    total = np.zeros((rows, outputs))
    for turn, columns in enumerate(inputs):
        here = slice(turn * LINE, (turn + 1) * LINE)
        bits, factor, least = (a[..., here] for a in (levels, scale, minimum))
        halves = np.concatenate([bits & 15, bits >> 4], axis=1)  # the low halves are the first 16 inputs of a group
        numbers = halves.astype(np.float64) * factor[:, None] + least[:, None]
        # Each of an output's parts has its groups one after the other, and their inputs.
        weights = numbers.reshape(outputs, 2 * BYTES, parts, GROUPS).transpose(0, 2, 3, 1).reshape(-1, chunk)
        products = weights @ columns.T
        total += np.einsum("opbp->bo", products.reshape(outputs, parts, rows, parts))
    matrix = GroupedMatrix(*map(to_jax, (levels, scale, minimum)))
    np.testing.assert_allclose(total, matrix.product(to_jax(x), jnp.float32), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rows": 3}, "3 rows"),
        ({"width": 4095}, "width of 4095"),
        ({"heads": (4096, 512)}, "32, 112, 32 and 4 outputs per program"),
        ({"wide": 11008}, "32, 86, 32 and 8 outputs per program"),
        ({"rows": 8, "attended": 8192, "width": 8192, "wide": 28672, "heads": (8192, 1024)}, "do not fit"),
    ],
)
def test_no_plan(changed, reason):
    assert reason in plan(**{"rows": 1, **LLAMA, **changed})


def abstractly(function, given):
    """What a function of shapes returns, traced: jitted so that it can be lowered, too."""
    leaves, tree = jax.tree.flatten(given)
    shapes = [leaf for leaf in leaves if not isinstance(leaf, float)]

    def of_arrays(*arrays):
        left = iter(arrays)
        return function(*tree.unflatten([leaf if isinstance(leaf, float) else next(left) for leaf in leaves]))

    return jax.jit(of_arrays).trace(*shapes)


def refusal(rows, dtype, weights=None, **options):
    reasons = []

    def ask(*given):
        reasons.append(pallas_mosaic_gpu.unsupported_reason(*given))

    abstractly(ask, draw(rows, **LLAMA, dtype=dtype, weights=weights, **options))
    return reasons[0]


def test_refuses():
    assert refusal(1, jnp.bfloat16) == "this program is not for a Hopper GPU"
    with on("NVIDIA H100 PCIe", 114):
        assert refusal(1, jnp.bfloat16) == "this GPU has 114 multiprocessors, not 128"
    with on():
        assert refusal(1, jnp.bfloat16) is None
        assert refusal(1, jnp.float32) == "not all arrays are bfloat16"
        assert refusal(1, jnp.bfloat16, offset=1.0) == "gains of norms have an offset"
        assert refusal(16, jnp.bfloat16).startswith("16 rows")


def test_refuses_weights():
    with on():
        assert refusal(1, jnp.bfloat16, int8) is None
        assert refusal(1, jnp.float32, int8) == "not all activations and norms are bfloat16"
        assert refusal(1, jnp.float32, int4) == "not all activations and norms are bfloat16"
        assert refusal(8, jnp.bfloat16, int4) == "8 rows are too many for 4-bit weights"
        assert refusal(1, jnp.bfloat16, mixed) == "some weights are floats and others int8"
        assert refusal(16, jnp.bfloat16, int8).startswith("16 rows")


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({}, None),
        ({"minima": False}, None),
        ({"dtype": jnp.bfloat16}, "scales of 4-bit weights are bfloat16, not float16"),
        ({"group": 128}, "4-bit weights have groups of 128, not 32"),
        ({"units": 16}, "scales of 4-bit weights are quantised themselves"),
    ],
)
def test_forms_of_four_bits(form, reason):
    with on():
        assert refusal(1, jnp.bfloat16, partial(int4, **form)) == reason


def test_minima_of_all_or_none():
    with on():
        found = refusal(1, jnp.bfloat16, lambda at, shape: int4(at, shape, minima=at < 4))
    assert found == "some 4-bit weights have minima and others do not"


def test_asked_for_by_name():
    with pytest.raises(Unsupported, match="not for a Hopper GPU"):
        fused_decode_block(*draw(1, 48, 32, 80, (48, 16)), implementation="gpu")


@pytest.mark.parametrize(
    ("rows", "weights", "wide"),
    [
        *((rows, weights, 14336) for rows in (1, 2, 4, 8) for weights in (None, int8)),
        (1, int4, 14336),
        (2, int4, 14336),
        (4, int4, 14336),
        (1, partial(int4, minima=False), 14336),
        (1, None, 17408),  # a share of which no power of two is a multiple
        (1, int8, 17408),
    ],
)
def test_lowers_for_hopper(rows, weights, wide):
    """Not anew for each layer; the first one's inputs come from outside the mesh that stands for the device, and count as others."""

    def layers(attended, x, weights):
        moved = [fused_decode_block(attended, x, weights, implementation="gpu")]
        for _ in range(3):
            moved.append(fused_decode_block(moved[-1].q, moved[-1].x, weights, implementation="gpu"))
        return moved

    with on():
        traced = abstractly(layers, draw(rows, **LLAMA | {"wide": wide}, dtype=jnp.bfloat16, weights=weights))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("call @_call") == 4
    assert text.count("@mosaic_gpu_v2(") == 2


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
    ("weights", "spared"),
    [("float", None), ("float", "nearest"), ("float", "nearest, fused_decode_block"), ("int8", None), ("int4", None)],
)
def test_decoding_uses_it(weights, spared, monkeypatch):
    """A step of Llama-3.1-8B's shape, lowered for an H200: one kernel, called from each layer to the next, unless told not to."""
    if spared:
        monkeypatch.setenv(WITHOUT, spared)
    case = Case("full", {}, 1024, 1, "llama-3.1-8b", layers=4, prefill=False, weights=weights)
    text = decoding_step(case)
    kernel = re.search(r"func\.func private @(\w+)\((?:(?!func\.func).)*?@mosaic_gpu_v2\(", text, re.DOTALL)
    calls = [name for name in re.findall(r"call @(\w+)\(", text) if kernel and name == kernel.group(1)]
    without = spared is not None and "fused_decode_block" in spared
    assert len(calls) == (0 if without else case.config.num_layers - 1)


def test_a_pair_is_never_multiplied_in_whole_blocks():
    """Keys and values may be ordered one after the other, as two products of a block each: who is told of a chunk must be who waits for it."""
    sizes = plan(2, 2048, 1024, 22528, (1024, 1024), 8)
    assert isinstance(sizes, Plan)
    assert sizes.warpgroups == 2
    assert sizes.whole(2, 2) == sizes.whole(1, 2)
