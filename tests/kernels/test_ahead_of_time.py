"""Every TPU kernel, compiled by the TPU's own compiler at the shapes of real models: it fits VMEM, and needs next to no memory of its own."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from kernels.ahead_of_time import chip, compile_for, temporaries

from benchmarks.quantized_products import KINDS, makes_floats, measure
from kvjax.models.params import quantized_shape
from kvjax.pallas_kernels import (
    Rotation,
    block_attention,
    chunk_similarity,
    decode_attention,
    expert_mlp,
    gather_attention,
    kmeans,
    lookup,
    nearest,
    partial_block_attention,
    prefill_attention,
    top_k,
    window_scores,
)
from kvjax.pallas_kernels.decode_attention import decode_attention_pallas_mosaic_tpu as decode_attention_tpu
from kvjax.pallas_kernels.device import tpu_layout
from kvjax.pallas_kernels.experts.tiles import Biases
from kvjax.pallas_kernels.projection.api import MOST_SLICED
from kvjax.runtime import absent_tpu
from kvjax.runtime.absent_tpu import CHIPS

pytestmark = [pytest.mark.slow, pytest.mark.optimised]

MB = 2**20


class Compiled(NamedTuple):
    """A program of one kernel: its function, shapes of its inputs, and the most temporary memory it may need, in bytes."""

    function: Callable[..., Any]
    shapes: tuple[Any, ...]
    temporary: int


def shape(dtype: str, *dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))


def decode(batch: int, kv_heads: int, group: int, slots: int, dim: int, dtype: str, rotated: bool) -> Compiled:
    """Decode attention with probabilities, which needs room for its logits and none for a copy of keys or values."""

    def function(q: Any, k: Any, v: Any, weight: Any, *turn: Any) -> Any:
        rotation = Rotation(*turn) if turn else None
        return decode_attention(q, k, v, weight, scale=0.1, rotation=rotation, probs=True)

    cache = shape(dtype, batch, kv_heads, slots, dim)
    shapes = (shape(dtype, batch, kv_heads * group, dim), cache, cache, shape("float32", batch, kv_heads, slots))
    if rotated:
        shapes += (shape("int32", batch, kv_heads, slots), shape("int32", batch, kv_heads), shape("float32", dim // 2))
    return Compiled(function, shapes, 4 * batch * kv_heads * group * slots + MB)


def choosing(rows: int, size: int, dtype: str) -> Compiled:
    """Top-k, whose mask is first written as integers."""
    return Compiled(top_k, (shape(dtype, rows, size), shape("int32", rows)), 4 * rows * size + MB)


def gathering(batch: int, kv_heads: int, selecting: int, page: int, pages: int, dim: int, dtype: str) -> Compiled:
    """Gather attention of 4 query heads a KV head over pages of a cache of 32k slots, with no copy of what it selects."""

    def function(*inputs: Any) -> Any:
        return gather_attention(*inputs, scale=0.1, page=page)

    cache, selected = shape(dtype, batch, kv_heads, 32768, dim), (batch, selecting, pages)
    shapes = (shape(dtype, batch, 4 * kv_heads, dim), cache, cache, shape("int32", *selected))
    return Compiled(function, (*shapes, shape("bool", batch, selecting, pages * page)), MB)


def observing(
    batch: int, tokens: int, window: int, heads: int, kv_heads: int, dim: int, chunk: int, dtype: str
) -> Compiled:
    """Window scores, which need room for keys (and queries of 64 channels) in another order, not for a score of each pair."""

    def function(*inputs: Any) -> Any:
        return window_scores(*inputs, window=window, scale=0.1, chunk=chunk)

    q, k = (shape(dtype, batch, tokens, n, dim) for n in (heads, kv_heads))
    room = 2 * k.size * k.dtype.itemsize + (4 * q.size * q.dtype.itemsize if dim < 128 else 0)
    return Compiled(function, (q, k, shape("int32", batch)), room + 8 * MB)


def searching(groups: int, queries: int, keys: int, dim: int, dtype: str) -> Compiled:
    """The nearest keys, with biases; heads narrower than 128 channels are first spread to so many."""
    shapes = shape(dtype, groups, queries, dim), shape(dtype, groups, keys, dim), shape("float32", groups, keys)
    spread = 0 if dim % 128 == 0 else 128 * groups * (queries + keys) * jnp.dtype(dtype).itemsize
    return Compiled(nearest, shapes, spread + 8 * groups * queries + MB)


def matching(batch: int, heads: int, places: int, chunk: int, dim: int, dtype: str) -> Compiled:
    """Similarity inside chunks, which begin anywhere: keys are cut into chunks first, whole vectors of 128 channels."""

    def function(*inputs: Any) -> Any:
        return chunk_similarity(*inputs, chunk)

    keys, row = shape(dtype, batch, heads, places, dim), shape("int32", batch)
    return Compiled(function, (keys, row, row), 2 * max(128 // dim, 1) * keys.size * keys.dtype.itemsize + 4 * MB)


def clustering(batch: int, kv_heads: int, tokens: int, clusters: int, dim: int, dtype: str) -> Compiled:
    """k-means, which needs room for the tokens with zeros where there are none, and not for tokens × clusters."""

    def function(*inputs: Any) -> Any:
        return kmeans(*inputs, iterations=20)

    keys = shape(dtype, batch, kv_heads, tokens, dim)
    others = shape("bool", batch, tokens), shape("float32", batch, kv_heads, clusters, dim), shape("int32", batch)
    return Compiled(function, (keys, *others), 128 // dim * keys.size * keys.dtype.itemsize + 8 * MB)


def prefilling(batch: int, tokens: int, heads: int, kv_heads: int, dim: int, window: int | None) -> Compiled:
    """Prefill attention, which needs room for its inputs and output in another order, not for tokens × tokens."""

    def function(*inputs: Any) -> Any:
        return prefill_attention(*inputs, scale=0.1, window=window)

    q, k = (shape("bfloat16", batch, tokens, n, dim) for n in (heads, kv_heads))
    return Compiled(function, (q, k, k), 2 * 128 // dim * (q.size + 2 * k.size) * 2 + 8 * MB)


def reading(
    batch: int, tokens: int, slots: int, heads: int, kv_heads: int, dim: int, dtype: str, weighted: bool, attend: Any
) -> Compiled:
    """Block attention, which needs room for queries, positions and output in another order, not for tokens × slots."""

    def function(*inputs: Any) -> Any:
        return attend(*inputs, scale=0.1)

    q, cache = shape(dtype, batch, tokens, heads, dim), shape(dtype, batch, kv_heads, slots, dim)
    per_slot = batch, kv_heads, slots
    shapes = q, cache, cache, shape("int32", batch, tokens), shape("int32", *per_slot)
    lying = 2 * cache.size * cache.dtype.itemsize * 2 if dim < 128 else 0  # narrow caches lie the other way round
    wide = max(128 // dim, 1)
    room = 4 * wide * q.size * q.dtype.itemsize + 2 * 4 * 128 * batch * tokens * heads // kv_heads + lying
    return Compiled(function, (*shapes, shape("float32", *per_slot)) if weighted else shapes, room + 8 * MB)


KERNELS = {
    "prefill attention, 32k": prefilling(1, 32768, 32, 8, 128, None),
    "prefill attention, sliding window, heads of 64": prefilling(2, 4096, 9, 3, 64, 1024),
    "block attention, 4096 tokens over 20k slots": reading(
        1, 4096, 20480, 32, 8, 128, "bfloat16", False, block_attention
    ),
    "block attention, weights, uneven, a batch": reading(4, 700, 5000, 32, 8, 128, "bfloat16", True, block_attention),
    "block attention, heads of 64, float32": reading(2, 512, 4096, 9, 3, 64, "float32", True, block_attention),
    "partial block attention, 4096 tokens over 20k slots": reading(
        1, 4096, 20480, 32, 8, 128, "bfloat16", True, partial_block_attention
    ),
    "partial block attention, few tokens, heads of 64, float32": reading(
        2, 7, 1000, 9, 3, 64, "float32", False, partial_block_attention
    ),
    "decode attention, Llama 3.1 8B, 32k": decode(1, 8, 4, 32768, 128, "bfloat16", False),
    "decode attention, rotated, batch of 8": decode(8, 8, 4, 8192, 128, "bfloat16", True),
    "decode attention, heads of 64, uneven": decode(2, 3, 3, 4000, 64, "bfloat16", True),
    "decode attention, float32, no groups": decode(1, 8, 1, 1024, 64, "float32", False),
    "top-k, 256 rows of 32k": choosing(256, 32768, "float32"),
    "top-k, a few uneven rows": choosing(9, 1000, "bfloat16"),
    "gather attention, pages of 64": gathering(4, 8, 8, 64, 16, 128, "bfloat16"),
    "gather attention, small pages for each query head": gathering(1, 8, 32, 16, 64, 128, "bfloat16"),
    "gather attention, heads of 64, float32": gathering(1, 3, 3, 128, 20, 64, "float32"),
    "window scores, 32k": observing(1, 32768, 32, 32, 8, 128, 1, "bfloat16"),
    "window scores, chunks, heads of 64, uneven": observing(2, 4000, 256, 32, 8, 64, 8, "bfloat16"),
    "nearest, 256 centroids": searching(64, 8192, 256, 128, "bfloat16"),
    "nearest, heads of 64, float32, uneven": searching(3, 1000, 70, 64, "float32"),
    "similarity in chunks of 256, bfloat16": matching(1, 8, 32768, 256, 128, "bfloat16"),
    "similarity in a chunk of 2048": matching(1, 8, 2048, 2048, 128, "bfloat16"),
    "similarity in chunks of 256, float32 heads of 64": matching(4, 8, 8192, 256, 64, "float32"),
    "k-means, 8192 tokens": clustering(2, 8, 8192, 102, 128, "bfloat16"),
    "k-means, heads of 64, float32": clustering(1, 3, 4000, 50, 64, "float32"),
}


FIRSTS = {name.split(",")[0]: name for name in reversed(KERNELS)}.values()
"""The first case of each kernel. One is enough where a chip differs little from the v5e, for which all are compiled."""


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("name", "generation"), [(name, chip) for chip in CHIPS for name in KERNELS if chip == "v5e" or name in FIRSTS]
)
def test_compiles_and_needs_no_memory_of_its_own(name, generation):
    kernel = KERNELS[name]
    compiled = compile_for(generation, kernel.function, *kernel.shapes)
    assert "tpu_custom_call" in compiled.as_text()
    assert temporaries(compiled) <= kernel.temporary


def test_a_kernel_too_big_for_vmem_does_not_compile():
    """So that passing means something: the same kernel with blocks of 64k slots, 16 MB each of keys and values. (Larger ones take the compiler longer to refuse.)"""

    def function(q, k, v, weight):
        return decode_attention_tpu.decode_attention(q, k, v, weight, scale=0.1, block=2**16)

    cache = shape("bfloat16", 1, 1, 2**20, 128)
    with pytest.raises(Exception, match=r"(?i)vmem"):
        compile_for("v5e", function, shape("bfloat16", 1, 4, 128), cache, cache, shape("float32", 1, 1, 2**20))


@pytest.mark.parametrize("rows", [1, 8])
def test_weights_in_8_bits_are_half_the_bytes_and_never_floats(rows):
    chip("v5e")
    plain, packed = (measure("v5e", "k and v", kind, rows) for kind in KINDS[:2])
    assert packed["counted_bytes"] < 0.52 * plain["counted_bytes"]
    assert packed["temporary_bytes"] == 0
    assert not packed["floats_first"]


def test_floats_of_a_whole_matrix_are_found():
    """Two halves of what one dequantises count, shapes of what is given do not."""
    multiplied = "  ROOT %out = bf16[8,64]{1,0} fusion(bf16[64,32]{1,0} %w)"
    lines = "HloModule m", "ENTRY %main {", "  %w = bf16[64,32]{1,0} parameter(0)", multiplied
    assert not makes_floats("\n".join(lines), 64 * 32)
    halves = "  %both = (bf16[64,8,2]{2,1,0:T(8,128)(2,1)S(1)}, bf16[64,8,2]{2,1,0:T(8,128)(2,1)S(1)}) fusion(%w), kind=kLoop"
    assert makes_floats("\n".join([*lines, halves]), 64 * 32)


@pytest.mark.parametrize("generation", ["v5e", "v6e"])
def test_arguments_are_stored_in_the_order_with_least_padding(generation):
    matrices = [
        (8, 2880),
        (4096, 2880),
        (2880, 4096),
        (92160, 2880),
        (98304, 3072),
        (50272, 2880),
        (600, 576),
        (100, 100),
    ]
    groups = [(92160, 16, 90), (98304, 16, 96), (98304, 16, 128), (2048, 16, 24), (11, 24, 2048), (64, 64, 64)]
    arguments = [shape("bfloat16", *dims) for dims in [(2880,), *matrices, *groups]]
    compiled = compile_for(generation, lambda *args: [x + x for x in args], *arguments)
    stored = [each.layout.major_to_minor for each in compiled.input_formats[0]]
    assert stored == [tpu_layout(x.shape) for x in arguments]
    assert {(1, 0), (0, 1), (2, 1, 0), (1, 2, 0), (0, 1, 2)} <= set(stored)


@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["float", "mxfp4"])
def test_experts_whose_rows_are_no_multiple_of_128_are_not_copied(kind):
    """At the shape of gpt-oss-20b: less temporary memory than the matrices of one expert, where all 32 were copied."""
    experts, per_token, width, rows = 32, 4, 2880, 2048
    one = shape("bfloat16", experts * width, width)
    matrices = [quantized_shape(one, kind)] * 3
    biases = Biases(*[shape("bfloat16", experts * width)] * 3)
    routed = shape("int32", rows, per_token), shape("float32", rows, per_token)
    function = partial(expert_mlp, activation="clamped_swiglu")
    compiled = compile_for("v5e", function, shape("bfloat16", rows, width), *routed, *matrices, biases)
    assert temporaries(compiled) < 3 * 2 * width * width


@pytest.mark.parametrize("rows", [8, MOST_SLICED + 1])
def test_an_embedding_stored_by_columns_is_not_copied_to_decode(rows):
    table = shape("bfloat16", 65536, 2880)
    looked_up = compile_for(
        "v5e", lambda table, tokens: lookup(table, tokens, jnp.bfloat16), table, shape("int32", rows)
    )
    copies = temporaries(looked_up) >= 2 * 65536 * 2880
    assert copies == (rows > MOST_SLICED)
    assert copies or temporaries(looked_up) < 1e6


def test_an_unknown_chip_is_named():
    with pytest.raises(ValueError, match="'v0' is not one of v5e, v5p, v6e"):
        absent_tpu.chip("v0")


def test_programs_for_a_chip_that_is_not_here_stay_out_of_the_cache_on_disk(tmp_path, recwarn):
    """JAX could write them there, but not read them: the next process would be told so in a warning, and compile."""
    places = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0}
    before = {name: jax.config.values[name] for name in places}
    try:
        for name, value in places.items():
            jax.config.update(name, value)
        for _ in range(2):
            compile_for("v5e", lambda x: x + 1, shape("float32", 8, 128))
        assert not list(tmp_path.iterdir())
        jax.block_until_ready(jax.jit(lambda x: x + 1)(np.ones((8, 128))))
        assert list(tmp_path.iterdir()), "the cache has to work again afterwards"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert not recwarn.list
