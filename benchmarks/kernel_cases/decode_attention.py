"""Benchmark cases of `decode_attention`, attention of one query per sequence over a compressed cache (all policies).

For full and ragged caches, many and few sequences; with returned probabilities, and with keys rotated on the way.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases.case import Case, relative_error
from kvjax.pallas_kernels.decode_attention import Attended, Factors, Rotation, decode_attention
from kvjax.pallas_kernels.decode_attention import decode_attention_pallas_triton as pallas_triton

SAMPLED = 3
"""Number of heads (sequence × KV head) compared with float64."""


def cases() -> Iterator[Case]:
    """Large batches, a fifth of 16k, 32k and 64k tokens for one sequence and for eight, groups of six and seven query heads, and 8-bit floats."""
    yield _case(32, 8, 4, 8192, 128)
    yield _case(32, 8, 4, 8192, 128, ragged=True)
    yield _case(32, 8, 4, 8192, 64)
    yield _case(32, 8, 4, 8192, 64, ragged=True)
    yield _case(1, 8, 4, 2048, 128)
    yield _case(1, 8, 4, 3328, 128)
    yield _case(8, 8, 4, 3328, 128)
    yield _case(8, 8, 4, 6656, 128)
    yield _case(8, 8, 4, 13312, 128)
    yield _case(1, 8, 4, 3328, 128, rotated=True)
    yield _case(1, 8, 4, 3328, 128, rotated=True, probs=True)
    yield _case(1, 8, 4, 16384, 128)
    yield _case(1, 8, 4, 65536, 128)
    yield _case(8, 8, 4, 16384, 128)
    yield _case(8, 8, 4, 3328, 128, rotated=True, probs=True)
    yield _case(1, 32, 1, 8192, 128)
    yield _case(64, 8, 4, 2112, 128)
    yield _case(256, 8, 4, 1088, 128)
    yield _case(40, 8, 4, 9216, 128, ragged=True)
    yield _case(64, 2, 6, 1280, 128, ragged=True)
    yield _case(20, 2, 6, 4224, 128)
    yield _case(1, 2, 6, 16384, 128)
    yield _case(1, 4, 7, 16384, 128)
    yield _case(8, 2, 6, 3328, 128, rotated=True, probs=True)
    yield _case(8, 8, 4, 32768, 128, coded=True)
    yield _case(1, 8, 4, 16384, 128, coded=True)
    yield _case(64, 8, 4, 2112, 128, coded=True, ragged=True)


def _case(
    batch: int,
    kv_heads: int,
    group: int,
    slots: int,
    dim: int,
    *,
    ragged: bool = False,
    probs: bool = False,
    rotated: bool = False,
    coded: bool = False,
) -> Case:
    scale = dim**-0.5

    def inputs(seed: int) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(seed), 6)
        q = jax.random.normal(keys[0], (batch, kv_heads * group, dim), jnp.bfloat16)
        k, v = (jax.random.normal(key, (batch, kv_heads, slots, dim), jnp.bfloat16) for key in keys[1:3])
        weight = jax.random.randint(keys[3], (batch, kv_heads, slots), 1, 6).astype(jnp.float32)
        if ragged:  # evenly spread, so that the mean is a half
            heads = batch * kv_heads
            lengths = jax.random.permutation(keys[4], jnp.arange(heads) * slots // (heads - 1))
            weight = jnp.where(jnp.arange(slots) < lengths.reshape(batch, kv_heads, 1), weight, 0.0)
        if coded:
            codes = ((60 * x).astype(jnp.float8_e4m3fn) for x in (k, v))
            return q, *codes, weight, *jax.random.uniform(keys[5], (2, *weight.shape), minval=0.01, maxval=0.03)
        if not rotated:
            return q, k, v, weight
        place = jnp.argsort(jax.random.uniform(keys[5], weight.shape), axis=-1).astype(jnp.int32)
        query = jax.random.randint(keys[4], weight.shape[:2], 0, slots, jnp.int32)
        return q, k, v, weight, place, query, jnp.logspace(0, -4, dim // 2)

    def error(given: tuple[Any, ...], got: Attended) -> float:
        q, k, v, weight, *turn = given
        outs, expected = [], []
        for head in np.random.default_rng(0).choice(batch * kv_heads, min(SAMPLED, batch * kv_heads), replace=False):
            b, h = divmod(int(head), kv_heads)
            rows = slice(h * group, (h + 1) * group)
            q64, k64, v64, w64 = (np.asarray(x, np.float64) for x in (q[b, rows], k[b, h], v[b, h], weight[b, h]))
            if coded:
                k64, v64 = (
                    x * np.asarray(factor[b, h], np.float64)[:, None] for x, factor in ((k64, turn[0]), (v64, turn[1]))
                )
            elif turn:
                q64, k64 = (_turned(x, place[b, h], turn[2]) for x, place in ((q64, turn[1]), (k64, turn[0])))
            with np.errstate(divide="ignore"):
                logits = q64 @ k64.T * scale + np.log(w64)
            share = np.exp(logits - np.maximum(logits.max(axis=-1, keepdims=True), -1e30))
            share /= np.maximum(share.sum(axis=-1, keepdims=True), 1e-300)
            outs.append(np.asarray(got.out[b, rows], np.float64))
            expected.append(share @ v64)
            if got.probs is not None:  # at the outputs' scale
                outs.append(np.asarray(got.probs[b, h], np.float64)[None, :dim] * slots)
                expected.append(share.mean(axis=0)[None, :dim] * slots)
        return relative_error(np.concatenate(outs), np.concatenate(expected))

    def variant(function: Any, **options: Any) -> Any:
        def run(q: Any, k: Any, v: Any, weight: Any, *turn: Any) -> Attended:
            if coded:
                return function(q, k, v, weight, scale=scale, factors=Factors(*turn), **options)
            rotation = Rotation(*turn) if turn else None
            return function(q, k, v, weight, scale=scale, rotation=rotation, probs=probs, **options)

        return run

    variants = {"xla": variant(decode_attention, implementation="xla"), "auto": variant(decode_attention)}
    if not rotated and not probs and not coded:
        variants["cudnn"] = functools.partial(_cudnn, scale=scale)
        variants["dense"] = functools.partial(_dense, scale=scale)
    heads = batch * kv_heads
    programs = 128, 256, 384, 512, 768, 1024, heads, 2 * heads, 4 * heads, 8 * heads
    for block, stages in ((64, 3), (64, 4), (128, 2)):
        for splits in sorted({count // heads for count in programs}):
            if 1 <= splits <= slots // max(block, 512 if heads > 128 else 0):
                sizes = {"block": block, "splits": splits, "warps": 4, "stages": stages}
                name = "gpu " + " ".join(f"{key}={size}" for key, size in sizes.items())
                variants[name] = variant(pallas_triton.decode_attention, sizes=sizes)
    live = batch * kv_heads * slots // (2 if ragged else 1)
    words = (
        f"B{batch} K{kv_heads} G{group} C{slots} H{dim}"
        + ", ragged" * ragged
        + ", rotated" * rotated
        + ", probs" * probs
    )
    number = 1 if coded else 2  # bytes of a channel
    return Case(
        operation="decode_attention",
        shape=words,
        dtype="float8" if coded else "bfloat16",
        inputs=inputs,
        variants=variants,
        error=error,
        tolerance=1e-2,
        bytes=live * (2 * number * dim + 4 + 4 * rotated + 4 * probs + 8 * coded) + 4 * batch * kv_heads * group * dim,
        flops=4 * live * group * dim,
    )


def _dense(q: Any, k: Any, v: Any, weight: Any, *, scale: float) -> Attended:
    """Plain XLA attention with a bias. It reads every slot, and NaN in a free slot reaches the result."""
    bias = jnp.where(weight > 0, jnp.log(jnp.maximum(weight, 1.0)), -1e30)[:, :, None]
    grouped = q.reshape(*k.shape[:2], -1, k.shape[-1])
    logits = jnp.einsum("bkgh,bkch->bkgc", grouped, k, preferred_element_type=jnp.float32) * scale + bias
    share = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgc,bkch->bkgh", share, v, preferred_element_type=jnp.float32)
    return Attended(out.reshape(q.shape).astype(q.dtype), jnp.zeros(q.shape[:2]), None)


def _turned(heads: Any, place: Any, inv_freq: Any) -> Any:
    """Heads rotated to positions, in float64."""
    angle = np.asarray(place, np.float64)[..., None] * np.asarray(inv_freq, np.float64)
    a, b = np.split(heads, 2, axis=-1)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def _cudnn(q: Any, k: Any, v: Any, weight: Any, *, scale: float) -> Attended:
    """cuDNN's attention with KV heads folded into the batch, so that every head can have its own length."""
    batch, kv_heads, slots, dim = k.shape
    fold = batch * kv_heads
    lengths = jnp.max(jnp.where(weight > 0, jnp.arange(1, slots + 1), 0), axis=-1).reshape(fold).astype(jnp.int32)
    bias = jnp.log(jnp.where(weight > 0, weight, 1.0)).astype(q.dtype).reshape(fold, 1, 1, slots)
    out = jax.nn.dot_product_attention(
        q.reshape(fold, 1, -1, dim),
        k.reshape(fold, slots, 1, dim),
        v.reshape(fold, slots, 1, dim),
        bias=bias,
        scale=scale,
        key_value_seq_lengths=lengths,
        query_seq_lengths=jnp.ones((fold,), jnp.int32),
        implementation="cudnn",
    )
    return Attended(out.reshape(q.shape), jnp.zeros(q.shape[:2]), None)
