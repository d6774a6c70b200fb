"""Policies × budgets × tasks in one table, at budgets at which all policies hold the same bytes."""

import csv
import dataclasses
import io
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from kvjax._util import strict_json
from kvjax.models import Params
from kvjax.policies import Full, Policy
from kvjax.runtime.mesh import on_mesh
from kvjax.runtime.processes import is_first

from .budgets import matched
from .measure import Outcome, prepare
from .report import header, model_fingerprint, name_part, write
from .task import Task
from .tasks import Inputs, task_name

_TOLERANCE = 0.1
"""Relative difference between bytes and target at which a cell is marked."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One entry of a comparison.

    Attributes:
        target: the requested share of the full cache's bytes; None for a policy without a budget, or with budgets of its
            own.
        outcome: the policy's result.

    Example:
        >>> from kvjax.evals.compare import Cell
        >>> from kvjax.evals.measure import Outcome
        >>> facts = {"value": 0.5, "cache_bytes": 1e6, "full_cache_bytes": 4e6, "count": 4, "standard_error": 0.29}
        >>> cell = Cell(0.25, Outcome.of("needle", kvjax.SnapKV(budget=64), "score", **facts))
        >>> cell.share, cell.on_target
        (0.25, True)
    """

    target: float | None
    outcome: Outcome

    @property
    def share(self) -> float:
        """The bytes that the policy held, as a share of the full cache's."""
        return self.outcome.cache_bytes / self.outcome.full_cache_bytes

    @property
    def on_target(self) -> bool:
        """Whether `share` is within 10 % of the target; True without a target."""
        return _on_target(self.share, self.target)

    def row(self) -> dict[str, Any]:
        """The entry as a row of a table."""
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
            "standard_error": found.standard_error,
            "count": found.count,
            "tokens_per_second": found.tokens_per_second,
            "query_aware": found.query_aware,
        }


def compare(
    params: Params,
    policies: Sequence[Policy],
    targets: Sequence[float],
    tasks: Sequence[str | Task],
    inputs: Inputs | Mapping[str, Inputs] | None = None,
    out: Path | None = None,
    *,
    query_aware: bool = False,
    chat: bool | None = None,
    batch: int = 4,
    prefill_block: int | None = None,
    report: Callable[[str], Callable[[int, int], None] | None] | None = None,
    mesh: Mesh | str | None = None,
) -> list[Cell]:
    """Measure every policy on every task, at budgets at which all policies hold the same bytes.

    Tables and file names identify policies of the same name by their hyperparameters.

    For each task and target, a policy gets the largest budget at which its caches hold at most that share of the full cache's bytes, on
    average over the task's examples. Policies without a budget, and `by_layer` with budgets of its own, run once. Targets that lead to the same budget are measured once.
    The full cache is the reference: it is added first if `policies` lacks it.

    Warns if a policy holds at least 10 % more or less than its target: it may hold more at every budget, or allocate slots in large
    steps. Its entries are marked.

    Args:
        targets: shares of the full cache's bytes, above 0 and up to 1.
        tasks: names of `kvjax.evals.tasks.task_names()`, or tasks of your own.
        inputs: what named tasks are made from: the same for all, or by name.
        out: a folder for one result file per cell, from which an interrupted run resumes, and for the table as `table.md`, `table.csv` and
            `table.json`.
        query_aware, chat, batch, prefill_block: as for `evaluate`.
        report: called before each cell with a line that names it; what it returns is called with the progress.
        mesh: devices to run over, as for `evaluate`. Of several processes that share it only the first writes.

    Raises:
        ValueError: a task is unknown or lacks an input, a target is out of range, or the folder has another comparison.
        PolicyError: a policy cannot work on a task at any budget.

    Example:
        >>> from kvjax.evals.compare import compare
        >>> task = kvjax.evals.NeedleInAHaystack(lengths=(254,), depths=(0.5,))
        >>> cells = compare(chat, [kvjax.StreamingLLM()], [0.31], [task])
        >>> [(cell.outcome.policy, round(cell.share, 2)) for cell in cells]
        [('full', 1.0), ('streaming_llm', 0.3)]
    """
    if not policies or not tasks or not targets or not all(0 < target <= 1 for target in targets):
        raise ValueError(
            f"targets={list(targets)}; give shares of the full cache's bytes above 0, up to 1, and tasks and policies"
        )
    policies, targets = list(dict.fromkeys(policies)), list(dict.fromkeys(targets))
    if Full() not in policies:
        policies = [Full(), *policies]
    labels = _labels(policies)
    params, over = on_mesh(params, mesh)
    how: dict[str, Any] = {"query_aware": query_aware, "chat": chat, "batch": batch, "prefill_block": prefill_block}
    cells: list[Cell] = []
    for each in tasks:
        task = task_name(each) if isinstance(each, str) else each
        name = task if isinstance(task, str) else task.name
        given = inputs.get(name) if isinstance(inputs, Mapping) else inputs
        ready = prepare(params, task, given, **how, mesh=over)
        full_bytes = ready.plan.bytes_held(Full())
        measured: dict[Policy, Outcome] = {}
        for policy in policies:
            for target in targets if hasattr(policy, "budget") else [None]:
                label = f"{name} · {labels[policy]}" + ("" if target is None else f" · {100 * target:g} %")
                progress = None if report is None else report(label)
                fitted = policy if target is None else matched(policy, target * full_bytes, ready.plan)
                share = ready.plan.bytes_held(fitted) / full_bytes
                if not _on_target(share, target):
                    warnings.warn(
                        f"{name} · {labels[policy]}: holds {100 * share:.1f} % of the full cache's bytes, not "
                        f"{100 * (target or 0):g} % as asked; compare it with policies that hold as much",
                        stacklevel=2,
                    )
                if fitted not in measured:
                    file = f"{name}-{name_part(labels[policy])}" + ("" if target is None else f"-{target:g}")
                    measured[fitted] = ready.run(fitted, None if out is None else out / f"{file}.jsonl", progress)
                cells.append(Cell(target, dataclasses.replace(measured[fitted], policy=labels[policy])))
                if out is not None:
                    _write(out, params, cells, over)
    return cells


