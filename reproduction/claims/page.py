"""Make docs/reproduction.md from the result files. Claims are judged here; verdicts are not stored."""

import importlib
import pkgutil
from collections import Counter
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, get_args

from benchmarks import report
from reproduction import claims

from . import times
from .claim import Claim, Row, Table, Verdict, table

ORDER = ("treekv", "chelsea", "clusterkv", "chunkkv", "catekv")
"""Of the papers' sections on the page."""

INTRODUCTION = """\
# Reproduction

What the five papers claim about quality, tested here on other models, texts and sizes than theirs, which each section gives.
`python -m reproduction.papers --model MODEL` measures (with `--seconds` for so long; the next run goes on), and
writes this page from what it has measured.

Methods are compared sample by sample (a book, or a question), each pair by itself. By the paper's own measure (RULER,
LongBench, GSM8K, perplexity, recall, needles) a claim **holds** if the mean difference is in its favour and its 95 % interval
(Student's t, ± in the tables) does not reach zero, **fails** if it is as clearly against it, and else is **undecided**. A margin, where
a claim has one, is taken off the difference. There is no verdict

- where the measure is another than the paper's: a *proxy*;
- where there is *no headroom*: the full cache and StreamingLLM, which forgets all but the latest tokens, are not told apart
  by the same rule, so nothing else can be;
- against an upper *bound*, which everything falls short of.

Perplexity of the text that follows rewards knowing the latest tokens: what is near predicts most of what comes next. So it says
little of whether a method still has what stands far back, which needles, RULER and questions about a text ask for.
"""

Contents = Sequence[Mapping[str, Any]]
"""Result files, one for each model, in the order of the page."""


def sections() -> dict[str, ModuleType]:
    """All sections by name, in the order of the page: modules that measure and have claims."""
    names = [found.name for found in pkgutil.iter_modules(claims.__path__)]
    modules = {name: importlib.import_module(f"reproduction.claims.{name}") for name in names}
    found = {name: module for name, module in modules.items() if hasattr(module, "CLAIMS")}
    return dict(sorted(found.items(), key=lambda item: (ORDER.index(item[0].split("_")[0]), item[0])))


def render(contents: Contents) -> str:
    """The page, of result files' contents."""
    modules = sections()
    measured = [{row["section"]: row for row in content["rows"]} for content in contents]
    tables = [{name: table(of[name]["rows"] if name in of else []) for name in modules} for of in measured]
    models = [model(content) for content in contents]
    parts = [INTRODUCTION, *(_measured_with(content) for content in contents)]
    for name, each in zip(models, tables, strict=True):
        parts += [f"{name}:\n", _summary({section: module.CLAIMS for section, module in modules.items()}, each)]
    for section, module in modules.items():
        parts.append(f"## {module.TITLE}\n\n{module.ABOUT}\n")
        there = [
            (name, of[section], each[section])
            for name, of, each in zip(models, measured, tables, strict=True)
            if section in of
        ]
        for name, row, each in there:
            about = ", ".join(f"{key} {value}" for key, value in row["settings"].items())
            parts.append(f"{name}: {about}; {_samples(each)} samples.\n")
        if absent := [name for name, of in zip(models, measured, strict=True) if section not in of]:
            parts.append(f"Not measured yet with {', '.join(absent)}.\n" if there else "Not measured yet.\n")
        parts.append(_claims(module.CLAIMS, [name for name, *_ in there], [each for *_, each in there]))
        for name, _, each in there:
            parts += [f"{name}, means of all that was measured:\n", _numbers(list(each.values()))]
    parts.append(times.render(times.recorded()))
    return "\n".join(parts)


def model(content: Mapping[str, Any]) -> str:
    """What the page calls a file's model."""
    return content["header"]["settings"]["model"].partition(" (")[0].removesuffix(".gguf")


def _measured_with(content: Mapping[str, Any]) -> str:
    header, settings = content["header"], content["header"]["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    return (
        f"Measured with {settings['model']} (`{settings['fingerprint']}`) in {settings['dtype']} on {header['device']}; "
        f"{versions}.\n"
    )


def _summary(of_sections: Mapping[str, Sequence[Claim]], tables: Mapping[str, Table]) -> str:
    """How many comparisons of each section hold."""
    verdicts = get_args(Verdict)
    lines = []
    total: Counter[str] = Counter()
    for name, of_section in of_sections.items():
        counts = Counter(pair.verdict(tables[name]) for claim in of_section for pair in claim.pairs)
        total += counts
        lines.append([f"`{name}`", *(str(counts[verdict]) for verdict in verdicts)])
    lines.append(["all", *(str(total[verdict]) for verdict in verdicts)])
    return report.table(["section", *verdicts], lines) + "\n"


def _claims(of_section: Sequence[Claim], models: Sequence[str], measured: Sequence[Table]) -> str:
    """A row for each pair of methods: what the paper says, the rule, and of every model what was found and what that amounts to."""
    heads = ["claim", "in the paper", "rule", *(name for model in models for name in (model, "verdict"))]
    lines = []
    for pair in (pair for claim in of_section for pair in claim.pairs):
        claim = pair.claim
        found = [cell for each in measured for cell in (pair.ours(each), pair.verdict(each))]
        lines.append([claim.says, f"{claim.where}: {claim.paper}", f"{pair.rule} ({claim.at})", *found])
    return report.table(heads, lines, "l") + "\n"


def _samples(measured: Table) -> str:
    counts = sorted({len(row.samples) for row in measured.values()})
    return " or ".join(map(str, counts))


def _numbers(rows: Sequence[Row]) -> str:
    """A row a method, a column for each measure and place."""
    columns = list(dict.fromkeys((row.measure, row.at) for row in rows))
    places, kinds = {at for _, at in columns}, {measure for measure, _ in columns}
    titles = [measure if len(places) == 1 else at if len(kinds) == 1 else f"{measure}, {at}" for measure, at in columns]
    caption = rows[0].measure if len(kinds) == 1 and len(places) > 1 else "method"
    shown = {(row.method, row.measure, row.at): row.shown for row in rows}
    methods = dict.fromkeys(row.method for row in rows)
    lines = [[f"`{method}`", *(shown.get((method, *column), "") for column in columns)] for method in methods]
    return report.table([caption, *titles], lines) + "\n"
