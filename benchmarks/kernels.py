"""Check every kernel on this device, and time it beside XLA and cuDNN.

    python -m benchmarks.kernels                        # every row; writes benchmarks/results/kernels-<device>.json
    python -m benchmarks.kernels --update nearest       # measures these rows again, and keeps the others
    python -m benchmarks.kernels --tune decode_attention   # times all block sizes too, and prints the best ones
    python -m benchmarks.kernels --tune projection --shape ": 1 x" --dtype int8 --rules rules.json   # writes them as rules for `tuned/`

Every variant is first compared with float64 NumPy on new random inputs. The bound of a row (`floor`) is the larger of
two times: its bytes divided by the memory bandwidth, and its operations divided by the rate of the matrix units. The
bandwidth is that of the device's data sheet, and the rate that of Hopper GPUs (`--bandwidth`, `--flops`).
"""

import argparse
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import kernel_cases, report
from benchmarks.kernel_cases.case import Case
from kvjax._util import files
from kvjax.bench.floor import bandwidth

INPUTS = 3
"""Number of sets of inputs. Calls alternate between them, so that inputs are not in the device's cache."""


def main() -> None:
    """Check and time all cases, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", help="all by default")
    parser.add_argument("--tune", action="store_true", help="time the variants with block sizes in their names as well")
    parser.add_argument(
        "--update", action="store_true", help="keep the other rows of a result file of this device and versions"
    )
    parser.add_argument("--shape", default="", help="only shapes that contain this")
    parser.add_argument("--dtype", default="", help="only this type")
    parser.add_argument("--variant", default="", help="only variants with block sizes whose names contain this")
    parser.add_argument("--rules", type=Path, help="file of rules; those of the best sizes are added at its beginning")
    parser.add_argument("--bandwidth", type=float, help="bytes per second (by default the data sheet's)")
    parser.add_argument("--flops", type=float, default=989e12, help="operations per second (H200, bfloat16: 989e12)")
    parser.add_argument("--seconds", type=float, default=0.05, help="device time of each of 5 measurements")
    parser.add_argument("--threads", type=int, default=8, help="number of programs that compile at the same time")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    if jax.default_backend() == "cpu":  # XLA would hoist the timed computation out of its loop
        parser.error("kernels are not timed on a CPU. Run this where JAX finds a GPU or TPU")
    kind = jax.devices()[0].device_kind
    args.bandwidth = args.bandwidth or bandwidth(kind)
    if args.bandwidth is None:
        parser.error(f"the memory bandwidth of {kind} is not known; give --bandwidth")
    out = args.out or Path(f"benchmarks/results/kernels-{report.device_slug()}.json")
    header = report.header(bandwidth=args.bandwidth, flops=args.flops, tune=args.tune)
    cases = [(module, case) for module in kernel_cases.modules() for case in kernel_cases.cases(module)]
    rows = _earlier(out, header, [case for _, case in cases]) if args.update else []
    for module, case in cases:
        if args.shape in case.shape and args.dtype in case.dtype and (not args.operations or module in args.operations):
            rows = [row for row in rows if _key(row) != _key(vars(case))] + _rows(case, args)
            report.write(out, header, rows)
            if args.rules is not None:
                add_rule(args.rules, case, rows)
    _verdicts(rows)


def _earlier(path: Path, header: dict[str, Any], cases: list[Case]) -> list[dict[str, Any]]:
    """Rows of a result file of the same device and versions, of cases that still exist."""
    begun, rows = report.begun(path, header)
    kept = {_key(vars(case)) for case in cases}
    return [{"date": begun["date"], **row} for row in rows if _key(row) in kept]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["operation"], row["shape"], row["dtype"]


def _rows(case: Case, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a variant."""
    print(f"\n{case.operation}: {case.shape}, {case.dtype}", flush=True)
    sets = [jax.block_until_ready(case.inputs(seed)) for seed in range(INPUTS)]
    floor = max(case.bytes / args.bandwidth, case.flops / args.flops)
    variants = {
        name: function
        for name, function in case.variants.items()
        if " " not in name or (args.tune and args.variant in name)
    }
    rows = []
    with ThreadPoolExecutor(args.threads) as pool:
        compiling = {name: pool.submit(_compile, function, sets) for name, function in variants.items()}
        for name, programs in compiling.items():
            row = {"operation": case.operation, "shape": case.shape, "dtype": case.dtype, "implementation": name}
            row |= {"bytes": case.bytes, "flops": case.flops, "floor_us": floor * 1e6}
            try:
                once, loop = programs.result()
                wait(compiling.values())  # nothing compiles while something is timed
                error = case.error(sets[0], jax.block_until_ready(once(*sets[0])))
                seconds = _time(loop, sets, args.seconds)
            except Exception as problem:
                row["failed"] = f"{type(problem).__name__}: {problem}".splitlines()[0][:300]
                print(f"  {name:38s} {row['failed'][:120]}", flush=True)
            else:
                memory = once.memory_analysis()
                row |= {"error": error, "right": error <= case.tolerance, "microseconds": seconds * 1e6}
                row |= {
                    "fraction_of_floor": floor / seconds,
                    "temp_bytes": memory.temp_size_in_bytes if memory else None,
                }
                print(
                    f"  {name:38s} {seconds * 1e6:9.1f} us  {case.bytes / seconds / 1e12:5.2f} TB/s  "
                    f"{case.flops / seconds / 1e12:6.1f} TFLOP/s  {floor / seconds:4.0%} of floor  error {error:.1e}"
                    + ("" if row["right"] else "  WRONG"),
                    flush=True,
                )
            rows.append(row)
    return rows


