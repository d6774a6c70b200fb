"""The kernels of a decoding step one by one: when each begins and how long it takes, as the GPU's profiler saw it.

    python -m benchmarks.timeline --policies full,catekv:share_adaptive=0.4 --context 16384 --batch 1 --layers 6
    python -m benchmarks.timeline --policies full --mesh model=2 --layers 8
    python -m benchmarks.timeline --policies snapkv:4096,treekv:4096 --block 4096 --layers 4
    python -m benchmarks.timeline --policies full,snapkv:0.2 --prompt --context 16384 --layers 8

With `--block`, they are the kernels that read a block of a text into a full cache. With `--prompt`, they are those of a whole prompt's
prefill. Both are summed by name, with the longest first. Over a mesh, they are those of the first device.

Where a step's time goes, for looking at and not for comparing: the profiler makes steps longer, and has kernels that run side by
side one after the other. The time per token beside it is without the profiler.
A loop that runs as one CUDA graph shows a part of its kernels; with `XLA_FLAGS=--xla_gpu_enable_command_buffer=` in the environment it does not run as
one, and shows all, with the gaps of their launches.
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
from kvjax.bench.case import Case, read_policy
from kvjax.models import Params
from kvjax.models.sharding import init_on
from kvjax.policies.text import split_policies
from kvjax.runtime.decoding import Decoding
from kvjax.runtime.engine import Engine

STEPS = 48
"""Tokens a call, when it is timed."""

BLOCKS = 12
"""Blocks that a text has: half of them fill the cache, a quarter is timed."""

LONGEST = 14
"""Kernels of a block or a prompt that are shown."""

PREFILLS = 5
"""Timed prefills of a prompt; the median counts."""

PROFILED = 5
"""Tokens while the profiler looks; the middle one's kernels are kept."""


def main() -> None:
    """One policy after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--policies", default="full", help="as for `kvjax bench`")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--mesh", default="", help="devices to decode over, such as model=2")
    parser.add_argument("--block", type=int, help="tokens that are read at a time; decoding steps if not given")
    parser.add_argument("--prompt", action="store_true", help="prefill of a whole prompt instead of decoding steps")
    parser.add_argument("--compile-jobs", type=int, default=8)
    parser.add_argument("--out", type=Path, help="result file; printed alone if not given")
    args = parser.parse_args()
    header = report.header(shape=args.shape, layers=args.layers, dtype=args.dtype, mesh=args.mesh, weights="random")
    cases = []
    for text in split_policies(args.policies):
        name, settings = read_policy(text)
        context = args.context if args.block is None else BLOCKS * args.block
        given = {"dtype": args.dtype, "layers": args.layers, "mesh": args.mesh}
        cases.append(Case(name, settings, context, args.batch, args.shape, **given))
    params = init_on(cases[0].shard, cases[0].config, jax.random.key(0), cases[0].dtype)
    if args.block is not None:
        rows = reading(cases, params, args)
    elif args.prompt:
        rows = prompts(cases, params, args)
    else:
        rows = [shown(measure(case, params)) for case in cases]
    if args.out is not None:
        report.write(args.out, header, rows)


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row, printed."""
    print(
        f"{row['policy']} {row['settings']}: {next(row[k] for k in ('tpot_ms', 'block_ms', 'prompt_ms') if k in row):.3f} ms"
    )
    for kernel in row["kernels"]:
        print(" ".join(f"{x:10.2f}" if isinstance(x, float) else str(x) for x in kernel.values()), flush=True)
    return row


def reading(cases: list[Case], params: Params, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each policy: the time that a block takes, and its kernels by name."""

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
    """A row for each policy: the time until the first token, and the kernels of prefill by name."""
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
    """The GPU's kernels meanwhile, summed by name, the longest first."""
    spent: dict[str, list[float]] = defaultdict(list)
    for _, duration, name in profiled(run):
        spent[re.sub(r"[._]\d+", "", name)].append(duration)
    longest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    found = [{"us": sum(times) / 1e3, "count": len(times), "name": name} for name, times in longest]
    others = [time for name, times in spent.items() if name not in dict(longest) for time in times]
    return [*found, {"us": sum(others) / 1e3, "count": len(others), "name": "all others"}]


def measure(case: Case, params: Params) -> dict[str, Any]:
    """The time per token, and the kernels of one."""
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
    """Begin, duration and name of all that the GPU does meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (written,) = Path(folder).rglob("*.xplane.pb")
        return kernels(ProfileData.from_file(str(written)))


def kernels(profile: Any) -> list[tuple[float, float, str]]:
    """Begin and duration in nanoseconds, and name, of all that the first GPU did in a `ProfileData`.

    Raises:
        ValueError: there is no GPU in it.
    """
    planes = sorted((plane for plane in profile.planes if "gpu" in plane.name.lower()), key=lambda plane: plane.name)
    lines = [line for plane in planes[:1] for line in plane.lines if "stream" in (line.name or "").lower()]
    if not lines:
        raise ValueError(f"the profile has no GPU's streams, but {[plane.name for plane in profile.planes]}")
    return sorted((event.start_ns, event.duration_ns, event.name) for line in lines for event in line.events)


if __name__ == "__main__":
    main()
