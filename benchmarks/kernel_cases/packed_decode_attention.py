"""Benchmark cases of `packed_decode_attention`, decode attention over quantised keys and values (KIVI, `quantized`).

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases.case import Case, relative_error
from kvjax.cache import packing
from kvjax.cache.packing import Bits, Packed
from kvjax.pallas_kernels.decode_attention import PackedSlots, packed_decode_attention
from kvjax.pallas_kernels.decode_attention import packed_decode_attention_pallas_triton as pallas_triton

SAMPLED = 3
"""Number of heads (sequence × KV head) compared with float64."""

DIM, GROUP, TOKENS = 128, 4, 32
"""Head dim, query heads per KV head, and numbers per scale."""


def cases() -> Iterator[Case]:
    """Llama-3.1-8B's heads in 2 and 4 bits, with the KIVI paper's longer residual, and with ragged lengths."""
    yield _case(1, 8, 16384, 2)
    yield _case(1, 8, 16384, 4)
    yield _case(1, 8, 65536, 2, residual=128)
    yield _case(8, 8, 16384, 4)
    yield _case(32, 8, 8192, 2, ragged=True)


def _case(batch: int, kv_heads: int, size: int, bits: Bits, *, residual: int = 32, ragged: bool = False) -> Case:
    heads, scale = batch * kv_heads, DIM**-0.5

    def inputs(seed: int) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(seed), 6)
        q = jax.random.normal(keys[0], (batch, kv_heads * GROUP, DIM), jnp.bfloat16)
        k, v = (jax.random.normal(key, (batch, kv_heads, size, DIM), jnp.bfloat16) for key in keys[1:3])
        k_recent, v_recent = (
            jax.random.normal(key, (batch, kv_heads, places, DIM), jnp.bfloat16)
            for key, places in zip(keys[3:5], (residual, residual + 1), strict=True)
        )
        filled = jnp.full(heads, size, jnp.int32)
        if ragged:  # evenly spread, so that the mean is a half
            filled = jax.random.permutation(keys[5], jnp.arange(heads, dtype=jnp.int32) * size // (heads - 1))
        filled = filled.reshape(batch, kv_heads)
        k_packed = jnp.maximum(filled - 1, 0) // residual * residual
        packed = packing.pack(k, bits, TOKENS, "slots", k.dtype), packing.pack(v, bits, TOKENS, "channels", v.dtype)
        visible = jnp.arange(size) < filled[..., None]
        return q, PackedSlots(*packed, k_recent, v_recent, k_packed, filled), visible

    def error(given: tuple[Any, ...], out: Any) -> float:
        q, slots, _ = given
        outs, expected = [], []
        for head in np.random.default_rng(0).choice(heads, min(SAMPLED, heads), replace=False):
            b, h = divmod(int(head), kv_heads)
            rows, filled, k_packed = (
                slice(h * GROUP, (h + 1) * GROUP),
                *(int(x[b, h]) for x in (slots.next, slots.k_packed)),
            )
            keys, values = (_numbers(x, b, h, bits)[:filled] for x in (slots.k, slots.v))
            exact = ((keys, slots.k_recent, k_packed), (values, slots.v_recent, max(filled - residual - 1, 0)))
            for numbers, recent, first in exact:
                late = np.arange(first, filled)
                numbers[late] = np.asarray(recent[b, h], np.float64)[late % recent.shape[2]]
            logits = np.asarray(q[b, rows], np.float64) @ keys.T * scale
            share = np.exp(logits - logits.max(axis=-1, keepdims=True, initial=-1e30))
            outs.append(np.asarray(out[b, rows], np.float64))
            expected.append(share @ values / np.maximum(share.sum(axis=-1, keepdims=True), 1e-300))
        return relative_error(np.concatenate(outs), np.concatenate(expected))

    def variant(function: Any, **options: Any) -> Any:
        return lambda *given: function(*given, bits=bits, scale=scale, **options)

    variants = {
        "xla": variant(packed_decode_attention, implementation="xla"),
        "auto": variant(packed_decode_attention),
    }
    for rows, programs, warps, stages in product((16, 32), (256, 512, 1024, 2048), (4, 8), (2, 3)):
        block, splits = rows * 8 // bits, programs // heads
        if 1 <= splits <= size // block:
            sizes = {"block": block, "splits": splits, "warps": warps, "stages": stages}
            name = "gpu " + " ".join(f"{key}={each}" for key, each in sizes.items())
            variants[name] = variant(pallas_triton.packed_decode_attention, sizes=sizes)
    live = heads * size // (2 if ragged else 1)
    # Codes, scales and zeros of keys and values, and one byte that says whether the slot is visible.
    per_slot = 2 * (DIM * bits // 8 + 4 * DIM // TOKENS) + 1
    late = heads * (2 * residual + 1) * DIM * 2
    return Case(
        operation="packed_decode_attention",
        shape=f"B{batch} K{kv_heads} G{GROUP} C{size} H{DIM}, {bits} bits, residual {residual}" + ", ragged" * ragged,
        dtype="bfloat16",
        inputs=inputs,
        variants=variants,
        error=error,
        tolerance=1e-2,
        bytes=live * per_slot + late + 4 * heads * GROUP * DIM,
        flops=4 * live * GROUP * DIM,
    )


def _numbers(x: Packed, b: int, h: int, bits: int) -> np.ndarray:
    """One head's dequantised numbers [C, H], in float64."""
    codes, scale, zero = (np.asarray(y[b, h]) for y in (x.codes, x.scale, x.zero))
    levels = np.stack([codes >> shift & (2**bits - 1) for shift in range(0, 8, bits)], axis=1)
    levels = levels.reshape(-1, codes.shape[1]).astype(np.float64)
    scale, zero = (y.astype(np.float64) for y in (scale, zero))
    if x.along == "channels":
        scale, zero = scale.T, zero.T
    each = levels.shape[0] // scale.shape[0], levels.shape[1] // scale.shape[1]
    scale, zero = (np.repeat(np.repeat(y, each[0], axis=0), each[1], axis=1) for y in (scale, zero))
    return levels * scale + zero
