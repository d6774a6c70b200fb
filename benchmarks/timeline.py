"""The kernels of a decoding step one by one: when each begins and how long it takes, as the GPU's profiler saw it.

    python -m benchmarks.timeline --policies full,catekv:share_adaptive=0.4 --context 16384 --batch 1 --layers 6

Where a step's time goes, for looking at and not for comparing: the profiler makes steps longer, and has kernels that run side by
side one after the other. The time per token beside it is without the profiler.
A loop that runs as one CUDA graph shows a part of its kernels; with `XLA_FLAGS=--xla_gpu_enable_command_buffer=` in the environment it does not run as
one, and shows all, with the gaps of their launches.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from benchmarks import report
from kvjax.bench import states
from kvjax.bench.case import Case, read_policy
from kvjax.models import Params, init
from kvjax.policies.text import split_policies
from kvjax.runtime.decoding import Decoding

STEPS = 48
"""Tokens a call, when it is timed."""

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
    parser.add_argument("--out", type=Path, help="result file; printed alone if not given")
    args = parser.parse_args()
    header = report.header(shape=args.shape, layers=args.layers, dtype=args.dtype, weights="random")
    rows, params = [], None
    for text in split_policies(args.policies):
        name, settings = read_policy(text)
        case = Case(name, settings, args.context, args.batch, args.shape, dtype=args.dtype, layers=args.layers)
        params = init(case.config, jax.random.key(0), case.dtype) if params is None else params
        rows.append(measure(case, params))
        print(f"{text}: {rows[-1]['tpot_ms']:.3f} ms per token")
        for kernel in rows[-1]["kernels"]:
            print("{begin_us:10.2f} {microseconds:9.2f} {name}".format(**kernel), flush=True)
        if args.out is not None:
            report.write(args.out, header, rows)


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
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            decode(state, PROFILED)
        (written,) = Path(folder).rglob("*.xplane.pb")
        found = kernels(ProfileData.from_file(str(written)))
    of_one = len(found) // PROFILED
    middle = found[PROFILED // 2 * of_one :][:of_one]
    return {
        "policy": case.policy,
        "settings": case.settings,
        "context": case.context,
        "batch": case.batch,
        "tpot_ms": 1e3 * seconds / STEPS,
        "kernels": [
            {"name": name, "begin_us": (begin - middle[0][0]) / 1e3, "microseconds": duration / 1e3}
            for begin, duration, name in middle
        ],
    }


def kernels(profile: Any) -> list[tuple[float, float, str]]:
    """Begin and duration in nanoseconds, and name, of all that a GPU did in a `ProfileData`.

    Raises:
        ValueError: there is no GPU in it.
    """
    lines = [
        line
        for plane in profile.planes
        if "gpu" in plane.name.lower()
        for line in plane.lines
        if "stream" in (line.name or "").lower()
    ]
    if not lines:
        raise ValueError(f"the profile has no GPU's streams, but {[plane.name for plane in profile.planes]}")
    return sorted((event.start_ns, event.duration_ns, event.name) for line in lines for event in line.events)


if __name__ == "__main__":
    main()
