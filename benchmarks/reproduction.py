"""Test the papers' claims about quality on a real model, and write docs/reproduction.md.

    python -m benchmarks.reproduction --model MODEL       # every section; writes benchmarks/results/reproduction-<model>-<device>.json
    python -m benchmarks.reproduction --model MODEL --seconds 500    # for so long: the next run goes on with what is left
    python -m benchmarks.reproduction treekv chunkkv      # these sections (all of a paper by its name), the others as they are
    python -m benchmarks.reproduction treekv --again      # measured anew: what there is goes; later runs go on without --again
    python -m benchmarks.reproduction --render            # the page again, from the result files of all models
    python -m benchmarks.reproduction --small --out small.json    # sizes for a CPU: does all run?

`--texts` is a folder with whole books as `books/*.txt` and `wikitext-2/test.txt` to calibrate on, `--data` one of LongBench's and
GSM8K's files. What a section has measured so far is kept beside the result file, method by method. Several processes may measure
different sections at the same time; on a GPU set XLA_PYTHON_CLIENT_PREALLOCATE=false for them.
"""

import argparse
import dataclasses
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvjax
from benchmarks import report
from benchmarks.reproduction_claims import page
from benchmarks.reproduction_claims.bench import Bench, OutOfTime
from kvjax.evals.report import ResultFile, model_fingerprint, write

RESULTS = Path(__file__).parent / "results"

DOCS = Path(__file__).parents[1] / "docs" / "reproduction.md"


def main() -> None:
    """Measure, write, render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"all by default; of {', '.join(page.sections())}")
    parser.add_argument("--model", default=None, help="any source that kvjax.load takes; by default the default model")
    shared = os.environ.get("KVJAX_SHARED", "shared")
    parser.add_argument("--texts", type=Path, default=Path(shared) / "data" / "text", help="folder of texts")
    parser.add_argument("--data", type=Path, default=Path(shared) / "data" / "tasks", help="folder of tasks")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=None, help="begin nothing after so long")
    parser.add_argument("--threads", type=int, default=4, help="programs compiled and run at a time")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU; nothing is to be concluded from them")
    parser.add_argument("--again", action="store_true", help="measure these sections anew, also if they are there")
    parser.add_argument("--render", action="store_true", help="measure nothing, write the page")
    parser.add_argument("--out", type=Path, help="result file; one of another place is not rendered")
    args = parser.parse_args()
    if args.render:
        render([args.out] if args.out else recorded())
        return
    if args.small and args.out is None:
        parser.error("--small measures nothing that is to be kept: give a file of its own as --out")
    names, end = chosen(args.sections), None if args.seconds is None else time.monotonic() + args.seconds
    bench, header = prepared(args)
    name = page.model({"header": header}).split("-Instruct")[0].lower()
    out = args.out or RESULTS / f"reproduction-{name}-{report.device_slug()}.json"
    there = {row["section"]: row for row in earlier(out, header)}  # what does not fit is told before anything runs
    for name in names:
        if name in there and not args.again and not new_claims(name, there[name]):
            continue
        kept = out.with_suffix(f".{name}.jsonl")
        if args.again and name in there:
            with locked(out):
                report.write(out, header, [other for other in earlier(out, header) if other["section"] != name])
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
            report.write(out, header, [*(other for other in earlier(out, header) if other["section"] != name), row])
        kept.unlink()
        print(f"{name}: {row['seconds']} s", flush=True)
    if args.out is None:
        with locked(DOCS):
            render(recorded())


def comparisons(section: str) -> list[list[str]]:
    """What a section's claims compare: measure, place, and two methods."""
    pairs = (pair for claim in page.sections()[section].CLAIMS for pair in claim.pairs)
    return [[pair.claim.measure, pair.claim.at, pair.claim.method, pair.other] for pair in pairs]


def new_claims(section: str, row: dict[str, Any]) -> list[list[str]]:
    """Comparisons that have come since a section was measured; of files that do not say what was compared then, those without numbers.

    What a section had and could not measure, such as a text longer than the model reads, is not measured again.
    """
    if "claims" in row:
        return [each for each in comparisons(section) if each not in row["claims"]]
    numbers = {(each["measure"], each["at"], each["method"]) for each in row["rows"]}
    return [[*at, a, b] for *at, a, b in comparisons(section) if not {(*at, a), (*at, b)} <= numbers]


def keeper(jobs: ResultFile) -> Callable[[str, Any], None]:
    """What writes results of jobs down, one at a time, whichever threads they come from."""
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
    """What sections measure with, and what the result file begins with."""
    params = kvjax.load(args.model, dtype=args.dtype)
    books = sorted((args.texts / "books").glob("*.txt"))
    bench = Bench(params, books, args.texts / "wikitext-2" / "test.txt", args.small, args.threads, args.data)
    header = report.header(
        model=Path(args.model).name if args.model else "SmolLM2-135M-Instruct (the default model)",
        fingerprint=model_fingerprint(params),
        books=[book.name for book in books],
        dtype=args.dtype,
        small=args.small,
    )
    return bench, header


def earlier(path: Path, header: dict[str, Any]) -> list[dict[str, Any]]:
    """Sections that a result file of the same device, versions and settings has."""
    if not path.exists():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    for key in ("device", "versions", "settings"):
        if content["header"][key] != header[key]:
            raise SystemExit(
                f"{path} was measured with other {key} ({content['header'][key]}, {header[key]} now); remove it to measure all of it "
                "again, or give another --out"
            )
    return content["rows"]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """No other process that asks for this writes beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def recorded() -> list[Path]:
    """The result files that the page is made from: the default model's last."""
    found = sorted((RESULTS).glob("reproduction-*.json"))
    return sorted(found, key=lambda path: page.model(read(path)).startswith("SmolLM2"))


def read(path: Path) -> dict[str, Any]:
    """A result file's content."""
    return json.loads(path.read_text(encoding="utf-8"))


def render(paths: Sequence[Path]) -> None:
    """Write the page."""
    write(DOCS, page.render([read(path) for path in paths]))
    print(f"wrote {DOCS} from {', '.join(path.name for path in paths)}")


if __name__ == "__main__":
    main()