def markdown(cells: Sequence[Cell]) -> str:
    """One table per task with a row per policy and a column per target; see `entry`.

    Example:
        >>> from kvjax.evals.compare import Cell, markdown
        >>> from kvjax.evals.measure import Outcome
        >>> facts = {"value": 0.5, "cache_bytes": 1e6, "full_cache_bytes": 4e6, "count": 4, "standard_error": 0.29}
        >>> cell = Cell(0.25, Outcome.of("needle", kvjax.SnapKV(budget=64), "score", **facts))
        >>> print(markdown([cell]).splitlines()[-1])
        | `snapkv` | 0.500 ± 0.290 (25 %) |
    """
    parts = []
    for task in dict.fromkeys(cell.outcome.task for cell in cells):
        mine = [cell for cell in cells if cell.outcome.task == task]
        targets = sorted({cell.target for cell in mine if cell.target is not None}) or [None]
        metric, aware = mine[0].outcome.metric, mine[0].outcome.query_aware
        known = {None: "", True: "; question-aware", False: "; question-agnostic"}[aware]
        entries = {(cell.outcome.policy, cell.target): cell for cell in mine}
        deviation = " ± standard error" if mine[0].outcome.standard_error is not None else ""
        count = f"n = {mine[0].outcome.count}" + known
        lines = [f"**{task}**: {metric}{deviation} (bytes held, as a share of the full cache's); {count}", ""]
        lines += [
            "| policy | "
            + " | ".join("result" if target is None else f"{100 * target:g} %" for target in targets)
            + " |"
        ]
        lines += ["| --- |" + " ---: |" * len(targets)]
        for policy in dict.fromkeys(cell.outcome.policy for cell in mine):
            found = [entries.get((policy, target), entries.get((policy, None))) for target in targets]
            notes = {_note(cell) for cell in found if cell is not None}
            named = f"`{policy}`" + "".join(f" ({note})" for note in sorted(notes - {""}))
            lines += [f"| {named} | " + " | ".join("" if cell is None else entry(cell) for cell in found) + " |"]
        if not all(cell.on_target for cell in mine):
            lines += ["", f"\\* more than {100 * _TOLERANCE:g} % off the asked share of bytes"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _note(cell: Cell) -> str:
    """Why a policy has the same entry at every target; "" if it follows the target."""
    if not cell.outcome.budget_applies:
        return "no budget"
    return "budgets of its own" if cell.target is None else ""


def entry(cell: Cell) -> str:
    """Value, standard error and share of bytes, as tables show them; a star marks bytes that are off the target.

    Example:
        >>> from kvjax.evals.compare import Cell, entry
        >>> from kvjax.evals.measure import Outcome
        >>> facts = {"value": 0.5, "cache_bytes": 1e6, "full_cache_bytes": 4e6, "count": 4, "standard_error": 0.29}
        >>> entry(Cell(0.25, Outcome.of("needle", kvjax.SnapKV(budget=64), "score", **facts)))
        '0.500 ± 0.290 (25 %)'
    """
    error = cell.outcome.standard_error
    deviation = "" if error is None else f" ± {error:.3f}"
    return f"{cell.outcome.value:.3f}{deviation} ({100 * cell.share:.0f} %{'' if cell.on_target else ' *'})"


def comma_separated(cells: Sequence[Cell]) -> str:
    """All entries as CSV.

    Example:
        >>> from kvjax.evals.compare import Cell, comma_separated
        >>> from kvjax.evals.measure import Outcome
        >>> facts = {"value": 0.5, "cache_bytes": 1e6, "full_cache_bytes": 4e6, "count": 4, "standard_error": 0.29}
        >>> cell = Cell(0.25, Outcome.of("needle", kvjax.SnapKV(budget=64), "score", **facts))
        >>> comma_separated([cell]).splitlines()[0].split(",")[:4]
        ['task', 'policy', 'target', 'budget']
    """
    rows = [cell.row() for cell in cells]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _labels(policies: Sequence[Policy]) -> dict[Policy, str]:
    """Names of policies; of several with one name, their texts with hyperparameters."""
    count = Counter(policy.info.name for policy in dict.fromkeys(policies))
    return {policy: policy.info.name if count[policy.info.name] == 1 else str(policy) for policy in policies}


def _on_target(share: float, target: float | None) -> bool:
    return target is None or abs(share / target - 1) <= _TOLERANCE


def _write(out: Path, params: Params, cells: Sequence[Cell], mesh: Mesh | None) -> None:
    """The table so far, in all forms."""
    rows = [{"target": cell.target, **dataclasses.asdict(cell.outcome)} for cell in cells]
    # The fingerprint gathers weights from all processes.
    content = {"header": header(mesh, model=model_fingerprint(params)), "rows": rows}
    if not is_first(mesh):
        return
    write(out / "table.json", strict_json.dumps(content, indent=1) + "\n")
    write(out / "table.md", markdown(cells))
    write(out / "table.csv", comma_separated(cells))
