"""Many policies, budgets and tasks in one table, matched by the bytes that they hold."""

import csv
import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from kvjax import strict_json
from kvjax.models import Params
from kvjax.policies import Full, Policy
from kvjax.runtime.mesh import on_mesh
from kvjax.runtime.processes import is_first

from .budgets import bytes_held, matched
from .measure import Outcome, measure, sizes
from .report import header, model_fingerprint, write
from .tasks import Inputs


@dataclasses.dataclass(frozen=True)
class Cell:
    """One entry of a comparison.

    Attributes:
        target: share of the full cache's bytes that was asked for; None for a policy that has no budget.
        outcome: what the policy reached.
    """

    target: float | None
    outcome: Outcome

    def row(self) -> dict[str, Any]:
        """Its entry in tables."""
        found = self.outcome
        return {
            "task": found.task,
            "policy": found.policy,
            "target": self.target,
            "budget": found.settings.get("budget"),
            "budget_applies": found.budget_applies,
            "bytes": round(found.cache_bytes),
            "share": found.cache_bytes / found.full_cache_bytes,
            found.metric: found.value,
            "tokens_per_second": found.tokens_per_second,
            "query_aware": found.query_aware,
        }


def compare(
    params: Params,
    policies: Sequence[Policy],
    targets: Sequence[float],
    tasks: Sequence[str],
    inputs: Inputs | Mapping[str, Inputs],
    out: Path,
    *,
    query_aware: bool = False,
    chat: bool | None = None,
    batch: int = 4,
    report: Callable[[str], Callable[[int, int], None] | None] | None = None,
    mesh: Mesh | str | None = None,
) -> list[Cell]:
    """Measure every policy on every task, at budgets for which all hold the same bytes.

    For each task and target the policy's budget is the largest at which it holds no more than that share of the full cache's
    bytes, for the longest prompt. Policies without a budget run once; one that holds more whatever its budget says so in its row.
    The full cache is the reference: it comes first where `policies` does not have it.

    Args:
        targets: shares of the full cache's bytes, above 0 and up to 1.
        inputs: for all tasks, or by task.
        out: a folder: results of every cell in a file of their own (an interrupted run goes on with them), and the table as
            `table.md`, `table.csv` and `table.json`.
        report: called before each cell with a line that says which; what it returns is called with the progress.
        mesh: devices to run over, as for `measure`. Of several processes that share it only the first writes.

    Raises:
        ValueError: a task is unknown or lacks something, a target is out of range, or the folder holds another comparison.
        PolicyError: a policy cannot work on a task at all.
    """
    if not policies or not tasks or not targets or not all(0 < target <= 1 for target in targets):
        raise ValueError(
            f"targets={list(targets)}; give shares of the full cache's bytes above 0, up to 1, and tasks and policies"
        )
    if Full() not in policies:
        policies = [Full(), *policies]
    params, over = on_mesh(params, mesh)
    cells: list[Cell] = []
    for task in tasks:
        given = inputs[task] if isinstance(inputs, Mapping) else inputs
        shape = sizes(params, task, given, query_aware, chat)
        full_bytes = bytes_held(Full(), params.config, *shape, params.dtype)
        for policy in policies:
            for target in targets if hasattr(policy, "budget") else [None]:
                fitted = policy
                if target is not None:
                    fitted = matched(policy, round(target * full_bytes), params.config, *shape, params.dtype)
                name = f"{task}-{policy.info.name}" + ("" if target is None else f"-{target:g}")
                progress = None if report is None else report(f"{task} · {policy.info.name}" + _percent(target))
                outcome = measure(
                    params,
                    task,
                    given,
                    fitted,
                    query_aware=query_aware,
                    chat=chat,
                    batch=batch,
                    out=out / f"{name}.jsonl",
                    progress=progress,
                    mesh=over,
                )
                cells.append(Cell(target, outcome))
                _write(out, params, cells, over)
    return cells


def markdown(cells: Sequence[Cell]) -> str:
    """One table per task: policies down, targets across, value and share of the full cache's bytes in each entry."""
    parts = []
    for task in dict.fromkeys(cell.outcome.task for cell in cells):
        mine = [cell for cell in cells if cell.outcome.task == task]
        targets = sorted({cell.target for cell in mine if cell.target is not None})
        metric, aware = mine[0].outcome.metric, mine[0].outcome.query_aware
        known = {None: "", True: "; the policy knew the question", False: "; the policy did not know the question"}[
            aware
        ]
        entries = {(cell.outcome.policy, cell.target): cell for cell in mine}
        lines = [f"**{task}**: {metric} (bytes held, as a share of the full cache's){known}", ""]
        lines += ["| policy | " + " | ".join(f"{100 * target:g} %" for target in targets) + " |"]
        lines += ["| --- |" + " ---: |" * len(targets)]
        for policy in dict.fromkeys(cell.outcome.policy for cell in mine):
            found = [entries.get((policy, target), entries.get((policy, None))) for target in targets]
            applies = any(cell.outcome.budget_applies for cell in found if cell is not None)
            named = f"`{policy}`" + ("" if applies else " (no budget)")
            lines += [f"| {named} | " + " | ".join("" if cell is None else entry(cell) for cell in found) + " |"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def entry(cell: Cell) -> str:
    """Value and share of bytes, as tables show them."""
    row = cell.row()
    return f"{cell.outcome.value:.3f} ({100 * row['share']:.0f} %)"


def comma_separated(cells: Sequence[Cell]) -> str:
    """All entries as CSV."""
    rows = [cell.row() for cell in cells]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _write(out: Path, params: Params, cells: Sequence[Cell], mesh: Mesh | None) -> None:
    """The table so far, in all forms."""
    rows = [{"target": cell.target, **dataclasses.asdict(cell.outcome)} for cell in cells]
    content = {
        "header": header(mesh, model=model_fingerprint(params)),
        "rows": rows,
    }  # of which all processes have a part
    if not is_first(mesh):
        return
    write(out / "table.json", strict_json.dumps(content, indent=1) + "\n")
    write(out / "table.md", markdown(cells))
    write(out / "table.csv", comma_separated(cells))


def _percent(target: float | None) -> str:
    return "" if target is None else f" · {100 * target:g} %"
