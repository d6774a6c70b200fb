"""`kvjax eval`: one task under one policy, or several."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import checks, console
from .hyperparameters import read_policies
from .options import (
    CompilationCacheOption,
    DistributedOption,
    DTypeOption,
    EmbeddingOption,
    JsonOption,
    MeshOption,
    ModelOption,
    PrefillBlockOption,
    SetOption,
    TokenizerOption,
    WeightsOption,
    read_model,
)
from .progress import bar
from .task_options import (
    BatchOption,
    ChatOption,
    DataOption,
    ExamplesOption,
    LengthOption,
    NewTokensOption,
    QueryAwareOption,
    SamplesOption,
    SeedOption,
    ShotsOption,
    TextOption,
    read_inputs,
)

if TYPE_CHECKING:
    from kvjax.evals.measure import Outcome


def evaluate(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="perplexity, fidelity, needle-KIND, one of RULER's names (niah_single_1, vt, …), longbench-NAME, gsm8k, math500, aime, or "
            "multi-query.",
        ),
    ],
    model: ModelOption = None,
    tokenizer: TokenizerOption = None,
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
    settings: SetOption = None,
    query_aware: QueryAwareOption = False,
    length: LengthOption = None,
    samples: SamplesOption = None,
    seed: SeedOption = 0,
    text: TextOption = None,
    data: DataOption = None,
    examples: ExamplesOption = None,
    shots: ShotsOption = 8,
    max_new_tokens: NewTokensOption = None,
    history: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="What a question of multi-query follows: the one before it with its reference answer (reference) or the model's (own), or "
            "none. [default: reference]",
            show_default=False,
        ),
    ] = None,
    score_by: Annotated[
        str | None,
        typer.Option(
            "--score-by",
            metavar="KIND",
            help="Of multi-query: any or all of the reference answers, the first number, or f1. [default: any]",
            show_default=False,
        ),
    ] = None,
    depths: Annotated[
        str | None, typer.Option(metavar="X[,X…]", help="Of needles, from 0 to 1.", show_default=False)
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(min=2, max=checks.MAX_INT, help="Perplexity in windows of so many tokens.", show_default=False),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, max=checks.MAX_INT, help="From one window's start to the next's.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="JSON lines; a run that is there goes on.", show_default=False
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw a needle task's map. Needs matplotlib.", show_default=False),
    ] = None,
    batch: BatchOption = 4,
    prefill_block: PrefillBlockOption = None,
    mesh: MeshOption = None,
    distributed: DistributedOption = False,
    chat: ChatOption = None,
    dtype: DTypeOption = None,
    weights: WeightsOption = None,
    embedding: EmbeddingOption = None,
    compilation_cache: CompilationCacheOption = True,
    as_json: JsonOption = False,
) -> None:
    """Measure policies on a task.

    Prints the score, and the bytes that the cache held; of several policies or budgets, a table. With --out all answers are kept,
    and an interrupted run goes on. --out is a file, or of several a folder.
    """
    # All that can be told before the model is loaded is: mistakes show at once.
    chosen = read_policies(policy, budget, settings or (), "--policy")
    several = len(chosen) > 1
    more: dict[str, object] = {"window": window, "stride": stride, "max_new_tokens": max_new_tokens}
    more |= {"history": history, "score_by": score_by}
    if depths is not None:
        more["depths"] = checks.numbers(depths, float, "--depths", "shares from 0 to 1", lambda depth: 0 <= depth <= 1)
    inputs = read_inputs(length, samples, seed, text, data, examples, shots, **more)

    from kvjax.evals.measure import check, measure
    from kvjax.evals.tasks import task_name
    from kvjax.models.sharding import mesh_of
    from kvjax.runtime.processes import is_first

    task = task_name(task)
    if plot is not None and (out is None or several or not task.startswith("needle-")):
        raise typer.BadParameter(
            "give a needle task, one policy with one budget, and --out to keep its answers in", param_hint="--plot"
        )
    check(task, inputs, chosen, prefill_block, over_mesh=mesh is not None)
    checks.destination(out, folder=several)
    checks.picture(plot)
    params = read_model(model, dtype, compilation_cache, weights, embedding, mesh, distributed, tokenizer)
    outcomes = []
    with bar() as begin:
        for each in chosen:
            budgeted = each.info.name + (f"-{budget}" if (budget := getattr(each, "budget", None)) is not None else "")
            outcome = measure(
                params,
                task,
                inputs,
                each,
                query_aware=query_aware,
                chat=chat,
                batch=batch,
                prefill_block=prefill_block,
                out=out / f"{task}-{budgeted}.jsonl" if several and out is not None else out,
                progress=begin(f"{task} · {budgeted}"),
            )
            outcomes.append(outcome)
    if plot is not None and out is not None and is_first(mesh_of(params)):
        _draw(out, plot, task)
    if as_json:
        found = [dataclasses.asdict(outcome) for outcome in outcomes]
        console.print_json(found if several else found[0])
    elif several:
        _print_table(outcomes)
    else:
        _print(outcomes[0])


def _print_table(outcomes: "Sequence[Outcome]") -> None:
    columns = ["Policy", "Budget", outcomes[0].metric, "Cache", "Of full", "Tokens/s"]
    rows = [
        [
            found.policy,
            str(found.settings["budget"]) if found.budget_applies else "does not apply",
            f"{found.value:.4f}",
            console.size(round(found.cache_bytes)),
            f"{100 * found.cache_bytes / found.full_cache_bytes:.1f} %",
            "" if found.tokens_per_second is None else f"{found.tokens_per_second:.1f}",
        ]
        for found in outcomes
    ]
    console.print_table(columns, rows, right=columns[1:])


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
    if not outcome.budget_applies:
        rows.append(["budget", "does not apply"])
    if outcome.query_aware is not None:
        rows.append(["question", "known when compressed" if outcome.query_aware else "not known when compressed"])
    for label, found in outcome.details.items():
        if label in ("length", "depth", "level", "turn") and len(found) > 1:
            rows.append([f"by {label}", ", ".join(f"{value}: {score:.2f}" for value, score in found.items())])
    for name, value in outcome.details.get("means", {}).items():
        rows.append([name.replace("_", " "), f"{value:.4f}"])
    console.print_table(["", ""], rows, headers=False)


def _draw(out: Path, plot: Path, task: str) -> None:
    from kvjax.evals.report import read_rows
    from kvjax.plots import needle_map, save

    save(needle_map(read_rows(out), task), plot)
