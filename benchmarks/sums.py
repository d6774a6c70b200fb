"""Small sums over this host's devices, one after the other as in a decoding step: XLA's own collective and the kernel, checked and timed.

    python -m benchmarks.sums --out benchmarks/results/sums-two-h200.json

Each case runs in a process of its own, with a time limit: devices that wait for each other in vain would wait for ever. The loop runs by
itself on the devices where XLA can make it a CUDA graph (`graph`), else the host starts each kernel.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import report
from kvjax.pallas_kernels import device_gather, device_sum
from kvjax.runtime.program import CUDA_GRAPH_OPTIONS

SHAPES = (1, 4096), (1, 8192), (8, 8192)
MODEL = ("model",)

LOGITS = 1, 64128
"""Those of half of Llama's vocabulary, which are put side by side."""

CASES = (("device_sum", SHAPES), ("device_sum, residual", SHAPES), ("device_gather", (LOGITS,)))
"""Operations, and shapes of each device's numbers in float32; the residual is in bfloat16."""


def main() -> None:
    """Run every case, and write what was seen after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10_000, help="sums of a measurement")
    parser.add_argument("--seconds", type=float, default=60, help="the most that a case may take")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sums.json"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.times, **json.loads(args.one))))
        return
    cases = [
        {"operation": operation, "shape": shape, "implementation": implementation, "graph": graph}
        for operation, shapes in CASES
        for shape in shapes
        for implementation, graph in (("gpu", True), ("gpu", False), ("xla", True))
    ]
    rows: list[dict[str, Any]] = []
    header: dict[str, Any] = {}
    env = {**os.environ, "JAX_TRACEBACK_FILTERING": "off"}
    for case in cases:
        command = [sys.executable, "-m", "benchmarks.sums", "--times", str(args.times), "--one", json.dumps(case)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=args.seconds, env=env)
            found: dict[str, Any] = {"failed": (done.stderr.strip().splitlines() or ["no error was told"])[-1][:300]}
            if not done.returncode:
                found = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            found = {"failed": f"not done after {args.seconds} s"}
        rows.append(case | {key: value for key, value in found.items() if key != "header"})
        print(rows[-1], flush=True)
        header = found.get("header", header)
        report.write(args.out, header, rows)


def measure(times: int, operation: str, shape: list[int], implementation: Any, graph: bool) -> dict[str, Any]:
    """Microseconds of each, and whether the first results are right."""
    devices = jax.local_device_count()
    mesh = Mesh(np.array(jax.local_devices()), MODEL)
    gathers, added = operation == "device_gather", operation.endswith("residual")
    apply = partial(device_gather if gathers else device_sum, axes=MODEL, mesh=mesh, implementation=implementation)
    placed = NamedSharding(mesh, PartitionSpec(MODEL))

    def joined(x: jax.Array) -> jax.Array:
        residual = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape).astype(jnp.bfloat16)
        return apply(x, residual=residual).astype(jnp.float32) if added else apply(x)

    def once(x: jax.Array) -> jax.Array:
        return joined(x[0])[None]

    def step(_: Any, x: jax.Array) -> jax.Array:
        found = joined(x)
        return jnp.tanh(jnp.max(found, axis=0) if gathers else found) + x * 0.5

    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, step, x[0])[None]

    def compiled(function: Any) -> Any:
        over = jax.shard_map(
            function, mesh=mesh, in_specs=PartitionSpec(MODEL), out_specs=PartitionSpec(MODEL), check_vma=False
        )
        options: Any = CUDA_GRAPH_OPTIONS if graph else {"xla_gpu_enable_command_buffer": ""}
        gpu = jax.devices()[0].platform == "gpu"
        given = jax.ShapeDtypeStruct((devices, *shape), jnp.float32, sharding=placed)
        return jax.jit(over).lower(given).compile(options if gpu else None)

    numbers = np.random.default_rng(0).normal(size=(devices, *shape)).astype(np.float32)
    x = jax.device_put(numbers, placed)
    out = np.asarray(compiled(once)(x))
    expected = numbers if gathers else numbers.sum(axis=0)
    if added:
        residual = np.cos(np.arange(expected.size, dtype=np.float32)).reshape(expected.shape)
        expected = np.asarray(jnp.asarray(residual, jnp.bfloat16) + jnp.asarray(expected, jnp.bfloat16), np.float32)
    error = max(float(np.max(np.abs(part - expected))) for part in out)
    equal = all(np.array_equal(part, out[0]) for part in out)
    run, seconds, last = compiled(loop), [], x
    for _ in range(4):  # the first warms up
        start = time.perf_counter()
        last = jax.block_until_ready(run(x))
        seconds.append(time.perf_counter() - start)
    return {
        "devices": devices,
        "error": error,
        "equal_bits": equal,
        "finite": bool(np.isfinite(np.asarray(last)).all()),
        "checksum": float(np.asarray(last, np.float64).sum()),
        "microseconds": 1e6 * float(np.median(seconds[1:])) / times,
        "header": report.header(times=times),
    }


if __name__ == "__main__":
    main()
