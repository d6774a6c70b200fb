"""Many policies, budgets and tasks in one table, matched by the bytes that they hold."""

import csv
import dataclasses
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from kvjax._util import strict_json
from kvjax.models import Params
from kvjax.policies import Full, Policy
from kvjax.runtime.mesh import on_mesh
from kvjax.runtime.processes import is_first

from .budgets import bytes_held, matched
from .measure import Outcome, measure, sizes
from .report import header, model_fingerprint, write
from .tasks import Inputs

_TOLERANCE = 0.1
"""How far bytes may be off their target, as a share of it."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One entry of a comparison.

    Attributes:
        target: share of the full cache's bytes that was asked for; None for a policy that has no budget.
        outcome: what the policy reached.
    """

    target: float | None
    outcome: Outcome

    @property
    def share(self) -> float:
        """What the policy held of the full cache's bytes."""
        return self.outcome.cache_bytes / self.outcome.full_cache_bytes

    @property
    def on_target(self) -> bool:
        """Whether that is the target, to a tenth of it; without a target, it is."""
        return _on_target(self.share, self.target)

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
            "share": self.share,
            "on_target": self.on_target,
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
    bytes, for the longest prompt. Policies without a budget run once. Targets for which a policy has the same budget are measured once.
    The full cache is the reference: it comes first where `policies` does not have it.

    Warns of a policy that holds a tenth more or less than its target, because it holds more whatever its budget, or its slots come in large
    steps, or prompts differ in length. Its rows are marked.

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
        measured: dict[Policy, Outcome] = {}
        for policy in policies:
            for target in targets if hasattr(policy, "budget") else [None]:
                fitted = policy
                if target is not None:
                    fitted = matched(policy, round(target * full_bytes), params.config, *shape, params.dtype)
                name = f"{task}-{policy.info.name}" + ("" if target is None else f"-{target:g}")
                progress = None if report is None else report(f"{task} · {policy.info.name}" + _percent(target))
                planned = bytes_held(fitted.bind(params.config), params.config, *shape, params.dtype) / full_bytes
                warned = _warn(f"{task} · {policy.info.name}", planned, target)
                if fitted not in measured:
                    measured[fitted] = measure(
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
                cells.append(Cell(target, measured[fitted]))
                if not warned:  # on average prompts may be shorter than the longest, for which it was planned
                    _warn(f"{task} · {policy.info.name}", cells[-1].share, target)
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
        if not all(cell.on_target for cell in mine):
            lines += ["", f"\\* more than {100 * _TOLERANCE:g} % off the asked share of bytes"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def entry(cell: Cell) -> str:
    """Value and share of bytes, as tables show them; a star for bytes that are off the target."""
    return f"{cell.outcome.value:.3f} ({100 * cell.share:.0f} %{'' if cell.on_target else ' *'})"


def comma_separated(cells: Sequence[Cell]) -> str:
    """All entries as CSV."""
    rows = [cell.row() for cell in cells]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _on_target(share: float, target: float | None) -> bool:
    return target is None or abs(share / target - 1) <= _TOLERANCE


def _warn(cell: str, share: float, target: float | None) -> bool:
    """Warn of bytes that are off a target; whether they are."""
    if _on_target(share, target):
        return False
    warnings.warn(
        f"{cell}: holds {100 * share:.1f} % of the full cache's bytes, not {100 * (target or 0):g} % as asked; compare it with policies "
        "that hold as much",
        stacklevel=3,
    )
    return True


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
