"""Measure the time on the host of one call, without the model's computation.

    git archive --prefix=older/ COMMIT | tar x -C /tmp
    python -m benchmarks.host_time --older /tmp/older

`host_ms` is the wall-clock time of a call from checking the prompt to returning the `Generation`, without compiled
programs. `dispatch_ms` is the time until JAX has started the compiled programs, with hundreds of arguments and results.
The host then waits for the device, which is in neither. The programs take and return the same arrays as those of the
model, on the same devices, but compute nothing: prefill returns empty caches, and a decode step only counts. On a CPU
they run while they are dispatched, so `dispatch_ms` contains the time to fill the caches with zeros. The model has no
tokenizer. Every call samples `NEW` tokens, which runs the prefill program and the decode program once each.

Each version has its own process.
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NEW = 8
"""Tokens that a call samples."""

POLICY, BUDGET = "snapkv", 64
"""A policy whose caches are small for any prompt, so that making them takes no time."""

LAYERS = 2, 32
TOKENS = 1_000, 100_000
DEVICES = 1, 2
KINDS = "list", "array"

CASE = "call", "ids", "tokens", "layers", "devices"
"""Fields that identify a row of one version."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--older", type=Path, help="folder with an older version's source tree, measured first")
    parser.add_argument("--calls", type=int, default=20, help="calls of each case; the result is their median")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/host-time-cpu.json"))
    args = parser.parse_args()
    from benchmarks import report

    trees = {} if args.older is None else {"older": args.older.resolve()}
    trees["newer"] = Path(__file__).resolve().parents[1]
    rows = [
        {"version": version, **row}
        for version, tree in trees.items()
        for devices in DEVICES
        for row in measured(tree, devices, args.calls)
    ]
    report.write(args.out, report.header(calls=args.calls, policy=f"{POLICY}:{BUDGET}", new_tokens=NEW), rows)
    print(table(rows))


def measured(tree: Path, devices: int, calls: int) -> list[dict[str, Any]]:
    """Rows of one version on a number of simulated devices, measured in a process of its own."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-P", __file__, json.dumps({"devices": devices, "calls": calls})],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path, "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"},
        cwd=tree,
    )
    return json.loads(done.stdout.splitlines()[-1])


def worker(devices: int, calls: int) -> list[dict[str, Any]]:
    """Measure all cases on a number of devices."""
    import jax
    import numpy as np

    import kvjax
    from kvjax.config import ModelConfig, RopeConfig
    from kvjax.models import init
    from kvjax.policies import get_policy
    from kvjax.runtime import decoding

    # Programs that compute nothing.
    for program, function in ((decoding.prefill, _prefill), (decoding.decode, _decode)):
        program._function = function
    policy = get_policy(POLICY, budget=BUDGET)
    rows: list[dict[str, Any]] = []
    for layers in LAYERS:
        config = ModelConfig.uniform("llama", 1000, 16, 16, layers, 2, 2, 8, 2**18, RopeConfig(theta=1e4, dim=8))
        params = init(config, jax.random.key(0))
        if devices > 1:
            from kvjax.runtime.mesh import on_mesh

            params, _ = on_mesh(params, f"model={devices}", policy)
        for tokens in TOKENS:
            ids = np.random.default_rng(0).integers(0, config.vocab_size, tokens)
            prompts = dict(zip(KINDS, (ids.tolist(), ids), strict=True))
            server = kvjax.aot_compile(params, policy, prompt_len=tokens, max_new_tokens=NEW)

            def plain(prompt: Any, params: Any = params) -> Any:
                return kvjax.generate(params, prompt, policy, max_new_tokens=NEW)

            def compiled(prompt: Any, params: Any = params, server: Any = server) -> Any:
                return server.generate(params, prompt)

            for name, call in (("generate", plain), ("compiled generator", compiled)):
                for kind in KINDS:
                    times = milliseconds(functools.partial(call, prompts[kind]), calls)
                    case = {"call": name, "ids": kind, "tokens": tokens, "layers": layers, "devices": devices}
                    rows.append(case | times)
    return rows


def milliseconds(call: Callable[[], Any], calls: int) -> dict[str, float]:
    """Medians of a call's time on the host and in JAX's dispatch, after three calls that are not counted."""
    for _ in range(3):
        call()
    found: list[tuple[float, float]] = []
    for _ in range(calls):
        with programs() as seconds:
            start = time.perf_counter()
            call()
            wall = time.perf_counter() - start
        found.append((wall - seconds["dispatch"] - seconds["device"], seconds["dispatch"]))
    host, dispatch = (round(1e3 * statistics.median(each), 3) for each in zip(*found, strict=True))
    return {"host_ms": host, "dispatch_ms": dispatch}


@contextlib.contextmanager
def programs() -> Iterator[dict[str, float]]:
    """Seconds in which JAX dispatches programs, and in which the host then waits for them, within the `with` block."""
    import jax

    seconds, run = {"dispatch": 0.0, "device": 0.0}, jax.stages.Compiled.__call__

    def timed(self: Any, *args: Any) -> Any:
        start = time.perf_counter()
        results = run(self, *args)
        dispatched = time.perf_counter()
        jax.block_until_ready(results)
        seconds["dispatch"] += dispatched - start
        seconds["device"] += time.perf_counter() - dispatched
        return results

    jax.stages.Compiled.__call__ = timed
    try:
        yield seconds
    finally:
        jax.stages.Compiled.__call__ = run


def _prefill(
    policy: Any,
    specs: Any,
    params: Any,
    tokens: Any,
    lengths: Any,
    total: Any,
    seed: Any,
    sampler: Any,
    ends: Any,
) -> Any:
    """As `kvjax.runtime.decoding.prefill`, without the model."""
    import jax.numpy as jnp

    from kvjax.runtime import decoding

    zeros = jnp.zeros(lengths.shape, jnp.int32)
    caches = decoding.empty_caches(policy, specs, total)
    state = decoding.Decoding(caches, zeros, lengths, jnp.zeros((), jnp.int32), zeros > 0, seed)
    return state, jnp.zeros(lengths.shape, jnp.float32) + _nothing((params, tokens, ends))


def _decode(policy: Any, specs: Any, params: Any, state: Any, count: Any, sampler: Any, ends: Any) -> Any:
    """As `kvjax.runtime.decoding.decode`, without the model."""
    import jax.numpy as jnp

    from kvjax.runtime import decoding

    state = state.replace(steps=state.steps + count, pos=state.pos + count)
    shape = specs[0].whole.batch, decoding.CHUNK
    return state, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32) + _nothing((params, ends))


def _nothing(arrays: Any) -> Any:
    """Zero, from the first number of every array, so that all remain arguments of the program."""
    import jax
    import jax.numpy as jnp

    return jnp.sum(jnp.stack([x.reshape(-1)[0].astype(jnp.float32) for x in jax.tree.leaves(arrays)])) * 0


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of a call, older and newer."""
    from benchmarks import report

    older = {tuple(row[name] for name in CASE): row for row in rows if row["version"] == "older"}
    lines = []
    for row in rows:
        if row["version"] == "newer":
            before = older.get(tuple(row[name] for name in CASE))
            figures = [
                "" if each is None else f"{each[name]:.2f}"
                for name in ("host_ms", "dispatch_ms")
                for each in (before, row)
            ]
            lines.append([*(str(row[name]) for name in CASE), *figures])
    return report.table([*CASE, "host, older", "host, newer", "dispatch, older", "dispatch, newer"], lines, "llr")


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        print(json.dumps(worker(**json.loads(sys.argv[1]))))
    else:
        main()
