"""`kvjax compare`: many policies, budgets and tasks in one table."""

from pathlib import Path
from typing import Annotated

import typer

from kvjax._util import strict_json, user_files

from . import checks, console
from .hyperparameters import read_policies
from .options import (
    CompilationCacheOption,
    DistributedOption,
    DTypeOption,
    JsonOption,
    MeshOption,
    ModelOption,
    TokenizerOption,
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


def compare(
    policies: Annotated[
        str, typer.Option(help="Separated by commas; those without a budget, such as full and kivi, run once.")
    ],
    tasks: Annotated[str, typer.Option(help="Separated by commas; see `kvjax eval --help`.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Results; a run that is there goes on.")],
    budgets: Annotated[
        str, typer.Option(help="Shares of the full cache's bytes, separated by commas.")
    ] = "0.125,0.25,0.5",
    model: ModelOption = None,
    tokenizer: TokenizerOption = None,
    query_aware: QueryAwareOption = False,
    length: LengthOption = None,
    samples: SamplesOption = None,
    seed: SeedOption = 0,
    text: TextOption = None,
    data: DataOption = None,
    examples: ExamplesOption = None,
    shots: ShotsOption = 8,
    max_new_tokens: NewTokensOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw quality over memory and speed; of one budget, by policy. Needs matplotlib.",
            show_default=False,
        ),
    ] = None,
    batch: BatchOption = 4,
    mesh: MeshOption = None,
    distributed: DistributedOption = False,
    chat: ChatOption = None,
    dtype: DTypeOption = None,
    compilation_cache: CompilationCacheOption = True,
    as_json: JsonOption = False,
) -> None:
    """Compare policies that hold the same bytes.

    Each policy's budget is chosen so that it holds that share of the full cache's bytes; the full cache is measured too, as the
    reference. The folder gets every answer, and the table as Markdown, CSV and JSON.
    """
    names = checks.listed(tasks, "--tasks")
    chosen = read_policies(policies, None, (), "--policies")
    targets = checks.numbers(budgets, float, "--budgets", "shares above 0, up to 1", lambda share: 0 < share <= 1)
    inputs = read_inputs(length, samples, seed, text, data, examples, shots, max_new_tokens=max_new_tokens)

    from kvjax.evals.compare import compare as compare_all
    from kvjax.evals.measure import check
    from kvjax.evals.tasks import task_name
    from kvjax.models.sharding import mesh_of
    from kvjax.policies.unbound import check_unbound
    from kvjax.runtime.processes import is_first

    names = [task_name(name) for name in names]
    checks.once(names, "--tasks")
    for policy in chosen:
        check_unbound(policy, over_mesh=mesh is not None)
    for name in names:
        check(name, inputs)
    checks.destination(out, folder=True)
    checks.picture(plot)
    params = read_model(model, dtype, compilation_cache, mesh=mesh, distributed=distributed, tokenizer=tokenizer)
    with bar() as begin:
        begin("Making tasks")
        cells = compare_all(
            params,
            chosen,
            targets,
            names,
            inputs,
            out,
            query_aware=query_aware,
            chat=chat,
            batch=batch,
            report=begin,
        )
    if plot is not None and is_first(mesh_of(params)):
        from kvjax.plots import save, tradeoff

        save(tradeoff(strict_json.loads(user_files.read_bytes(out / "table.json"))["rows"]), plot)
    if as_json:
        console.print_json([cell.row() for cell in cells])
        return
    columns = ["Task", "Policy", "Target", "Budget", "Bytes", "Of full", "Measure", "Value", "Tokens/s"]
    rows = [
        [
            cell.outcome.task,
            cell.outcome.policy,
            "" if cell.target is None else f"{100 * cell.target:g} %",
            str(cell.row()["budget"]) if cell.outcome.budget_applies else "does not apply",
            console.size(cell.row()["bytes"]),
            f"{100 * cell.share:.1f} %" + ("" if cell.on_target else " *"),
            cell.outcome.metric,
            f"{cell.outcome.value:.4f}",
            "" if cell.outcome.tokens_per_second is None else f"{cell.outcome.tokens_per_second:.1f}",
        ]
        for cell in cells
    ]
    console.print_table(columns, rows, right=("Target", "Budget", "Bytes", "Of full", "Value", "Tokens/s"))
