"""Make docs/reproduction.md and docs/claims/ from the result files. Claims are judged here; verdicts are not stored."""

import importlib
import pkgutil
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, get_args

from benchmarks import report
from reproduction import claims

from . import times
from .claim import MEASURES, Claim, Pair, Row, Table, Verdict, table

PAPERS = {
    "treekv": "TreeKV",
    "chelsea": "Chelsea",
    "clusterkv": "ClusterKV",
    "chunkkv": "ChunkKV",
    "catekv": "CateKV",
}
"""Titles of the papers' pages, in their order."""

CONCLUSIONS = {
    "treekv": "TreeKV has the lowest perplexity of the four small caches in books of 4k to 16k tokens. Only its advantage over H2O at 4k is undecided.",
    "chelsea": "Chelsea decodes faster and takes less memory than the full cache, as claimed. At a quarter of the cache it finds more needles than "
    "StreamingLLM and CaM with Qwen, and fewer with SmolLM2. With Qwen it finds fewer than SnapKV, which selects tokens by the "
    "question at the end of the prompt. Where the question follows the compressed prompt, Chelsea scores higher than StreamingLLM and SnapKV with half "
    "and with a quarter of the bytes ([leaderboard](LEADERBOARD)).",
    "clusterkv": "ClusterKV recalls more of the important tokens than Quest with both models, except at the smallest budget with Qwen. Clustering by cosine "
    "similarity recalls more than clustering by inner product in most comparisons, and no more than by L2 distance. With Qwen and a "
    "budget of 1024, its perplexity is within 0.5 of the full cache's, and lower than Quest's and InfiniGen's.",
    "chunkkv": "ChunkKV finds more needles than H2O and StreamingLLM with both models, and more than SnapKV with SmolLM2. With SmolLM2, chunks of 30 "
    "find more than the paper's chunks of 10; with Qwen the difference is undecided. With Qwen, ChunkKV solves fewer problems of GSM8K "
    "than SnapKV and StreamingLLM. These comparisons get no verdict, because the full cache is not significantly better than StreamingLLM.",
    "catekv": "In its consistent heads, CateKV selects tokens only once. They receive nearly as much attention as those that Quest selects for each query. "
    "CateKV decodes faster and takes less memory than the full cache at 500 thousand tokens.",
}
"""What a paper's page begins with. tests/reproduction/test_papers.py compares each sentence with the verdicts."""

INTRODUCTION = """\
# Checks of published claims

**Most comparisons with a verdict hold.** Each compares one method with one other, and the table counts them. For quality, models are smaller than the papers'
and most texts are shorter, so a failed check does not refute a paper.
"""

RULES = """\
## How claims are judged

Methods are compared sample by sample; a sample is a book or a question. The difference of each pair is tested with Student's t at 95 %.

- **holds**: the difference is significant and in favour of the claim.
- **fails**: the difference is significant and against the claim.
- **undecided**: the difference is not significant.

If a claim allows a margin, a loss within the margin does not count against it. Such a claim holds if the loss is significantly below the margin, and fails
if it is significantly above. A comparison gets no verdict in these cases:

- *proxy*: the measure is not the paper's, or it compares caches instead of quality.
- *no headroom*: the full cache and StreamingLLM do not differ significantly, so the test may not show what a cache loses.
- *bound*: the other result is an upper bound for every method, or for the other method itself. Falling short of it is no failure.
- *not judged*: StreamingLLM was not measured, so the headroom is unknown.

Perplexity is dominated by nearby tokens, so it says little about recall of distant text. Needles, RULER and questions about a text measure that.

`python -m reproduction.papers --model MODEL` measures all claims and writes these pages. With `--seconds` it stops early, and the next run continues.
"""

NOT_MEASURED = """\
## Not measured

No result file has numbers for these claims.
"""

Contents = Sequence[Mapping[str, Any]]
"""Result files, one for each model, in the order of the page."""


def sections() -> dict[str, ModuleType]:
    """All sections by name, in the order of the pages: modules that measure and have claims."""
    names = [found.name for found in pkgutil.iter_modules(claims.__path__)]
    modules = {name: importlib.import_module(f"reproduction.claims.{name}") for name in names}
    found = {name: module for name, module in modules.items() if hasattr(module, "CLAIMS")}
    order = list(PAPERS)
    return dict(sorted(found.items(), key=lambda item: (order.index(paper_of(item[0])), item[0])))


