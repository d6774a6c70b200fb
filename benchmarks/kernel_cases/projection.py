"""Benchmark cases of `projection` and `gated_projection`, the matmuls of a decode step (every model).

With the norms, gates and residuals around them, at Llama-3.1-8B's shapes. At batch 1, a step spends most of its time in
them. In bfloat16 also at the shapes of the attention of Qwen3-30B-A3B and gpt-oss-20b.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.params import quantized_shape
from kvjax.pallas_kernels import Matrix, Norm, gated_projection, is_quantized, projection
from kvjax.pallas_kernels.projection import pallas_triton
from kvjax.pallas_kernels.projection.quantized import nbytes_of

from .case import Case, relative_error

LAYERS = (
    ("q, k and v", (4096, 1024, 1024), 4096),
    ("attention's output", (4096,), 4096),
    ("gate and up", (14336, 14336), 4096),
    ("down", (4096,), 14336),
    ("vocabulary head", (128256,), 4096),
)
"""Name, outputs of each matrix, inputs."""

SMALL_LAYERS = ("q, k and v", (4096, 512, 512), 2048), ("attention's output", (2048,), 4096)
"""As `LAYERS`, of Qwen3-30B-A3B."""

UNEVEN_LAYERS = ("q, k and v", (4096, 512, 512), 2880), ("attention's output", (2880,), 4096)
"""As `LAYERS`, of gpt-oss-20b."""

KINDS = {"bfloat16": "float", "int8": "int8", "int4": "int4"}
"""Type of the weights, and its name in the rules of block sizes."""


def cases() -> Iterator[Case]:
    """Normal weights [outputs, inputs]. Output projections add a residual, the others norm their inputs."""
    for (name, outputs, depth), rows, kind in [
        *product(LAYERS, (1, 8), KINDS),
        *product(SMALL_LAYERS, (1, 8), ["bfloat16"]),
        *product(UNEVEN_LAYERS, (1,), ["bfloat16"]),
    ]:
        gated = name == "gate and up"
        way = partial(_way, gated, name in ("attention's output", "down"))
        sizes = {f"gpu {' '.join(map(str, sizes.values()))}": sizes for sizes in _candidates(rows, depth, kind)}
        case = {"rows": rows, "inputs": depth, "outputs": sum(outputs), "gated": gated}
        yield Case(
            operation="gated_projection" if gated else "projection",
            shape=f"{name}: {rows} x {depth} to {' + '.join(map(str, outputs))}",
            dtype=kind,
            inputs=partial(_inputs, rows, outputs, depth, kind),
            variants={
                "xla": partial(way, implementation="xla"),
                "auto": way,
                **{variant: partial(way, sizes=each) for variant, each in sizes.items()},
            },
            sizes=sizes,
            tuned_by=("projection", case | {"kind": KINDS[kind], "group": 32 if kind == "int4" else 1}),
            error=partial(_error, way.args),
            tolerance=1e-2,
            bytes=sum(_weight_bytes(kind, count, depth) for count in outputs) + 2 * rows * (depth + sum(outputs)),
            flops=2 * rows * sum(outputs) * depth,
        )


def _candidates(rows: int, depth: int, kind: str) -> Iterator[dict[str, int]]:
    """Block sizes to try: with the matrix units, and for one row also without."""
    # For 4-bit weights, the number of groups determines how many inputs are read at a time.
    at_a_time = (128,) if kind == "int4" else (128, 256, 512)
    with_units = [(*sizes, 1) for sizes in product((16, 32, 64), at_a_time, (1, 2, 4), (3, 4, 5))]
    if kind == "bfloat16":
        without = product((4, 8), (512, 1024, 2048), (4,), (1,), (0,))
    else:
        without = product((8, 16, 32), (64, 128), (2, 4, 8), (1,), (0,))
    for outputs, inputs, warps, stages, units in [*with_units, *(without if rows == 1 else ())]:
        if (depth % inputs == 0 or depth % 128) and outputs * inputs <= 16384 and (not units or outputs >= 16 * warps):
            yield {"outputs": outputs, "inputs": inputs, "warps": warps, "stages": stages, "units": units}


def _way(
    gated: bool,
    added: bool,
    x: jax.Array,
    gain: jax.Array,
    residual: jax.Array,
    *weights: Matrix,
    sizes: dict[str, int] | None = None,
    implementation: Any = "auto",
) -> list[jax.Array]:
    norm = None if added else Norm(gain, 1e-5)
    rest = {"norm": norm, "residual": residual if added else None}
    if sizes is not None:
        return pallas_triton.projection(x, weights, **rest, dtype=x.dtype, gated=gated, sizes=sizes)
    if gated:
        return [gated_projection(x, *weights, norm=norm, implementation=implementation)]
    return projection(x, *weights, **rest, implementation=implementation)


def _inputs(rows: int, outputs: tuple[int, ...], depth: int, kind: str, seed: int) -> tuple[Any, ...]:
    keys = iter(jax.random.split(jax.random.key(seed), 3 + len(outputs)))
    x = jax.random.normal(next(keys), (rows, depth), jnp.bfloat16)
    gain = jax.random.normal(next(keys), (depth,), jnp.bfloat16)
    residual = jax.random.normal(next(keys), (rows, outputs[0]), jnp.bfloat16)
    return (
        x,
        gain,
        residual,
        *(_matrix(kind, next(keys), out, depth) for out in outputs),
    )


def _matrix(kind: str, key: jax.Array, outputs: int, depth: int) -> Matrix:
    """Random weights with a standard deviation of about 1 / √inputs."""
    if kind == "bfloat16":
        return jax.random.normal(key, (outputs, depth), jnp.bfloat16) * depth**-0.5
    held = quantized_shape(jax.ShapeDtypeStruct((outputs, depth), jnp.float32), kind)
    levels = jax.random.randint(key, held.levels.shape, -127 if kind == "int8" else 0, 128 if kind == "int8" else 256)
    step = depth**-0.5 / (74 if kind == "int8" else 4.6)
    fields: dict[str, Any] = {
        "levels": levels.astype(held.levels.dtype),
        "scale": jnp.full(held.scale.shape, step, held.scale.dtype),
    }
    if kind == "int4":
        fields["minimum"] = -7.5 * fields["scale"]
    return dataclasses.replace(held, **fields)


def _weight_bytes(kind: str, outputs: int, depth: int) -> int:
    shape = jax.ShapeDtypeStruct((outputs, depth), jnp.bfloat16)
    return nbytes_of(shape if kind == "bfloat16" else quantized_shape(shape, kind))


def _error(way: tuple[bool, bool], inputs: tuple[Any, ...], out: list[Any]) -> float:
    """Largest relative error of the first 512 outputs of each matrix."""
    gated, added = way
    x, gain, residual = (np.asarray(given, np.float64) for given in inputs[:3])
    weights = [np.asarray(_first(w), np.float64) for w in inputs[3:]]
    if not added:
        x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * gain
    expected = [x @ w.T for w in weights]
    if gated:
        gate, up = expected
        expected = [gate / (1 + np.exp(-gate)) * up]
    if added:
        expected = [residual[:, :512] + expected[0]]
    return max(relative_error(np.asarray(o, np.float64)[:, :512], e) for o, e in zip(out, expected, strict=True))


def _first(w: Matrix, count: int = 512) -> jax.Array:
    """Return the weights of the first outputs as floats."""
    part = jax.tree.map(lambda array: array[:count], w)
    return part.dequantized(jnp.float32) if is_quantized(part) else part
