"""docs/reproduction.md, from the result file alone; the rules by which claims are judged are applied here, not stored."""

import importlib
import pkgutil
from collections import Counter
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from benchmarks import reproduction_claims

from .claim import Claim, Row, Table, table

ORDER = ("treekv", "chelsea", "clusterkv", "chunkkv", "catekv")
"""Of the papers' sections on the page."""

INTRODUCTION = """\
# Reproduction

What the five papers claim about quality, tested here: on another model, other texts and other sizes than theirs, all
of which each section gives. `python -m benchmarks.reproduction` measures, and writes this page from what it has
measured.

Where a section compares methods, it compares them sample by sample (a book, or a question). A claim **holds**
("yes") if the mean difference is in its favour by more than two standard errors of that mean, against every method
that it names; it **fails** ("no") if it is as clearly against it for any of them; else it is **undecided**. A
margin, where a claim has one, is taken off the difference. A claim that fails here need not be wrong where the paper
tested it: this model is far smaller, and in most sections the measure is another one.
"""


def sections() -> dict[str, ModuleType]:
    """All sections by name, in the order of the page: modules that measure and have claims."""
    names = [found.name for found in pkgutil.iter_modules(reproduction_claims.__path__)]
    modules = {name: importlib.import_module(f"benchmarks.reproduction_claims.{name}") for name in names}
    found = {name: module for name, module in modules.items() if hasattr(module, "CLAIMS")}
    return dict(sorted(found.items(), key=lambda item: (ORDER.index(item[0].split("_")[0]), item[0])))


def render(content: Mapping[str, Any]) -> str:
    """The page, of a result file's content."""
    header, measured = content["header"], {row["section"]: row for row in content["rows"]}
    modules = sections()
    tables = {name: table(measured[name]["rows"] if name in measured else []) for name in modules}
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    settings = header["settings"]
    parts = [
        INTRODUCTION,
        f"Measured with {settings['model']} in {settings['dtype']} on {header['device']}; {versions}.\n",
        _summary({name: module.CLAIMS for name, module in modules.items()}, tables),
    ]
    for name, module in modules.items():
        if name not in measured:
            parts.append(
                f"## {module.TITLE}\n\n{module.ABOUT}\n\nNot measured.\n\n{_claims(module.CLAIMS, tables[name])}"
            )
            continue
        about = ", ".join(f"{key} {value}" for key, value in measured[name]["settings"].items())
        parts += [
            f"## {module.TITLE}\n\n{module.ABOUT}\n\nHere: {about}.\n",
            _claims(module.CLAIMS, tables[name]),
            f"All that was measured, means over {_samples(tables[name])} samples:\n",
            _numbers(list(tables[name].values())),
        ]
    return "\n".join(parts)


def _summary(claims: Mapping[str, Sequence[Claim]], tables: Mapping[str, Table]) -> str:
    """How many claims of each section hold."""
    verdicts = ("yes", "no", "undecided", "not measured")
    lines = ["| section | holds | fails | undecided | not measured |", "| --- |" + " ---: |" * len(verdicts)]
    for name, of_section in claims.items():
        counts = Counter(claim.verdict(tables[name]) for claim in of_section)
        lines.append(f"| `{name}` | " + " | ".join(str(counts[verdict]) for verdict in verdicts) + " |")
    return "\n".join(lines) + "\n"


def _claims(claims: Sequence[Claim], measured: Table) -> str:
    """A row a claim: what the paper says, what was found here, the rule, and whether it holds."""
    lines = ["| claim | in the paper | here | rule | holds |", "| --- | --- | --- | --- | --- |"]
    for claim in claims:
        verdict = claim.verdict(measured)
        here = "" if verdict == "not measured" else f"{claim.ours(measured)} ({claim.at})"
        cells = claim.says, f"{claim.where}: {claim.paper}", here, claim.rule, verdict
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _samples(measured: Table) -> str:
    counts = sorted({len(row.samples) for row in measured.values()})
    return " or ".join(map(str, counts))


def _numbers(rows: Sequence[Row]) -> str:
    """A row a method, a column for each measure and place."""
    columns = list(dict.fromkeys((row.measure, row.at) for row in rows))
    places, kinds = {at for _, at in columns}, {measure for measure, _ in columns}
    titles = [measure if len(places) == 1 else at if len(kinds) == 1 else f"{measure}, {at}" for measure, at in columns]
    caption = f"{rows[0].measure if len(kinds) == 1 and len(places) > 1 else 'method'}"
    lines = [f"| {caption} | " + " | ".join(titles) + " |", "| --- |" + " ---: |" * len(columns)]
    shown = {(row.method, row.measure, row.at): row.shown for row in rows}
    for method in dict.fromkeys(row.method for row in rows):
        lines.append(f"| `{method}` | " + " | ".join(shown.get((method, *column), "") for column in columns) + " |")
    return "\n".join(lines) + "\n"