def paper_of(section: str) -> str:
    """The paper of a section's name."""
    return section.split("_")[0]


def model(content: Mapping[str, Any]) -> str:
    """What the pages call a file's model."""
    return content["header"]["settings"]["model"].partition(" (")[0].removesuffix(".gguf").partition("-Instruct")[0]


def render(contents: Contents) -> dict[str, str]:
    """The pages, by their path in docs/, from the contents of result files."""
    found = _Found(contents)
    timed = times.recorded()
    pages = {f"claims/{paper}.md": _paper(paper, found, timed) for paper in PAPERS}
    return {"reproduction.md": _findings(found, timed), **pages}


class _Found:
    """Sections, and what each model's file has of them.

    Attributes:
        sections: modules by name.
        models: names of the models.
        rows: each model's sections of the result file, by name.
        tables: each model's numbers, by section.
    """

    def __init__(self, contents: Contents):
        self.sections = sections()
        self.models = [model(content) for content in contents]
        self.headers = [content["header"] for content in contents]
        self.rows = [{row["section"]: row for row in content["rows"]} for content in contents]
        self.tables = [
            {name: table(of[name]["rows"] if name in of else []) for name in self.sections} for of in self.rows
        ]

    def of(self, paper: str) -> dict[str, ModuleType]:
        """A paper's sections."""
        return {name: module for name, module in self.sections.items() if paper_of(name) == paper}

    def measured(self, section: str, claim: Claim) -> list[Pair]:
        """A claim's comparisons that some model has numbers for."""
        return [
            pair for pair in claim.pairs if any(pair.verdict(each[section]) != "not measured" for each in self.tables)
        ]


def verdicts(contents: Contents) -> dict[tuple[str, str], list[tuple[Pair, Verdict]]]:
    """Comparisons with their verdicts, by section and model; those without numbers are not included."""
    found = _Found(contents)
    of_all = {}
    for name, module in found.sections.items():
        for title, tables in zip(found.models, found.tables, strict=True):
            judged = [(pair, pair.verdict(tables[name])) for claim in module.CLAIMS for pair in claim.pairs]
            of_all[name, title] = [(pair, verdict) for pair, verdict in judged if verdict != "not measured"]
    return of_all


def _findings(found: _Found, timed: Mapping[str, Any]) -> str:
    """The first page: a table of counts, conclusions, rules, what was not measured, and the other pages."""
    conclusions = [
        f"- **[{title}](claims/{paper}.md)**: {CONCLUSIONS[paper].replace('LEADERBOARD', 'leaderboard.md')}"
        for paper, title in PAPERS.items()
    ]
    measured = [
        f"Quality: {header['settings']['model']} (`{header['settings']['fingerprint']}`) in {header['settings']['dtype']} on "
        f"{header['device']}; {', '.join(f'{name} {version}' for name, version in header['versions'].items())}.\n"
        for header in found.headers
    ]
    parts = [INTRODUCTION, _counts(found, timed), "## Findings\n", "\n".join(conclusions) + "\n", RULES]
    parts += [f"{NOT_MEASURED}\n{_not_measured(found)}", "## Models and versions\n", *measured, times.PROVENANCE]
    parts.append("```{toctree}\n:hidden:\n\n" + "\n".join(f"claims/{paper}" for paper in PAPERS) + "\n```\n")
    return "\n".join(parts)


def _counts(found: _Found, timed: Mapping[str, Any]) -> str:
    """How many comparisons of each paper hold, by model."""
    kinds = get_args(Verdict)
    judged, others = kinds[:3], kinds[3:-1]
    lines = []
    for paper, title in PAPERS.items():
        of_paper = [
            (
                name,
                Counter(
                    pair.verdict(tables[section])
                    for section, module in found.of(paper).items()
                    for pair in _pairs(module)
                ),
            )
            for name, tables in zip(found.models, found.tables, strict=True)
        ]
        of_paper.append((times.MODEL, Counter(factor.verdict(timed["rows"]) for factor in times.of(paper))))
        lines += [
            [
                f"[{title}](claims/{paper}.md)",
                name,
                *(str(counts[each]) for each in judged),
                str(sum(counts[each] for each in others)),
            ]
            for name, counts in of_paper
            if sum(counts[each] for each in kinds[:-1])
        ]
    return report.table(["paper", "model", *judged, "no verdict"], lines, "llrrrr") + "\n"


