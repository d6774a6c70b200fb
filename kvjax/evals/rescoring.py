"""Score the answers of a result file again, after a scorer has changed: the model does not run."""

import datetime
from pathlib import Path
from typing import Any

from kvjax._util import files, json_lines, strict_json
from kvjax._version import __version__

from .report import read
from .runner import Evaluation, Row
from .task import Example, Task


def rescore(path: str | Path, task: Task, out: str | Path | None = None) -> Evaluation:
    """Score all answers of a file that `evaluate` or `kvjax eval` has written.

    Answers, references and classes are those of the file, so the task's own files are not read. The header of the new file records the
    version of kvjax that scored it.

    Args:
        path: the result file.
        task: what scores the answers, with the settings of the run, such as `GSM8K("test.jsonl", None, shots=0)`.
        out: where to write; by default the file is replaced.

    Raises:
        ValueError: the file is not a result file, its rows are not answers, or it is of another task.

    Example:
        >>> import pathlib, tempfile
        >>> task = kvjax.evals.NeedleInAHaystack(lengths=(254,), depths=(0.0, 1.0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder, "needle.jsonl")
        ...     result = kvjax.evals.evaluate(chat, task, "streaming_llm", budget=128, out=file)
        ...     kvjax.evals.rescore(file, task).score == result.score
        True
    """
    path = Path(path)
    begun, lines = read(path)
    name = begun["settings"].get("task", {}).get("name")
    if name != task.name:
        raise ValueError(f"{path} has answers to {name}, not to {task.name}; give the task that made it")
    rows = [_scored(path, number, line, task) for number, line in lines]
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    begun = {**begun, "rescored": {"date": now, "kvjax": __version__}}
    files.write(
        path if out is None else out, "".join(strict_json.dumps(line) + "\n" for line in ({"header": begun}, *rows))
    )
    return Evaluation(begun, sorted(rows, key=lambda row: row["example"]))


def _scored(path: Path, number: int, line: bytes, task: Task) -> dict[str, Any]:
    """A row with its new score."""
    row: Row = json_lines.parsed(path, number, line, Row)
    example = Example(
        context="",
        question="",
        answers=tuple(row.answers),
        max_new_tokens=1,
        labels=row.labels,
        choices=tuple(row.choices),
    )
    return strict_json.loads(line) | {"score": task.score(row.answer, example)}
