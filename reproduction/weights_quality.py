"""Quality loss of 8-bit and 4-bit weights: perplexity and tasks of RULER beside the same model in floats, with the full cache.

    python -m reproduction.weights_quality --model MODEL --text BOOK.txt --text OTHER.txt --length 4096 --dtype bfloat16

A run continues an existing result file. `--render` writes the section of docs/howto/weights.md, from reproduction/results/weights-quality-<device>.json.
"""

import argparse
import gc
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import kvjax
from benchmarks import report
from kvjax.evals import windowed
from kvjax.evals.intervals import standard_error
from reproduction import models
from reproduction.block_sizes import TASKS, Reading, make_suite, passages, scores
from reproduction.sections import Section, device

KINDS = "float,int8,int4"


def main() -> None:
    """Measure and print."""
    parser = models.parser(__doc__, "float32")
    parser.add_argument("--text", type=Path, action="append", default=[], help="a plain text file; may be repeated")
    parser.add_argument("--weights", default=KINDS, help="as kvjax.load takes them, embedding and head the same")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt, and of a passage")
    parser.add_argument("--tasks", default=TASKS, help="of RULER, hidden in the first text")
    parser.add_argument("--samples", type=int, default=20, help="of every task")
    parser.add_argument("--passages", type=int, default=16, help="of the texts, for perplexity")
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--render", action="store_true", help="write the page's section from the result file")
    args = parser.parse_args()
    if args.render:
        return SECTION.write()
    if not args.text:
        parser.error("give at least one --text")
    out = args.out or Path(f"reproduction/results/weights-quality-{report.device_slug()}.json")
    settings = {name: getattr(args, name) for name in ("length", "samples", "passages", "dtype")}
    header, rows = report.begun(
        out,
        report.header(
            model=models.named(args.model),
            texts=[path.name for path in args.text],
            tasks=args.tasks.split(","),
            **settings,
        ),
    )
    kinds = [kind for kind in args.weights.split(",") if kind not in {row["weights"] for row in rows}]
    for kind in tqdm(kinds, unit="kind"):
        rows.append(measure(kind, args))
        report.write(out, header, rows)
        gc.collect()  # the weights, before the next are loaded
    print(table(rows))


def measure(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """A row of the result file: mean negative log-likelihood of each passage, and the score of each sample."""
    params = kvjax.load(args.model, dtype=args.dtype, weights=kind, embedding=kind)
    nll = [
        windowed(params, passage, window=len(passage)).nll
        for passage in tqdm(passages(params, args.text, args.passages, args.length), desc=f"{kind}, perplexity")
    ]
    suite = make_suite(params, args)
    engine = Reading(params, "full", suite, sum(len(asked.examples) for asked in suite.asked.values()))
    return {
        "weights": kind,
        "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "nll": nll,
        "scores": scores(engine, params, suite, ahead=0),
    }


def names(model: str) -> dict[str, str]:
    """What the rows of a model are, whose file may store its matrices in few bits itself."""
    stored = re.search(r"-(I?Q\d\w*)\.gguf$", model)
    if stored is None:
        return {}
    return {
        "float": f"{stored[1]}, dequantised",
        "int8": f"{stored[1]} in int8",
        "int4": f"{stored[1]}, remainder in int4",
    }


def table(rows: Sequence[dict[str, Any]], model: str = "") -> str:
    """Perplexity and share found, one row per kind; in parentheses what it is above and below the first row, from paired differences."""
    tasks = list(rows[0]["scores"])
    lines = []
    for row in rows:
        cells = [names(model).get(row["weights"], row["weights"]), f"{row['bytes'] / 1e9:.2f} GB"]
        change = np.subtract(row["nll"], rows[0]["nll"])
        cells.append(
            f"{np.exp(np.mean(row['nll'])):.3f} ({100 * np.expm1(change.mean()):+.2f} ± {100 * standard_error(change):.2f} %)"
        )
        cells += [f"{100 * np.mean(row['scores'][task]):.0f}" for task in tasks]
        found, first = (np.concatenate([each["scores"][task] for task in tasks]) for each in (row, rows[0]))
        cells.append(
            f"{100 * found.mean():.1f} ({100 * (found - first).mean():+.1f} ± {100 * standard_error(found - first):.1f})"
        )
        lines.append(cells)
    return report.table(["weights", "bytes", "perplexity", *(f"`{task}`" for task in tasks), "all tasks"], lines)


def section(content: Mapping[str, Any]) -> str:
    """What the page has of a result file."""
    header, rows = content["header"], content["rows"]
    about = header["settings"]
    return (
        f"**On top of the file's own quantisation, `int8` changes perplexity by {_change(rows, 'int8')}, and `int4` by {_change(rows, 'int4')}.** {models.title(about)} with the full cache, "
        f"computed in {about['dtype']}\non one {device(header)}. Embedding and head are quantised as the layers are.\n\n"
        "- The file is quantised itself, so the rows show the loss on top of that. `int4` keeps the codes of matrices that the file stores in 4 "
        "bits.\n"
        f"- Perplexity: {about['passages']} passages of {about['length']} tokens.\n"
        f"- Tasks: RULER's, in percent, with {about['samples']} prompts of {about['length']} tokens for each.\n"
        "- In parentheses: paired difference from the first row ± its standard error.\n\n"
        f"Measured by `python -m reproduction.weights_quality`.\n\n{table(rows, models.title(about))}"
    )


def _change(rows: Sequence[dict[str, Any]], kind: str) -> str:
    """Relative change of perplexity from the first row's, in percent."""
    (nll,) = (row["nll"] for row in rows if row["weights"] == kind)
    return f"{100 * np.expm1(np.subtract(nll, rows[0]['nll']).mean()):+.2f} %"


SECTION = Section("howto/weights.md", "What they cost in quality", "weights-quality", section)


if __name__ == "__main__":
    main()