def _pairs(module: ModuleType) -> Iterator[Pair]:
    return (pair for claim in module.CLAIMS for pair in claim.pairs)


def _not_measured(found: _Found) -> str:
    """Claims without numbers of any model, by paper and section."""
    lines = []
    for paper, title in PAPERS.items():
        lines.append(f"**{title}**\n")
        for section, module in found.of(paper).items():
            left = [claim for claim in module.CLAIMS if len(found.measured(section, claim)) < len(claim.pairs)]
            lines += [
                f"- {claim.says}{_against(found, section, claim)} ({claim.where}; {claim.measure}{_place(claim)})."
                for claim in left
            ]
        lines.append("")
    return "\n".join(lines)


def _place(claim: Claim) -> str:
    """A claim's place, if the claim does not name it."""
    there, said = (set(re.findall(r"\w+", text.lower())) for text in (claim.at, claim.says))
    return "" if there <= said else f", {claim.at}"


def _against(found: _Found, section: str, claim: Claim) -> str:
    """The methods that a claim was not compared with, where it was compared with others."""
    there = [pair.other for pair in found.measured(section, claim)]
    return f", against {', '.join(f'`{other}`' for other in claim.others if other not in there)}" if there else ""


def _paper(paper: str, found: _Found, timed: Mapping[str, Any]) -> str:
    """A paper's page: what was found, then a section for each thing that was measured."""
    parts = [
        f"# Claims of {PAPERS[paper]}\n",
        f"**{CONCLUSIONS[paper].replace('LEADERBOARD', '../leaderboard.md')}**\n",
        f"The method: [{PAPERS[paper]}](../methods/{paper}.md). [Checks of published claims](../reproduction.md) explains "
        "the verdicts, and lists claims that were not measured.\n",
    ]
    for section, module in found.of(paper).items():
        there = [index for index, of in enumerate(found.rows) if section in of]
        if there:
            parts += _section(section, module, found, there)
    if times.of(paper):
        parts.append(times.render(paper, timed))
    return "\n".join(parts)


def _section(section: str, module: ModuleType, found: _Found, there: Sequence[int]) -> list[str]:
    """A section's text, claims, verdicts, and all numbers."""
    title = module.TITLE.partition(": ")[2]
    parts = [f"## {title[0].upper()}{title[1:]}\n", f"{module.ABOUT}\n"]
    parts += _meanings(row.measure for index in there for row in found.tables[index][section].values())
    measured = [(claim, pairs) for claim in module.CLAIMS if (pairs := found.measured(section, claim))]
    settings = {claim.setting for claim, _ in measured}
    lines = []
    for number, (claim, _) in enumerate(measured, 1):
        setting = f" ({claim.setting})" if len(settings) > 1 and claim.setting else ""
        lines.append(f"{number}. {claim.says}. *{claim.where}:* {claim.paper}{setting}.")
    if len(settings) == 1 and settings != {""}:
        parts.append(f"The paper's setting: {settings.pop()}.\n")
    parts += ["\n".join(lines) + "\n", _claims([pairs for _, pairs in measured], found, section, there)]
    for index in there:
        name, rows = found.models[index], found.tables[index][section]
        about = ", ".join(f"{key} {value}" for key, value in found.rows[index][section]["settings"].items())
        parts += [f"Means with {name} ({about}; {_samples(rows)} samples):\n", _numbers(list(rows.values()))]
    return parts


def _meanings(names: Iterable[str]) -> list[str]:
    """A line about the measures that have a meaning for pages, if there are any."""
    meanings = {name: MEASURES[name].meaning for name in names}
    told = [f"*{name[0].upper()}{name[1:]}*: {meaning}." for name, meaning in meanings.items() if meaning]
    return [" ".join(told) + "\n"] if told else []


def _claims(of_claims: Sequence[Sequence[Pair]], found: _Found, section: str, there: Sequence[int]) -> str:
    """A row for each comparison: the claim's number, the rule, and each model's numbers and verdict."""
    heads = ["claim", "rule", *(head for index in there for head in (found.models[index], "verdict"))]
    lines = []
    for number, pairs in enumerate(of_claims, 1):
        for pair in pairs:
            of_models = (found.tables[index][section] for index in there)
            cells = [cell for each in of_models for cell in (pair.ours(each), pair.verdict(each))]
            lines.append([str(number), f"{pair.rule} ({pair.claim.at})", *cells])
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
