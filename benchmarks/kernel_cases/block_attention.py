"""Benchmark cases of `block_attention`, attention of a block of tokens over cache and block (chunked prefill).

Also of `partial_block_attention`, its form for devices that each have a part of the slots.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import Run, Stripes, block_attention, partial_block_attention
from kvjax.pallas_kernels.hopper import block_attention as hopper

from .case import Case, relative_error

SHAPES = (
    (1, 4096, 4096, 32, 8, 128, False),
    (1, 4096, 16384, 32, 8, 128, False),
    (1, 4096, 16384, 32, 8, 128, True),
    (3, 700, 1000, 8, 2, 64, True),
    (2, 64, 2048, 32, 8, 128, False),
    (1, 2048, 8192, 16, 4, 256, True),
)
"""Sequences, tokens of the block, slots before it, query heads, KV heads, head dim, whether slots have weights."""

PARTS = ((1, 4096, 16384, 32, 8, 128, True, 4, 1), (2, 300, 40, 8, 2, 64, False, 8, 7))
"""The same, then the number of devices that share the slots, and the index of the one that computes.

In the last one, the block's first tokens see none of this device's slots.
"""

STRIPE = 16
"""Adjacent slots that are on the same device, if slots are sharded."""

TUNED = ((64, 128, 2), (64, 64, 2), (64, 64, 3), (64, 64, 5), (128, 64, 2))
"""Queries per warpgroup, slots per tile, and tiles in flight."""

SAMPLED = 40
"""Number of queries compared with float64."""


def cases() -> Iterator[Case]:
    """Normal queries, keys and values.

    The first half of the heads has free slots before its tokens. Later sequences end before the block does.
    """
    for rows, tokens, slots, heads, kv_heads, dim, weighted in SHAPES:
        attend = partial(_attend, scale=dim**-0.5)
        kept = slots - np.asarray(_free(rows, slots, kv_heads))
        pairs = float(np.sum(kept)) / kv_heads * tokens + rows * tokens * (tokens + 1) / 2
        yield Case(
            operation="block_attention",
            shape=f"B{rows} S{tokens} C{slots} N{heads} K{kv_heads} H{dim}" + ", weights" * weighted,
            dtype="bfloat16",
            inputs=partial(_inputs, rows, tokens, slots, heads, kv_heads, dim, weighted),
            variants={"xla": partial(attend, implementation="xla"), "auto": attend, **_sized(dim)},
            error=_error,
            tolerance=1e-2,
            bytes=4 * rows * (tokens * heads + (slots + tokens) * kv_heads) * dim,
            flops=int(4 * pairs * heads * dim),
        )
    for rows, tokens, slots, heads, kv_heads, dim, weighted, devices, mine in PARTS:
        attend = partial(_attend_part, scale=dim**-0.5, devices=devices, mine=mine)
        slots_each = (slots + tokens) // devices
        yield Case(
            operation="partial_block_attention",
            shape=f"B{rows} S{tokens} C{slots} N{heads} K{kv_heads} H{dim}, 1 of {devices} parts"
            + ", weights" * weighted,
            dtype="bfloat16",
            inputs=partial(_part_inputs, rows, tokens, slots, heads, kv_heads, dim, weighted, devices, mine),
            variants={"xla": partial(attend, implementation="xla"), "auto": attend},
            error=_part_error,
            tolerance=1e-2,
            bytes=rows * tokens * heads * (4 * dim + 4) + 4 * rows * slots_each * kv_heads * dim,
            flops=int(4 * rows * tokens * (slots + tokens / 2) / devices * heads * dim),
        )


def _free(rows: int, slots: int, kv_heads: int) -> np.ndarray:
    """Number of free slots of each head, which are before those with tokens."""
    free = np.zeros((rows, kv_heads), np.int32)
    free[:, : kv_heads // 2] = slots // 10 + np.arange(kv_heads // 2, dtype=np.int32) * 3
    return free


def _inputs(
    rows: int, tokens: int, slots: int, heads: int, kv_heads: int, dim: int, weighted: bool, seed: int
) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 4)
    q = jax.random.normal(keys[0], (rows, tokens, heads, dim), "bfloat16")
    k, v = (jax.random.normal(key, (rows, kv_heads, slots + tokens, dim), "bfloat16") for key in keys[1:3])
    free, count = jnp.asarray(_free(rows, slots, kv_heads)), tokens - jnp.arange(rows, dtype=jnp.int32) * (tokens // 5)
    place = jnp.arange(slots + tokens, dtype=jnp.int32)
    live = (place >= free[..., None]) & (place < slots + count[:, None, None])
    pos = jnp.where(live, place, -1)
    # Free slots contain NaN, which must not reach the results.
    k, v = (jnp.where(live[..., None], x, jnp.asarray(jnp.nan, x.dtype)) for x in (k, v))
    query = jnp.arange(tokens, dtype=jnp.int32)
    q_pos = jnp.where(query < count[:, None], slots + query, -1)
    inputs = q, k, v, q_pos, pos, free, jnp.full_like(free, slots)
    if not weighted:
        return inputs
    weight = jax.random.randint(keys[3], pos.shape, 1, 1000).astype(jnp.float32)
    return *inputs, jnp.where(place < slots, weight, 1.0)


def _attend(
    q: Any,
    k: Any,
    v: Any,
    q_pos: Any,
    pos: Any,
    first: Any,
    own: Any,
    weight: Any = None,
    *,
    scale: float,
    implementation: Any = "auto",
) -> Any:
    run = Run(first, own)
    return block_attention(q, k, v, q_pos, pos, weight, scale=scale, run=run, implementation=implementation)


def _part_inputs(*shape: Any) -> tuple[jax.Array, ...]:
    *whole, devices, mine, seed = shape
    q, k, v, q_pos, pos, *others = cast(Any, _inputs)(*whole, seed)
    *run, weight = others if len(others) == 3 else (*others, jnp.ones(pos.shape))

    def part(x: jax.Array, fill: float) -> jax.Array:
        padding = [(0, 0), (0, 0), (0, -x.shape[2] % (STRIPE * devices)), *[(0, 0)] * (x.ndim - 3)]
        x = jnp.pad(x, padding, constant_values=fill)
        x = x.reshape(*x.shape[:2], -1, devices, STRIPE, *x.shape[3:])[:, :, :, mine]
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    return q, part(k, jnp.nan), part(v, jnp.nan), q_pos, part(pos, -1), *run, part(weight, 0.0)


def _attend_part(
    q: Any,
    k: Any,
    v: Any,
    q_pos: Any,
    pos: Any,
    first: Any,
    own: Any,
    weight: Any,
    *,
    scale: float,
    devices: int,
    mine: int,
    implementation: Any = "auto",
) -> Any:
    stripes = Stripes(STRIPE, devices, jnp.asarray(mine, jnp.int32))
    options = {"scale": scale, "run": Run(first, own), "stripes": stripes, "implementation": implementation}
    return partial_block_attention(q, k, v, q_pos, pos, weight, **options)


def _part_error(inputs: tuple[Any, ...], found: Any) -> float:
    """The larger of two relative errors: of the outputs and of the sums of exponentials."""
    out, sums = (np.asarray(x, np.float64) for x in found)
    q, k, _, q_pos, pos, _, _, weight = (np.asarray(x) for x in inputs)
    group, scale = q.shape[2] // k.shape[1], q.shape[3] ** -0.5
    expected = np.full(sums.shape, -np.inf)
    asked = np.random.default_rng(1).integers(0, q.shape[1], SAMPLED)
    for row, at, head in np.ndindex(q.shape[0], SAMPLED, q.shape[2]):
        at, mine = asked[at], (row, head // group)
        seen = (pos[mine] >= 0) & (pos[mine] <= q_pos[row, at])
        logits = k[mine][seen].astype(np.float64) @ q[row, at, head].astype(np.float64) * scale
        logits += np.log(weight[mine][seen])
        expected[row, at, head] = np.logaddexp.reduce(logits, initial=-np.inf)
    expected, sums = (x[:, asked] for x in (expected, sums))
    nothing = np.isneginf(expected)
    if (np.isneginf(sums) != nothing).any():
        return float("inf")
    off = np.abs(np.expm1(np.where(nothing, 0.0, sums) - np.where(nothing, 0.0, expected))).max()
    return max(float(off), _error(inputs, out))


def _sized(dim: int) -> dict[str, Any]:
    """Variants of the kernel for Hopper GPUs, one per block sizes that fit."""
    scale = dim**-0.5

    def variant(sizes: dict[str, int]) -> Any:
        def attend(q: Any, k: Any, v: Any, q_pos: Any, pos: Any, first: Any, own: Any, weight: Any = None) -> Any:
            run = Run(first, own)
            return hopper.block_attention(q, k, v, q_pos, pos, weight, run=run, scale=scale, sizes=sizes)

        return attend

    names = "rows", "slots", "stages"
    fit = [(rows, slots, stages) for rows, slots, stages in TUNED if dim * (rows + slots * stages) <= 48 * 1024]
    sizes: list[dict[str, int]] = [dict(zip(names, each, strict=True)) for each in fit]
    return {"gpu " + " ".join(f"{name}={size}" for name, size in each.items()): variant(each) for each in sizes}


def _error(inputs: tuple[Any, ...], out: Any) -> float:
    """Relative error of the first, the last and some random queries, each in a random head."""
    q, k, v, q_pos, pos, _, _, *weights = (np.asarray(x) for x in inputs)
    rows, tokens, heads, dim = q.shape
    random, group = np.random.default_rng(0), heads // k.shape[1]
    got, expected = [], []
    for at in (0, tokens - 1, *random.integers(0, tokens, SAMPLED)):
        row, head = int(random.integers(rows)), int(random.integers(heads))
        mine = row, head // group
        seen = (pos[mine] >= 0) & (pos[mine] <= q_pos[row, at])
        got.append(np.asarray(out[row, at, head], np.float64))
        if not seen.any():
            expected.append(np.zeros(dim))
            continue
        keys, values = (x[mine][seen].astype(np.float64) for x in (k, v))
        logits = keys @ q[row, at, head].astype(np.float64) * dim**-0.5
        logits += np.log(weights[0][mine][seen]) if weights else 0.0
        share = np.exp(logits - logits.max())
        expected.append(share / share.sum() @ values)
    return relative_error(np.stack(got), np.stack(expected))
