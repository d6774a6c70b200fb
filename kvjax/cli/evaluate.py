"""`kvjax eval`: one task under one policy."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import console
from .hyperparameters import read_policy
from .options import (
    BudgetOption,
    CompilationCacheOption,
    DTypeOption,
    JsonOption,
    ModelOption,
    PolicyOption,
    SetOption,
    read_model,
)
from .progress import bar
from .task_options import (
    BatchOption,
    ChatOption,
    DataOption,
    ExamplesOption,
    LengthOption,
    QueryAwareOption,
    SamplesOption,
    SeedOption,
    ShotsOption,
    TextOption,
    numbers,
    read_inputs,
)

if TYPE_CHECKING:
    from kvjax.evals.measuring import Outcome


def evaluate(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="perplexity, fidelity, needle-KIND, one of RULER's names (niah_single_1, vt, …), longbench-NAME, or gsm8k.",
        ),
    ],
    model: ModelOption = None,
    policy: PolicyOption = "full",
    budget: BudgetOption = None,
    settings: SetOption = None,
    query_aware: QueryAwareOption = False,
    length: LengthOption = None,
    samples: SamplesOption = None,
    seed: SeedOption = 0,
    text: TextOption = None,
    data: DataOption = None,
    examples: ExamplesOption = None,
    shots: ShotsOption = 8,
    depths: Annotated[
        str | None, typer.Option(metavar="X[,X…]", help="Of needles, from 0 to 1.", show_default=False)
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=2, help="Perplexity in windows of so many tokens.", show_default=False)
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="From one window's start to the next's.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="JSON lines; a run that is there goes on.", show_default=False
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw a needle task's map. Needs the `plot` extra.", show_default=False),
    ] = None,
    batch: BatchOption = 4,
    chat: ChatOption = None,
    dtype: DTypeOption = None,
    compilation_cache: CompilationCacheOption = True,
    as_json: JsonOption = False,
) -> None:
    """Measure a policy on a task.

    Prints the score, and the bytes that the cache held. With --out all answers are kept, and an interrupted run goes on.
    """
    if plot is not None and (out is None or not task.startswith("needle-")):
        raise typer.BadParameter("give a needle task, and --out to keep its answers in", param_hint="--plot")
    chosen = read_policy(policy, budget, settings)  # before the model is loaded: mistakes show at once
    more: dict[str, object] = {"window": window, "stride": stride}
    if depths is not None:
        more["depths"] = numbers(depths, float, "--depths")
    inputs = read_inputs(length, samples, seed, text, data, examples, shots, **more)

    from kvjax.evals.measuring import measure
    from kvjax.evals.naming import task_names

    if task not in task_names():
        raise ValueError(f"unknown task {task!r}; there are {', '.join(task_names())}")
    params = read_model(model, dtype, compilation_cache)
    with bar() as begin:
        outcome = measure(
            params,
            task,
            inputs,
            chosen,
            query_aware=query_aware,
            chat=chat,
            batch=batch,
            out=out,
            progress=begin(f"{task} · {chosen.name}"),
        )
    if plot is not None and out is not None:
        _draw(out, plot, task)
    if as_json:
        console.print_json(dataclasses.asdict(outcome))
        return
    _print(outcome)


def _print(outcome: "Outcome") -> None:
    rows = [
        [
            outcome.metric,
            f"{outcome.value:.4f} ({outcome.count} {'examples' if outcome.metric == 'score' else 'tokens'})",
        ],
        ["cache", f"{console.size(round(outcome.cache_bytes))}, full {console.size(round(outcome.full_cache_bytes))}"],
    ]
    if outcome.tokens_per_second is not None:
        rows.append(["speed", f"{outcome.tokens_per_second:.1f} tokens/s"])
    if outcome.query_aware is not None:
        rows.append(["question", "known when compressed" if outcome.query_aware else "not known when compressed"])
    for label, found in outcome.details.items():
        if label in ("length", "depth") and len(found) > 1:
            rows.append([f"by {label}", ", ".join(f"{value}: {score:.2f}" for value, score in found.items())])
    for name, value in outcome.details.get("means", {}).items():
        rows.append([name.replace("_", " "), f"{value:.4f}"])
    console.print_table(["", ""], rows, headers=False)


def _draw(out: Path, plot: Path, task: str) -> None:
    import json

    from kvjax.plots import needle_map, save

    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()[1:]]
    save(needle_map(rows, task), plot)
