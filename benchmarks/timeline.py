"""Show when each kernel of a decode step begins and how long it takes, from the GPU's profiler.

    python -m benchmarks.timeline --policies full,catekv:share_adaptive=0.4 --context 16384 --batch 1 --layers 6
    python -m benchmarks.timeline --policies full --mesh model=2 --layers 8
    python -m benchmarks.timeline --policies snapkv:4096,treekv:4096 --block 4096 --layers 4
    python -m benchmarks.timeline --policies full,snapkv:0.2 --prompt --context 16384 --layers 8

With `--block`, the kernels are those of chunked prefill: one block, after blocks that fill the cache. With `--prompt`,
they are those of the prefill of a whole prompt. Both are summed by name, the longest first. Over a mesh, the kernels
are those of the first device.

Use this to see where time goes, not to compare policies. The profiler slows steps down, and serialises kernels that
otherwise overlap. The time per token is measured without the profiler.

A loop that runs as one CUDA graph shows only some of its kernels. With `XLA_FLAGS=--xla_gpu_enable_command_buffer=` in
the environment there is no CUDA graph: all kernels are shown, with the gaps between their launches.
"""

import argparse
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.profiler import ProfileData

from benchmarks import report
from kvjax.bench import states
from kvjax.bench.case import KINDS, Case, read_policy
from kvjax.models import Params
from kvjax.models.sharding import init_on
from kvjax.policies.text import split_policies
from kvjax.runtime.decoding import Decoding
from kvjax.runtime.engine import Engine

STEPS = 48
"""Tokens of a timed call."""

BLOCKS = 12
"""Blocks of a text. Half of them fill the cache, and a quarter is timed."""

LONGEST = 14
"""Number of kernels of a block or a prompt that are shown."""

PREFILLS = 5
"""Timed prefills of a prompt. The result is the median."""

PROFILED = 5
"""Profiled tokens. The result has the kernels of the middle one."""


def main() -> None:
    """Measure one policy after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", default="float", choices=KINDS, help="as for `kvjax bench`")
    parser.add_argument("--policies", default="full", help="as for `kvjax bench`")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--mesh", default="", help="devices to decode over, such as model=2")
    parser.add_argument(
        "--block", type=int, help="block size in tokens for chunked prefill; without it, decode steps are shown"
    )
    parser.add_argument(
        "--prompt", action="store_true", help="show the prefill of a whole prompt instead of decode steps"
    )
    parser.add_argument("--compile-jobs", type=int, default=8)
    parser.add_argument("--out", type=Path, help="result file; by default rows are only printed")
    args = parser.parse_args()
    about = {"shape": args.shape, "layers": args.layers, "dtype": args.dtype, "kind": args.weights, "mesh": args.mesh}
    header = report.header(**about, weights="random")
    cases = []
    for text in split_policies(args.policies):
        name, settings = read_policy(text)
        context = args.context if args.block is None else BLOCKS * args.block
        given = {"dtype": args.dtype, "layers": args.layers, "mesh": args.mesh, "weights": args.weights}
        cases.append(Case(name, settings, context, args.batch, args.shape, **given))
    params = init_on(cases[0].shard, cases[0].config, jax.random.key(0), args.dtype, args.weights, args.weights)
    if args.block is not None:
        rows = reading(cases, params, args)
    elif args.prompt:
        rows = prompts(cases, params, args)
    else:
        rows = [shown(measure(case, params)) for case in cases]
    if args.out is not None:
        report.write(args.out, header, rows)


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Print a row, and return it."""
    print(
        f"{row['policy']} {row['settings']}: {next(row[k] for k in ('tpot_ms', 'block_ms', 'prompt_ms') if k in row):.3f} ms"
    )
    for kernel in row["kernels"]:
        print(" ".join(f"{x:10.2f}" if isinstance(x, float) else str(x) for x in kernel.values()), flush=True)
    return row