def add_rule(path: Path, case: Case, rows: list[dict[str, Any]]) -> None:
    """Put the sizes of a case's fastest right variant into a file of rules, if they beat what is taken without one."""
    times = {
        row["implementation"]: row["microseconds"] for row in rows if _key(row) == _key(vars(case)) and row.get("right")
    }
    best = min((name for name in times if name in case.sizes), key=times.__getitem__, default=None)
    if best is None or times[best] >= times.get("auto", float("inf")):
        return
    rules = json.loads(path.read_text()) if path.exists() else {}
    operation, when = case.tuned_by
    others = [rule for rule in rules.get(operation, []) if rule.get("when") != when]
    files.write(
        path, json.dumps(rules | {operation: [{"when": when, "use": case.sizes[best]}, *others]}, indent=1) + "\n"
    )


def _compile(function: Any, sets: list[tuple[Any, ...]]) -> tuple[Any, Any]:
    """The function once, and a loop of calls on the device, each waiting for the one before it.

    Launched one by one from the host, calls of less than some 80 us would measure the host.
    """

    def calls(times: Any, sets: Any) -> Any:
        def body(_: Any, outs: list[Any]) -> list[Any]:
            new = []
            for given in sets:  # the barrier makes calls wait, and keeps them from being moved out of the loop
                given, _ = jax.lax.optimization_barrier((given, (new or outs)[-1]))
                new.append(function(*given))
            return new

        return jax.lax.fori_loop(0, times, body, [function(*given) for given in sets])

    once = jax.jit(function).lower(*sets[0]).compile()
    return once, jax.jit(calls).lower(jax.ShapeDtypeStruct((), "int32"), sets).compile()


def _time(loop: Any, sets: list[tuple[Any, ...]], seconds: float) -> float:
    """Seconds a call: the median of 5 measurements, the loop's start taken off."""

    def measure(times: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(loop(np.int32(times), sets))
        return time.perf_counter() - start

    measure(1)
    first = min(measure(1) for _ in range(3))
    times = int(np.clip(seconds / max((measure(3) - first) / 2, 1e-6), 2, 2000))
    spans = [measure(times + 1) - first for _ in range(5)]
    return float(np.median(spans)) / (times * len(sets))


def _verdicts(rows: list[dict[str, Any]]) -> None:
    """Per shape: how much faster than XLA `auto` and the best variant are."""
    print(
        f"\n{'operation, shape, dtype':76s} {'xla us':>9s} {'auto us':>9s} {'x':>6s} {'best':>38s} {'us':>9s} {'x':>6s}"
    )
    for case in dict.fromkeys(map(_key, rows)):
        here = [row for row in rows if _key(row) == case]
        times = {row["implementation"]: row["microseconds"] for row in here if row.get("right")}
        xla, auto = times.get("xla", float("nan")), times.get("auto", float("nan"))
        best = min(times, key=times.__getitem__, default="none")
        fastest = times.get(best, float("nan"))
        print(
            f"{', '.join(case):76s} {xla:9.1f} {auto:9.1f} {xla / auto:6.2f} {best:>38s} {fastest:9.1f} {xla / fastest:6.2f}"
        )


if __name__ == "__main__":
    main()
