"""Benchmark cases of `fused_decode_block`, all matmuls from one layer's attention to the next (every model, on Hopper).

Two layers of Llama-3.1-8B's shape. The variant "kernels" has one kernel per matmul, and "xla" has none.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import BlockWeights, GroupedMatrix, Int8Matrix, Norm, fused_decode_block, is_quantized
from kvjax.pallas_kernels.hopper.fused_decode_block import pallas_mosaic_gpu, plan, reference

from .case import Case, relative_error

WIDTH, WIDE, KEYS = 4096, 14336, 1024
MATRICES = (
    (WIDTH, WIDTH), (WIDE, WIDTH), (WIDE, WIDTH), (WIDTH, WIDE), (WIDTH, WIDTH), (KEYS, WIDTH), (KEYS, WIDTH),
)  # fmt: skip
"""Outputs and inputs of o, gate, up, down, q, k and v."""

GROUP = 32
"""Inputs per scale and minimum of 4-bit weights."""

LAYERS = 2
"""Number of layers, each with its own weights."""

SIZES = {
    "bfloat16": ((256, 4), (128, 5), (128, 8), (128, 10)),
    "int8": ((256, 6), (256, 8), (256, 10), (128, 16)),
    "int4": ((256, 4), (256, 5), (256, 7)),
}
"""Sizes of chunks, and numbers of slots, to time with `--tune`, by type of the weights."""


def cases() -> Iterator[Case]:
    """Normal weights and inputs."""
    weights = sum(outputs * inputs for outputs, inputs in MATRICES)
    scales = sum(outputs for outputs, _ in MATRICES)
    for dtype, size in (
        ("bfloat16", 2 * weights), ("int8", weights + 4 * scales), ("int4", weights // 2 + 2 * 2 * weights // GROUP)
    ):  # fmt: skip
        for rows in (1, 2, 4, 8):
            yield Case(
                operation="fused_decode_block",
                shape=f"{rows} x {WIDTH}, MLP of {WIDE}, {WIDTH} + {KEYS} + {KEYS} heads, {LAYERS} layers",
                dtype=dtype,
                inputs=partial(_inputs, rows, dtype),
                variants={
                    "xla": partial(_way, implementation="xla"),
                    "kernels": partial(_way, implementation=None),
                    "auto": _way,
                    **{f"gpu chunk={c} slots={n}": partial(_way, sizes=(c, n)) for c, n in _sizes(rows, dtype)},
                },
                error=_error,
                tolerance=1e-2,
                bytes=LAYERS * size,
                flops=2 * LAYERS * rows * weights,
            )


def _sizes(rows: int, dtype: str) -> tuple[tuple[int, int], ...]:
    return () if (rows, dtype) == (8, "int4") else SIZES[dtype]  # the kernel does not support this


def _weights(gains: list[Any], matrices: list[Any]) -> BlockWeights:
    o, gate, up, down, q, k, v = matrices
    return BlockWeights(o, Norm(gains[0], 1e-5), gate, up, down, Norm(gains[1], 1e-5), q, k, v)


def _way(
    attended: jax.Array, x: jax.Array, *layers: Any, implementation: Any = "auto", sizes: tuple[int, int] | None = None
) -> list[jax.Array]:
    out = []
    for layer in layers:
        weights = _weights(*layer)
        if sizes is not None:
            bits = pallas_mosaic_gpu.BITS["floats" if isinstance(weights.o, jax.Array) else weights.o.kind]
            found = plan.plan(x.shape[0], WIDTH, WIDTH, WIDE, (WIDTH, KEYS), bits)
            assert isinstance(found, plan.Plan)
            held = found.inputs * found.chunk // sizes[0]
            found = found._replace(chunk=sizes[0], slots=sizes[1], inputs=held)
            out = pallas_mosaic_gpu.fused_decode_block(attended, x, weights, sizes=found)
        elif implementation is None:
            out = reference.multiply_apart(attended, x, weights)
        else:
            out = fused_decode_block(attended, x, weights, implementation=implementation)
        x, attended, *_ = out
    return list(out)


def _inputs(rows: int, dtype: str, seed: int) -> tuple[Any, ...]:
    keys = iter(jax.random.split(jax.random.key(seed), 2 + LAYERS * (2 + len(MATRICES))))
    attended, x = (jax.random.normal(next(keys), (rows, WIDTH), jnp.bfloat16) for _ in range(2))
    layers = [
        (
            [1 + jax.random.normal(next(keys), (WIDTH,), jnp.bfloat16) / 8 for _ in range(2)],
            [
                QUANTIZED[dtype](next(keys), out, depth)
                if dtype in QUANTIZED
                else jax.random.normal(next(keys), (out, depth), jnp.bfloat16) * jnp.asarray(depth**-0.5, jnp.bfloat16)
                for out, depth in MATRICES
            ],
        )
        for _ in range(LAYERS)
    ]
    return attended, x, *layers


def _int8(key: Any, outputs: int, inputs: int) -> Int8Matrix:
    """Random codes, and a random scale per output."""
    of_levels, of_scale = jax.random.split(key)
    levels = jax.random.randint(of_levels, (outputs, inputs), -127, 128, jnp.int8)
    size = (inputs * 127 * 128 / 3) ** -0.5  # the weights then have the variance of the float ones
    return Int8Matrix(levels, size * jax.random.uniform(of_scale, (outputs,), jnp.float32, 0.5, 1.5))


def _int4(key: Any, outputs: int, inputs: int) -> GroupedMatrix:
    """Random codes, and a random scale and minimum per group."""
    of_levels, of_scale, of_minimum = jax.random.split(key, 3)
    groups = inputs // GROUP
    levels = jax.random.bits(of_levels, (outputs, GROUP // 2, groups), jnp.uint8)
    size = (inputs * 16 * 17 / 12) ** -0.5
    scale = size * jax.random.uniform(of_scale, (outputs, groups), jnp.float32, 0.5, 1.5)
    minimum = -scale * jax.random.uniform(of_minimum, (outputs, groups), jnp.float32, 5, 10)
    return GroupedMatrix(levels, scale.astype(jnp.float16), minimum.astype(jnp.float16))


QUANTIZED: dict[str, Callable[[Any, int, int], Any]] = {"int8": _int8, "int4": _int4}


def _exact(a: Any) -> np.ndarray:
    if not is_quantized(a):
        return np.asarray(a, np.float64)
    if isinstance(a, GroupedMatrix):
        both = np.concatenate([a.levels & 15, a.levels >> 4], axis=1)
        scale, minimum = (np.asarray(each, np.float64)[:, None] for each in (a.scale, a.minimum))
        return (both * scale + minimum).swapaxes(1, 2).reshape(a.shape)
    return np.asarray(a.levels, np.float64) * np.asarray(a.scale, np.float64)[:, None]


def _error(inputs: tuple[Any, ...], out: list[Any]) -> float:
    """Largest relative error of the last layer's residual stream, q, k and v."""
    attended, x, *layers = jax.tree.map(_exact, inputs, is_leaf=is_quantized)

    def normed(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * gain

    heads = []
    for gains, (o, gate, up, down, *qkv) in layers:
        x = x + attended @ o.T
        h = normed(x, gains[0])
        g = h @ gate.T
        x = x + (g / (1 + np.exp(-g)) * (h @ up.T)) @ down.T
        heads = [normed(x, gains[1]) @ w.T for w in qkv]
        attended = heads[0]
    return max(relative_error(got, want) for got, want in zip(out, [x, *heads], strict=True))