def reading(cases: list[Case], params: Params, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each policy: the time of a block, and its kernels by name."""

    def engine(case: Case) -> Engine:
        sizes = {"batch": args.batch, "prompt_len": case.context, "block": args.block, "mesh": case.mesh or None}
        made = Engine(params, case.bound_policy(), **sizes)
        made.executables()
        return made

    random, rows = np.random.default_rng(1), []
    tokens = random.integers(0, params.config.vocab_size, (args.batch, args.block)).tolist()
    with ThreadPoolExecutor(args.compile_jobs) as pool:
        engines = list(pool.map(engine, cases))
    for case, made in zip(cases, engines, strict=True):
        state = made.begin()
        for _ in range(BLOCKS // 2):
            state, _ = jax.block_until_ready(made.extend(state, tokens))
        start = time.perf_counter()
        for _ in range(BLOCKS // 4):
            state, _ = jax.block_until_ready(made.extend(state, tokens))
        seconds = (time.perf_counter() - start) / (BLOCKS // 4)

        def read(made: Engine = made, state: Decoding = state) -> None:
            jax.block_until_ready(made.extend(state, tokens))

        row = {"policy": case.policy, "settings": case.settings, "block": args.block, "batch": args.batch}
        rows.append(shown(row | {"block_ms": 1e3 * seconds, "kernels": by_name(read)}))
    return rows


def prompts(cases: list[Case], params: Params, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each policy: the time to first token, and the kernels of prefill by name."""
    random, rows = np.random.default_rng(1), []
    tokens = random.integers(0, params.config.vocab_size, (args.batch, args.context), np.int32)
    for case in cases:
        engine = case.engine(params, int(case.batch))

        def read(engine: Engine = engine) -> None:
            state, _ = engine.prefill(tokens)
            jax.block_until_ready(state)

        read()
        times = []
        for _ in range(PREFILLS):
            start = time.perf_counter()
            read()
            times.append(time.perf_counter() - start)
        row = {"policy": case.policy, "settings": case.settings, "context": args.context, "batch": args.batch}
        rows.append(shown(row | {"prompt_ms": 1e3 * statistics.median(times), "kernels": by_name(read)}))
    return rows


def by_name(run: Callable[[], Any]) -> list[dict[str, Any]]:
    """Return the kernels that run during `run`, summed by name, the longest first."""
    spent: dict[str, list[float]] = defaultdict(list)
    for _, duration, name in profiled(run):
        spent[re.sub(r"[._]\d+", "", name)].append(duration)
    longest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    found = [{"us": sum(times) / 1e3, "count": len(times), "name": name} for name, times in longest]
    others = [time for name, times in spent.items() if name not in dict(longest) for time in times]
    return [*found, {"us": sum(others) / 1e3, "count": len(others), "name": "all others"}]


def measure(case: Case, params: Params) -> dict[str, Any]:
    """Return the time per token, and the kernels of one token."""
    engine = case.engine(params, int(case.batch))
    state = jax.block_until_ready(states.filled(engine.policy, engine.specs, case.context))

    def decode(state: Decoding, steps: int) -> Decoding:
        return jax.block_until_ready(engine.decode(state, steps))[0]

    state = decode(state, PROFILED)
    start = time.perf_counter()
    state = decode(state, STEPS)
    seconds = time.perf_counter() - start
    found = profiled(lambda: decode(state, PROFILED))
    of_one = len(found) // PROFILED
    middle = found[PROFILED // 2 * of_one :][:of_one]
    return {
        "policy": case.policy,
        "settings": case.settings,
        "context": case.context,
        "batch": case.batch,
        "tpot_ms": 1e3 * seconds / STEPS,
        "kernels": [
            {"begin_us": (begin - middle[0][0]) / 1e3, "microseconds": duration / 1e3, "name": name}
            for begin, duration, name in middle
        ],
    }


def profiled(run: Callable[[], Any]) -> list[tuple[float, float, str]]:
    """Return begin, duration and name of each kernel that runs during `run`."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (written,) = Path(folder).rglob("*.xplane.pb")
        return kernels(ProfileData.from_file(str(written)))


def kernels(profile: Any) -> list[tuple[float, float, str]]:
    """Return begin and duration in nanoseconds, and name, of each kernel of the first GPU in a `ProfileData`.

    Raises:
        ValueError: the profile has no GPU.
    """
    planes = sorted((plane for plane in profile.planes if "gpu" in plane.name.lower()), key=lambda plane: plane.name)
    lines = [line for plane in planes[:1] for line in plane.lines if "stream" in (line.name or "").lower()]
    if not lines:
        raise ValueError(f"the profile has no GPU's streams, but {[plane.name for plane in profile.planes]}")
    return sorted((event.start_ns, event.duration_ns, event.name) for line in lines for event in line.events)


if __name__ == "__main__":
    main()
