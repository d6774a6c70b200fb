"""`kvjax recommend`: the policy that loses least within a memory limit, on the user's own text or task."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import checks, console
from .hyperparameters import read_policies
from .progress import bar
from .task_options import EvaluationOptions

if TYPE_CHECKING:
    from kvjax.evals.recommend import Contender, Recommendation

WIDTH = 33
"""Characters of the picture of scores and their intervals."""


def recommend(
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FOLDER", help="Results; an interrupted run resumes from them."),
    ],
    *,
    ratio: Annotated[
        float | None,
        typer.Option(help="Share of the full cache's bytes that the cache may hold, such as 0.25.", show_default=False),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory that the cache of one sequence may take, such as 12MB, instead of --ratio.",
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="What to measure; see `kvjax eval --help`. [default: continuations of --text]", show_default=False
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            "--policy",
            "-p",
            help="Separated by commas. [default: a short list for the case]",
            show_default=False,
        ),
    ] = None,
    decoding: Annotated[
        bool, typer.Option("--decoding", help="Answers are long: generated tokens are evicted as well.")
    ] = False,
    options: EvaluationOptions,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw quality over memory. Needs matplotlib.", show_default=False),
    ] = None,
) -> None:
    """Recommend a policy for your own text or task.

    A short list of policies is measured at the limit and at half of it, by successive halving: all on a few examples, the better half on
    twice as many, the best two on all. The result is one recommendation with its 95 % interval, or that two do not differ significantly.
    """
    if (ratio is None) == (memory is None):
        raise typer.BadParameter("give the limit as either --ratio or --memory")
    if ratio is not None and not 0 < ratio < 1:
        raise typer.BadParameter(f"{ratio}; give a share above 0 and below 1", param_hint="--ratio")
    chosen = None if policies is None else read_policies(policies, None, options.settings or (), "--policies")
    inputs = options.inputs()

    from kvjax.evals.measure import check
    from kvjax.evals.recommend import recommend as recommend_one
    from kvjax.evals.tasks import MEASURES, find_task
    from kvjax.models.sharding import mesh_of
    from kvjax.policies.unbound import check_unbound
    from kvjax.runtime.memory import parse_bytes
    from kvjax.runtime.processes import is_first

    found = None if task is None else find_task(task)
    for policy in chosen or ():
        check_unbound(policy, options.prefill_block, over_mesh=options.mesh is not None)
    if found is None:
        inputs.file("text", "text to measure, and no --task")
        inputs.read_text()
        if options.query_aware:
            raise ValueError("--query-aware needs a --task; a text has no questions")
    elif found in MEASURES:
        raise ValueError(f"{found} has no examples to compare; leave --task out to measure a text")
    else:
        check(found, inputs, prefill_block=options.prefill_block)
    size = None if memory is None else parse_bytes(memory)
    if size is not None and size < 1:
        raise ValueError(f"a memory of {size} bytes holds nothing; give --memory a larger size")
    checks.destination(out, folder=True)
    checks.picture(plot)
    params = options.load()
    with bar() as begin:
        begin("Choosing budgets")
        limit = {"ratio": ratio, "memory": size}
        result = recommend_one(
            params,
            found,
            inputs,
            **limit,
            policies=chosen,
            decoding=decoding,
            out=out,
            report=begin,
            **options.how(),
        )
    if plot is not None and is_first(mesh_of(params)):
        from kvjax.plots import save, tradeoff

        save(tradeoff(result.rows()), plot)
    if options.as_json:
        console.print_json(
            {
                "limit": result.limit,
                "best": str(result.best.policy),
                "equals": [str(each.policy) for each in result.equals],
                "verdict": result.verdict(),
                "rows": result.rows(),
                "excluded": dict(result.excluded),
            }
        )
        return
    _print(result)


def _print(result: "Recommendation") -> None:
    ordered = sorted((result.full, *result.contenders), key=lambda each: (-each.share, -each.score))
    low = min(each.score - each.interval for each in ordered)
    high = max(each.score + each.interval for each in ordered)
    rows = [
        [
            str(each.policy),
            f"{100 * each.share:.1f} %",
            f"{each.score:.3f} ± {each.interval:.3f}",
            str(len(each.scores)),
            picture(each, low, high),
        ]
        for each in ordered
    ]
    print(
        f"{result.task}: {result.metric}, with 95 % intervals. At most {100 * result.limit:.1f} % of the full cache's bytes."
    )
    print()
    console.print_table(["Policy", "Of full", "Mean", "n", "Picture"], rows, right=["Of full", "Mean", "n"])
    for name, reason in result.excluded.items():
        print(f"{name} was not measured: {reason}.")
    print()
    print(result.verdict())


def picture(each: "Contender", low: float, high: float) -> str:
    """A line of text from `low` to `high` with the mean and its interval, such as `   ──●──   `."""

    def column(value: float) -> int:
        share = (value - low) / (high - low) if high > low else 0.5
        return round(min(max(share, 0.0), 1.0) * (WIDTH - 1))

    left, right = column(each.score - each.interval), column(each.score + each.interval)
    return "".join(
        "●" if i == column(each.score) else "─" if left <= i <= right else " " for i in range(WIDTH)
    ).rstrip()
