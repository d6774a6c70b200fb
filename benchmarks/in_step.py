"""What each kernel is worth inside a step: a decoding step, or a prompt's compression, with the kernel and with XLA in its place.

    python -m benchmarks.in_step                            # every row; writes benchmarks/results/in-step-<device>.json
    python -m benchmarks.in_step --operations top_k nearest

A kernel that is fast by itself may yet cost more than it saves, since XLA cannot fuse across it; so what decides whether a kernel stays
is this. Weights are random, of Llama-3.1-8B's first layers. Programs are compiled beforehand, several at a time.
"""

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from kvjax.bench.case import Case, read_policy

DECODE, PREFILL = "tpot_ms", "compression_s"

WHERE: tuple[tuple[str, str, str], ...] = (
    ("full", DECODE, "decode_attention,fused_decode_block,write_slots"),
    ("treekv:0.2", DECODE, "tree_eviction,decode_attention"),
    ("chelsea:0.2", DECODE, "chunk_similarity,merge_clusters,copy_clusters"),
    ("catekv:share_adaptive=0.4", DECODE, "sharded_decode_attention"),
    ("kivi:bits=4", DECODE, "packed_decode_attention"),
    ("clusterkv:1024", DECODE, "gather_attention,centroid_scores,cluster_tokens"),
    ("quest:1024", DECODE, "gather_attention,page_scores,widen_bounds,top_k_indices"),
    ("snapkv:0.2", PREFILL, "window_scores,top_k"),
    ("chunkkv:0.2", PREFILL, "window_scores,top_k"),
    ("clusterkv:1024", PREFILL, "kmeans,nearest"),
    ("chelsea:0.2", PREFILL, "chunk_similarity,merge_clusters"),
)
"""Policies, what is timed, and operations that it has there."""

WIDE = (("full", DECODE, "projection,gated_projection"),)
"""The same for more rows than `fused_decode_block` takes."""


def main() -> None:
    """Compile, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", nargs="*", default=[], help="all by default")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--wide-batch", type=int, default=16, help="rows of cases for the kernels that serve many")
    parser.add_argument("--compile-jobs", type=int, default=8)
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    wanted = cases(args)
    with ProcessPoolExecutor(args.compile_jobs, mp_context=get_context("spawn"), initializer=_beside_others) as pool:
        for case, without, seconds in pool.map(_compile, *zip(*wanted, strict=True)):
            print(f"compiled {_name(case, without)}: {seconds}", flush=True)

    import jax

    from benchmarks import report
    from kvjax.bench import floor
    from kvjax.bench.measure import measure
    from kvjax.models import init

    _keep_programs()
    device = jax.devices()[0]
    bandwidth, out = floor.bandwidth(device.device_kind), args.out
    out = out or Path(f"benchmarks/results/in-step-{report.device_slug()}.json")
    header = report.header(weights="random", bandwidth=bandwidth, layers=args.layers)
    params = init(wanted[0][0].config, jax.random.key(0), wanted[0][0].dtype)
    rows: list[dict[str, Any]] = []
    for case, without in wanted:
        _leave_to_xla(without)
        jax.clear_caches()
        row: dict[str, Any] = {"policy": case.policy, "settings": case.settings, "context": case.context}
        row |= {"batch": case.batch, "layers": case.layers, "without": without}
        row["timed"] = PREFILL if case.prefill else DECODE
        try:
            found = measure(case, params, bandwidth, None)
        except Exception as error:  # a row that says so, and the next
            row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        else:
            row |= {"seconds": found["compression_s"] if case.prefill else found["tpot_ms"] / 1e3}
        rows.append(row)
        report.write(out, header, rows)
        print(_name(case, without), row.get("failed") or f"{1e6 * row['seconds']:.1f} us", flush=True)
    for line in table(rows):
        print(line)


def cases(args: argparse.Namespace) -> list[tuple[Case, str]]:
    """Cases, each followed by itself without one operation's kernel."""
    found: list[tuple[Case, str]] = []
    for where, batches in ((WHERE, args.batches), (WIDE, [args.wide_batch])):
        for policy, timed, operations in where:
            operations = [name for name in operations.split(",") if not args.operations or name in args.operations]
            name, settings = read_policy(policy)
            for batch in batches if operations else ():
                prefill = timed == PREFILL
                case = Case(
                    name, settings, args.context, batch, args.shape, new_tokens=192, prefill=prefill, layers=args.layers
                )
                found += [(case, without) for without in ("", *operations)]
    return found


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of a Markdown table: microseconds per layer, with the kernel and without."""
    lines = [
        "| operation | inside | tokens × rows | with it | without | saved |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    here = None
    for row in rows:
        if "seconds" not in row:
            continue
        if not row["without"]:
            here = row
        elif here is not None:
            phase = "compression of a prompt" if row["timed"] == PREFILL else "decoding step"
            old, new = (1e6 * one["seconds"] / one["layers"] for one in (row, here))
            lines.append(
                f"| `{row['without']}` | {row['policy']}, {phase} | {row['context'] // 1024}k × {row['batch']} "
                f"| {new:.1f} | {old:.1f} | {(old - new) / old:.0%} |"
            )
    return lines


def _name(case: Case, without: str) -> str:
    return f"{case.policy} {case.context} x {case.batch}, {'compression' if case.prefill else 'step'}" + (
        f" without {without}" if without else ""
    )


def _beside_others() -> None:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    _keep_programs()


def _keep_programs() -> None:
    from kvjax.runtime.compilation_cache import VARIABLE, keep_unless_refused

    os.environ[VARIABLE] = "1"
    keep_unless_refused()


def _leave_to_xla(operation: str) -> None:
    from kvjax.pallas_kernels.op import WITHOUT

    os.environ[WITHOUT] = operation


def _compile(case: Case, without: str) -> tuple[Case, str, str]:
    """Put a case's programs into the cache on disk."""
    import jax

    from kvjax.bench.measure import compile_only

    _leave_to_xla(without)
    jax.clear_caches()
    try:
        return case, without, f"{compile_only(case)['compile_s']:.1f} s"
    except Exception as error:  # measuring it will say so
        return case, without, f"{type(error).__name__}: {error}"[:200]


if __name__ == "__main__":
    main()
