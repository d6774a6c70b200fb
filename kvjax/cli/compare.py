"""`kvjax compare`: policies × budgets × tasks in one table."""

from pathlib import Path
from typing import Annotated

import typer

from kvjax._util import strict_json, user_files

from . import checks, console
from .hyperparameters import read_policies
from .progress import bar
from .task_options import EvaluationOptions, entries


def compare(
    policies: Annotated[
        str,
        typer.Option(
            "--policies",
            "--policy",
            "-p",
            help="Separated by commas; those without a budget, such as full and kivi, run once.",
        ),
    ],
    tasks: Annotated[str, typer.Option(help="Separated by commas; see `kvjax eval --help`.")],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FOLDER", help="Results; an interrupted run resumes from them."),
    ],
    *,
    budgets: Annotated[
        str,
        typer.Option("--budgets", "--budget", "-b", help="Shares of the full cache's bytes, separated by commas."),
    ] = "0.125,0.25,0.5",
    options: EvaluationOptions,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw quality over memory and speed; for a single budget, a list of policies. Needs matplotlib.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compare policies that hold the same bytes.

    Each policy gets the budget at which it holds that share of the full cache's bytes, on average over a task's examples. The full
    cache is measured too, as the reference. The folder gets every answer, and the table as Markdown, CSV and JSON.
    """
    names = checks.listed(tasks, "--tasks")
    chosen = read_policies(policies, None, options.settings or (), "--policies")
    targets = checks.numbers(budgets, float, "--budgets", "shares above 0, up to 1", lambda share: 0 < share <= 1)
    inputs = options.inputs()

    from kvjax.evals.compare import compare as compare_all
    from kvjax.evals.measure import check
    from kvjax.evals.tasks import find_task
    from kvjax.models.sharding import mesh_of
    from kvjax.policies.unbound import check_unbound
    from kvjax.runtime.processes import is_first

    found = [find_task(name) for name in names]
    checks.once([task if isinstance(task, str) else task.name for task in found], "--tasks")
    for policy in chosen:
        check_unbound(policy, options.prefill_block, over_mesh=options.mesh is not None)
    for task in found:
        check(task, inputs, prefill_block=options.prefill_block)
    checks.destination(out, folder=True)
    checks.picture(plot)
    params = options.load()
    with bar() as begin:
        begin("Making tasks")
        cells = compare_all(params, chosen, targets, found, inputs, out, report=begin, **options.how())
    if plot is not None and is_first(mesh_of(params)):
        from kvjax.plots import save, tradeoff

        save(tradeoff(strict_json.loads(user_files.read_bytes(out / "table.json"))["rows"]), plot)
    if options.as_json:
        console.print_json([cell.row() for cell in cells])
        return
    rows = []
    for cell in cells:
        policy, budget, (metric, value), *rest = entries(cell.outcome).items()
        target = "" if cell.target is None else f"{100 * cell.target:g} %"
        row = {"Task": cell.outcome.task, policy[0]: policy[1], "Target": target, budget[0]: budget[1]}
        row |= {"Measure": metric, "Value": value, **dict(rest)}
        rows.append(row | {"Of full": row["Of full"] + ("" if cell.on_target else " *")})
    numbers = [name for name in rows[0] if name not in ("Task", "Policy", "Measure")]
    console.print_table(list(rows[0]), [list(row.values()) for row in rows], right=numbers)
