"""Test the papers' claims about quality on a real model, and write docs/reproduction.md and docs/claims/.

    python -m reproduction.papers --model MODEL       # every section; writes reproduction/results/reproduction-<model>-<device>.json
    python -m reproduction.papers --model MODEL --seconds 500    # time limit: the next run continues
    python -m reproduction.papers treekv chunkkv      # only these sections; a paper's name means all of its sections
    python -m reproduction.papers treekv --again      # measure them again; continue without --again
    python -m reproduction.papers --render            # the pages again, from the result files of all models
    python -m reproduction.papers --small --out small.json    # small sizes, to test that everything runs

`--texts` is a folder with whole books (`books/*.txt`) and a text for calibration (`wikitext-2/test.txt`). `--data` is a folder with the files of
LongBench and GSM8K. The finished parts of a section are saved beside the result file. Several processes may measure different sections at
the same time; on a GPU set XLA_PYTHON_CLIENT_PREALLOCATE=false for them. Each process holds the model and the memory of up to `--threads`
programs. Start only as many processes as fit in the GPU's memory.
"""

import argparse
import dataclasses
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvjax
from benchmarks import report
from kvjax.evals.report import ResultFile, model_fingerprint, write
from reproduction import models
from reproduction.claims import page
from reproduction.claims.bench import Bench, OutOfTime
from reproduction.sections import DOCS, RESULTS


def main() -> None:
    """Measure, write, render."""
    parser = models.parser(__doc__, "float32")
    parser.add_argument("sections", nargs="*", help=f"all by default; of {', '.join(page.sections())}")
    parser.add_argument("--texts", type=Path, default=models.SHARED / "text", help="folder of texts")
    parser.add_argument("--data", type=Path, default=models.SHARED / "tasks", help="folder of tasks")
    parser.add_argument("--seconds", type=float, default=None, help="start nothing after this time")
    parser.add_argument("--threads", type=int, default=4, help="programs compiled and run at a time")
    parser.add_argument("--small", action="store_true", help="small sizes for a CPU; the results mean nothing")
    parser.add_argument(
        "--again", action="store_true", help="measure these sections again even if they are in the file"
    )
    parser.add_argument("--render", action="store_true", help="measure nothing, write the pages")
    parser.add_argument("--out", type=Path, help="result file; one of another place is not rendered")
    args = parser.parse_args()
    if args.render:
        render([args.out] if args.out else recorded())
        return
    if args.small and args.out is None:
        parser.error("the results of --small mean nothing: give another file as --out")
    names, end = chosen(args.sections), None if args.seconds is None else time.monotonic() + args.seconds
    bench, header = prepared(args)
    name = page.model({"header": header}).lower()
    out = args.out or RESULTS / f"reproduction-{name}-{report.device_slug()}.json"
    there = {row["section"]: row for row in report.begun(out, header)[1]}  # fails early if the file does not fit
    for name in names:
        if name in there and not args.again and not new_claims(name, there[name]):
            continue
        kept = out.with_suffix(f".{name}.jsonl")
        if args.again and name in there:
            with locked(out):
                report.write(out, header, [other for other in report.begun(out, header)[1] if other["section"] != name])
            kept.unlink(missing_ok=True)
        print(f"{name}:", flush=True)
        start = time.perf_counter()
        jobs = ResultFile(kept, header)
        mine = dataclasses.replace(
            bench,
            kept={row["job"]: row["result"] for row in jobs.rows},
            keep=keeper(jobs),
            in_time=lambda: end is None or time.monotonic() < end,
        )
        try:
            measured = page.sections()[name].measure(mine)
        except OutOfTime:
            print(f"out of time in {name}: run it again", flush=True)
            break
        row = {
            "section": name,
            "seconds": round(time.perf_counter() - start, 1),
            "settings": measured.settings,
            "claims": comparisons(name),
            "rows": [dataclasses.asdict(row) for row in measured.rows],
        }
        with locked(out):
            report.write(
                out, header, [*(other for other in report.begun(out, header)[1] if other["section"] != name), row]
            )
        kept.unlink()
        print(f"{name}: {row['seconds']} s", flush=True)
    if args.out is None:
        with locked(DOCS / "reproduction.md"):
            render(recorded())


def comparisons(section: str) -> list[list[str]]:
    """Measure, place and two methods of each comparison in a section's claims."""
    pairs = (pair for claim in page.sections()[section].CLAIMS for pair in claim.pairs)
    return [[pair.claim.measure, pair.claim.at, pair.claim.method, pair.other] for pair in pairs]


def new_claims(section: str, row: dict[str, Any]) -> list[list[str]]:
    """Comparisons that were added after a section was measured. Where the file does not list its comparisons, those without numbers.

    What a section could not measure, such as a text that is too long for the model, is not measured again.
    """
    if "claims" in row:
        return [each for each in comparisons(section) if each not in row["claims"]]
    numbers = {(each["measure"], each["at"], each["method"]) for each in row["rows"]}
    return [[*at, a, b] for *at, a, b in comparisons(section) if not {(*at, a), (*at, b)} <= numbers]


def keeper(jobs: ResultFile) -> Callable[[str, Any], None]:
    """A function that writes results of jobs, one at a time, from any thread."""
    lock = threading.Lock()

    def keep(job: str, result: Any) -> None:
        with lock:
            jobs.append([{"job": job, "result": result}])

    return keep


def chosen(given: list[str]) -> list[str]:
    """Names of sections, where a paper's name stands for all of its sections."""
    known = list(page.sections())
    unknown = [name for name in given if not any(section.startswith(name) for section in known)]
    if unknown:
        raise SystemExit(f"no section {', '.join(unknown)}; there are {', '.join(known)}")
    return [section for section in known if not given or any(section.startswith(name) for name in given)]


def prepared(args: argparse.Namespace) -> tuple[Bench, dict[str, Any]]:
    """The bench of the sections, and the header of the result file."""
    params = kvjax.load(args.model, dtype=args.dtype)
    books = sorted((args.texts / "books").glob("*.txt"))
    bench = Bench(params, books, args.texts / "wikitext-2" / "test.txt", args.small, args.threads, args.data)
    header = report.header(
        model=models.named(args.model),
        fingerprint=model_fingerprint(params),
        books=[book.name for book in books],
        dtype=args.dtype,
        small=args.small,
    )
    return bench, header


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock on the file's folder against other processes of this program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def recorded() -> list[Path]:
    """The result files that the pages are made from: the default model's last."""
    found = sorted(RESULTS.glob("reproduction-*.json"))
    return sorted(found, key=lambda path: page.model(report.read(path)).startswith("SmolLM2"))


def render(paths: Sequence[Path]) -> None:
    """Write the pages."""
    pages = page.render([report.read(path) for path in paths])
    for name, text in pages.items():
        write(DOCS / name, text)
    print(f"wrote {', '.join(pages)} from {', '.join(path.name for path in paths)}")


if __name__ == "__main__":
    main()
