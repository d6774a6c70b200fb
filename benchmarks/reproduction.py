"""Test the papers' claims about quality on a real model, and write docs/reproduction.md.

    python -m benchmarks.reproduction                     # every section; writes benchmarks/results/reproduction-<device>.json and the page
    python -m benchmarks.reproduction treekv chunkkv --update    # these sections (all of a paper by its name), the others as they are
    python -m benchmarks.reproduction --render            # the page again, from the result file
    python -m benchmarks.reproduction --small --out small.json    # sizes for a CPU: does all run?

`--texts` is a folder with whole books as `books/*.txt` and `wikitext-2/test.txt` to calibrate on. Several processes may measure
different sections with `--update` at the same time; on a GPU set XLA_PYTHON_CLIENT_PREALLOCATE=false for them.
"""

import argparse
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvjax
from benchmarks import report
from benchmarks.reproduction_claims import page
from benchmarks.reproduction_claims.bench import Bench
from kvjax.evals.report import model_fingerprint, write

DOCS = Path(__file__).parents[1] / "docs" / "reproduction.md"


def main() -> None:
    """Measure, write, render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"all by default; of {', '.join(page.sections())}")
    parser.add_argument("--model", default=None, help="any source that kvjax.load takes; by default the default model")
    shared = os.environ.get("KVJAX_SHARED", "shared")
    parser.add_argument("--texts", type=Path, default=Path(shared) / "data" / "text", help="folder of texts")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=4, help="programs compiled and run at a time")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU; nothing is to be concluded from them")
    parser.add_argument(
        "--update",
        action="store_true",
        help="keep the other sections of a result file of this device, model and versions",
    )
    parser.add_argument("--render", action="store_true", help="measure nothing, write the page")
    parser.add_argument("--out", type=Path, help="result file; one of another place is not rendered")
    args = parser.parse_args()
    results = Path(__file__).parent / "results" / f"reproduction-{report.device_slug()}.json"
    out = args.out or results
    if args.render:
        render(args.out or recorded())
        return
    if args.small and args.out is None:
        parser.error("--small measures nothing that is to be kept: give a file of its own as --out")
    names = chosen(args.sections)
    bench, header = prepared(args)
    if not args.update:
        out.unlink(missing_ok=True)
    earlier(out, header)  # what does not fit is told before anything runs
    for name in names:
        print(f"{name}:", flush=True)
        start = time.perf_counter()
        measured = page.sections()[name].measure(bench)
        row = {
            "section": name,
            "seconds": round(time.perf_counter() - start, 1),
            "settings": measured.settings,
            "rows": [dataclasses.asdict(row) for row in measured.rows],
        }
        with locked(out):
            report.write(out, header, [*(other for other in earlier(out, header) if other["section"] != name), row])
        print(f"{name}: {row['seconds']} s", flush=True)
    if out == results:
        with locked(DOCS):
            render(out)


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
    bench = Bench(params, books, args.texts / "wikitext-2" / "test.txt", args.small, args.threads)
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
            raise SystemExit(f"{path} was measured with other {key} ({content['header'][key]}): run all of it again")
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


def recorded() -> Path:
    """The result file that the page is made from."""
    found = sorted((Path(__file__).parent / "results").glob("reproduction-*.json"))
    if len(found) != 1:
        raise SystemExit(f"{len(found)} result files {[path.name for path in found]}; give one as --out")
    return found[0]


def render(path: Path) -> None:
    """Write the page."""
    write(DOCS, page.render(json.loads(path.read_text(encoding="utf-8"))))
    print(f"wrote {DOCS} from {path}")


if __name__ == "__main__":
    main()
