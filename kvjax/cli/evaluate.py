"""`kvjax eval`: one task under one policy, or several."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import checks, console
from .hyperparameters import read_policies
from .progress import bar
from .task_options import EvaluationOptions, entries, value

if TYPE_CHECKING:
    from kvjax.evals.measure import Outcome


def evaluate(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="perplexity, fidelity, needle-KIND, one of RULER's names (niah_single_1, vt, …), longbench-NAME, gsm8k, math500, aime, "
            "multi-query, or your own as FILE.py:NAME.",
        ),
    ],
    *,
    policy: Annotated[
        str,
        typer.Option("--policy", "--policies", "-p", help="Separated by commas; see `kvjax policies`."),
    ] = "full",
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            "--budgets",
            "-b",
            metavar="N|FRACTION[,…]",
            help="Cache slots per head: tokens (256), or a fraction of prompt + new (0.2); separated by commas. Policies without a "
            "budget, such as full and kivi, run once. [default: each policy's own]",
            show_default=False,
        ),
    ] = None,
    options: EvaluationOptions,
    window: Annotated[
        int | None,
        typer.Option(
            min=2, max=checks.MAX_INT, help="Tokens of a window, to measure perplexity in windows.", show_default=False
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1, max=checks.MAX_INT, help="Tokens from the start of a window to the next.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Result file, JSON lines; an interrupted run resumes from it. With several policies or budgets, a folder.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw a needle task's map. Needs matplotlib.", show_default=False),
    ] = None,
) -> None:
    """Measure policies on a task.

    Prints the score and the bytes of the cache; with several policies or budgets, a table. --out stores every answer, and an
    interrupted run resumes from it.
    """
    # Everything is checked before the model is loaded, as far as possible: mistakes show at once.
    chosen = read_policies(policy, budget, options.settings or (), "--policy")
    several = len(chosen) > 1
    inputs = options.inputs(window=window, stride=stride)

    from kvjax.evals.measure import check, prepare
    from kvjax.evals.tasks import find_task
    from kvjax.models.sharding import mesh_of
    from kvjax.runtime.processes import is_first

    found = find_task(task)
    name = found if isinstance(found, str) else found.name
    if plot is not None and (out is None or several or not name.startswith("needle-")):
        raise typer.BadParameter(
            "give a needle task, one policy with one budget, and --out to keep its answers in", param_hint="--plot"
        )
    check(found, inputs, chosen, options.prefill_block, over_mesh=options.mesh is not None)
    checks.destination(out, folder=several)
    checks.picture(plot)
    params = options.load()
    outcomes = []
    with bar() as begin:
        begin("Making the task")
        ready = prepare(params, found, inputs, **options.how())
        for each in chosen:
            budgeted = each.info.name + (f"-{budget}" if (budget := getattr(each, "budget", None)) is not None else "")
            file = out / f"{name}-{budgeted}.jsonl" if several and out is not None else out
            outcomes.append(ready.run(each, file, begin(f"{name} · {budgeted}")))
    if plot is not None and out is not None and is_first(mesh_of(params)):
        _draw(out, plot, name)
    if options.as_json:
        rows = [dataclasses.asdict(outcome) for outcome in outcomes]
        console.print_json(rows if several else rows[0])
    elif several:
        rows = [entries(outcome) for outcome in outcomes]
        console.print_table(list(rows[0]), [list(row.values()) for row in rows], right=list(rows[0])[1:])
    else:
        _print(outcomes[0])


def _print(outcome: "Outcome") -> None:
    counted = "examples" if outcome.metric == "score" else "tokens"
    rows = [
        [outcome.metric, f"{value(outcome)} ({outcome.count} {counted})"],
        ["cache", f"{console.size(round(outcome.cache_bytes))}, full {console.size(round(outcome.full_cache_bytes))}"],
    ]
    if outcome.tokens_per_second is not None:
        rows.append(["speed", f"{outcome.tokens_per_second:.1f} tokens/s"])
    if not outcome.budget_applies:
        rows.append(["budget", "does not apply"])
    if outcome.query_aware is not None:
        rows.append(["question", "known when compressed" if outcome.query_aware else "not known when compressed"])
    for label, found in outcome.details.items():
        if label in ("length", "depth", "level", "turn") and len(found) > 1:
            rows.append([f"by {label}", ", ".join(f"{value}: {score:.2f}" for value, score in found.items())])
    for name, mean in outcome.details.get("means", {}).items():
        rows.append([name.replace("_", " "), f"{mean:.4f}"])
    console.print_table(["", ""], rows, headers=False)


def _draw(out: Path, plot: Path, task: str) -> None:
    from kvjax.evals.report import read_rows
    from kvjax.plots import needle_map, save

    save(needle_map(read_rows(out), task), plot)
