"""Pages and tables of methods.

docs/methods/NAME.md has what is written by hand: the idea, the lines of code, limits, and in its front matter

- paper: the paper's address.
- blocks: by what the method chooses after each block of a prompt. Without it the method needs whole prompts.
- budget: what a budget is of, where only some heads have it.

All else is added here: facts and options from the policy and its docstring, figures from result files, and limits that several methods have
from docs/limits.md.
"""

import dataclasses
import inspect
import re
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from benchmarks import tables as speed_tables
from kvjax._util.extras import import_matplotlib
from kvjax.config import PRESETS
from kvjax.policies import Full, Policy, get_policy, policies
from reproduction import tables

DOCS = Path(__file__).parents[1]
LINES = "## The lines that do it"
LIMITS = "## Limits\n"


MEMORY = {
    "full": "everything is kept",
    "freed": "what is dropped takes no memory",
    "sparse": "everything is kept, and a part of it read",
    "quantized": "everything is kept, in fewer bits",
}
IN_SHORT = {
    "full": "all kept",
    "freed": "freed",
    "sparse": "all kept, a part read",
    "quantized": "all kept, fewer bits",
}
STAGE = {
    "none": "never",
    "prompt": "once, when the prompt has been read",
    "decoding": "while decoding",
    "both": "when the prompt has been read, and while decoding",
}
WHOLE = "not supported: it needs the whole prompt"
POSITIONS = {"original": "as in the text", "cache_rank": "a token's place among those that are kept"}


def complete(app: Sphinx, docname: str, content: list[str]) -> None:
    """Add to a method's page what is not written by hand."""
    folder, _, name = docname.partition("/")
    if folder != "methods" or name not in policies():
        return
    before, mark, lines = content[0].partition(LINES)
    if not mark:
        raise ValueError(f"docs/{docname}.md has no heading {LINES!r}; the rest of the page is put around it")
    lines, _, own = lines.partition(LIMITS)
    content[0] = "\n\n".join(
        [
            before.strip(),
            _facts(name),
            _picture(name),
            "## As it is here",
            _prose(name),
            f"{mark}\n\n{lines.strip()}",
            "## Options",
            _options(name),
            "## What it costs",
            _costs(name),
            "## Where it wins and loses",
            _measured(name),
            *_limits(name, own.strip()),
            *_citation(name),
        ]
    )


def page(name: str) -> tuple[dict[str, str], str]:
    """The front matter of a method's page, and its title."""
    _, facts, text = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(facts), text.strip().partition("\n")[0].removeprefix("# ")


def _facts(name: str) -> str:
    about, (written, _) = policies()[name].about, page(name)
    budget = "is of all tokens"
    if about.memory == "sparse":
        budget = "is what a query reads; nothing is dropped"
    elif about.budget_excludes_new_tokens:
        budget = "is of the prompt, and new tokens are kept in addition"
    facts = {
        "Asked for as": f"`{name}`, or `kvjax.policies.{policies()[name].__name__}(...)`",
        "Keeps": about.summary,
        "Memory": MEMORY[about.memory],
        "Compresses": STAGE[about.stage],
        "Prompts in blocks": f"chooses after each by {written['blocks']}" if "blocks" in written else WHOLE,
        "Positions": POSITIONS[about.positions],
        "A budget": written.get("budget", budget) if about.takes_budget else "has no effect",
    }
    rows = "\n".join(f"* - {key}\n  - {value}" for key, value in facts.items())
    return f"```{{list-table}}\n:widths: 20 80\n\n{rows}\n```"


def _picture(name: str) -> str:
    about = policies()[name].about
    if about.trained:
        return "*There is no picture of it: its weights do not come with kvjax, and none were published for SmolLM2-135M-Instruct.*"
    if name == "fp8":
        alt = "Keys of one head as they are, and the errors that 8-bit floats make, by position and channel"
    elif name in ("kivi", "turboquant"):
        alt = "Keys of one head as they are, and the errors that 4 and 2 bits make, by position and channel"
    elif name == "shadowkv":
        alt = "Which positions have exact keys at each step of a run; the others are rebuilt from low rank"
    elif about.memory == "sparse":
        alt = f"Which positions of a text queries of one layer read at each step under {name}"
    else:
        alt = f"Which positions of a text the cache holds at each step under {name}: {about.summary}"
    return (
        f"![{alt}](/pictures/{name}.png)\n\n"
        "*SmolLM2-135M-Instruct reads the opening of Moby-Dick and goes on; `python docs/draw_methods.py` draws it.*"
    )


def _docstring(name: str) -> tuple[str, str]:
    prose, _, fields = (inspect.getdoc(policies()[name]) or "").partition("Attributes:\n")
    return prose.strip(), textwrap.dedent(fields)


def _prose(name: str) -> str:
    return _docstring(name)[0].replace("*", "\\*")


def _options(name: str) -> str:
    fields = dataclasses.fields(policies()[name])
    if not fields:
        return "It has none."
    meanings: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", _docstring(name)[1]):
        names, _, meaning = entry.partition(":")
        meanings |= dict.fromkeys(map(str.strip, names.split(",")), " ".join(meaning.split()))
    lines = ["| option | default | what it is |", "| --- | --- | --- |"]
    for field in fields:
        meaning = meanings[field.name].replace("|", "\\|")
        lines.append(f"| `{field.name}` | `{field.default!r}` | {meaning} |")
    return "\n".join(lines)


def _costs(name: str) -> str:
    """Bytes, which are known without running anything, and time, where it has been measured."""
    parts = [_bytes(name)]
    if speed := speed_tables.speed_of(name):
        parts += ["Time per token on an H200, Llama-3.1-8B's shape, random weights ([speed](/speed.md)):", speed]
    else:
        parts.append("Its speed has not been measured yet in a decoding step ([speed](/speed.md) has those that were).")
    return "\n\n".join(parts)


def _bytes(name: str) -> str:
    about = policies()[name].about
    if about.trained:
        return "What it holds depends on its weights; `kvjax plan` and `policy.nbytes` tell it."
    policy = get_policy(name, budget=0.25) if about.takes_budget else get_policy(name)
    shape, lengths = "llama-3.1-8b", (32768, 131072)
    if name in PROFILED:
        shape, lengths = "smollm2-135m", (2048, 8192)

    def cells(policy: Policy) -> list[str]:
        return [f"{policy.nbytes(PRESETS[shape], 1, length, NEW_TOKENS) / 1e6:,.0f} MB" for length in lengths]

    lines = [
        "| policy | " + " | ".join(f"{length // 1024}k tokens" for length in lengths) + " |",
        "| --- |" + " ---: |" * len(lengths),
        *(f"| `{row}` | {' | '.join(cells(row))} |" for row in dict.fromkeys((policy, Full()))),
    ]
    what = f"What it holds of one text and {NEW_TOKENS} new tokens, of the shape of `{shape}` in bfloat16, as `policy.nbytes` tells before anything runs:"
    return what + "\n\n" + "\n".join(lines)


NEW_TOKENS = 512
PROFILED = ("catekv", "duoattention", "triattention")
"""Methods that want a profile of the model's heads: theirs are bytes of a model for which one comes with kvjax."""


def _measured(name: str) -> str:
    parts: list[str] = []
    if quality := tables.quality_of(name):
        parts += [
            "On an H200 SmolLM2-135M-Instruct read 7168 tokens of each of three texts under the policy, then 1024 more one by one "
            "([quality](/quality.md) says how). The full cache has "
            f"{tables.full_quality()}.",
            quality,
        ]
        if name != "full":
            draw_quality(DOCS / "pictures" / "quality" / f"{name}.svg", name)
            parts.append(
                f"![Share of top-1 tokens that are the full cache's, over bytes of cache: {name} among all methods measured]"
                f"(/pictures/quality/{name}.svg)"
            )
            better, worse = tables.rivals_of(name)
            said = [
                f"{what}: {', '.join(f'`{other}`' for other in others) or 'none'}."
                for what, others in (
                    ("At 25 %, nearer to the full cache with no more bytes", better),
                    ("Farther from it with no fewer bytes", worse),
                )
            ]
            parts.append(" ".join(said))
    if needles := tables.needles_of(name):
        parts += [
            "What of 48 needles the same model found in prompts of up to 8,192 tokens, at 25 %: with the question unseen, which comes when the prompt has been "
            "read and cut, and seen, at the prompt's end; and perplexity after 48 passages of novels "
            "([quality](/quality.md#reading-in-blocks)). In blocks the prompt is cut as it is read.",
            needles,
        ]
    if not parts:
        parts.append("Its quality has not been measured yet beside the other methods'.")
    if name == "infinigen":
        parts.append("These were measured with `alpha` 4 and 13 of 64 channels; the defaults are 5 and up to 24.")
    return "\n\n".join(parts)


def _limits(name: str, own: str) -> list[str]:
    """The page's own limits, and items of docs/limits.md whose first sentence speaks of the method by its title."""
    title = page(name)[1]
    text = (DOCS / "limits.md").read_text(encoding="utf-8")
    found = [
        item.partition("\n\n")[0].strip()  # without the heading of the next section
        for item in re.split(r"\n(?=- )", text)
        if re.search(rf"\b{re.escape(title)}\b", item.split(". ")[0])
    ]
    # Links as they are from docs/methods, a folder further down.
    found = [re.sub(r"\]\((?!\w+:|#)", "](../", item) for item in found]
    return ["## Limits", "\n".join(filter(None, [own, *found]))] if own or found else []


def _citation(name: str) -> list[str]:
    if "paper" not in page(name)[0]:
        return []
    authors, year, title = _paper(name)
    address = page(name)[0]["paper"]
    author = authors.replace(" et al.", " and others")
    entry = f"@misc{{{name},\n  title = {{{title}}},\n  author = {{{author}}},\n  year = {{{year}}},\n  url = {{{address}}},\n}}"
    return ["## Citation", f"{authors} {year}, [{title}]({address})", f"```bibtex\n{entry}\n```"]


def _paper(name: str) -> tuple[str, str, str]:
    """Authors, year and title."""
    match = re.fullmatch(r"(.+?) (\d{4}), (.+)", policies()[name].about.paper, flags=re.DOTALL)
    assert match, f"{name}: about.paper is not 'authors year, title'"
    return match[1], match[2], match[3]


def draw_quality(path: Path, marked: str) -> None:
    """All methods' agreement with the full cache over the bytes that they hold, one of them marked."""
    figures, _ = import_matplotlib()
    far_below = {"full", "random", "knorm"} - {marked}
    rows = [row for row in tables.measured_quality() if row["policy"] not in far_below]
    figure = figures.Figure(figsize=(7, 3.6), layout="constrained")
    panel = figure.subplots()
    for policy in dict.fromkeys(row["policy"].split(",")[0] for row in rows):
        mine = sorted(
            (row["cache_bytes"] / 1e6, 100 * row["agreement"]) for row in rows if row["policy"].split(",")[0] == policy
        )
        style: dict[str, Any] = {"color": "0.7", "marker": "o", "markersize": 3, "linewidth": 0.8}
        if policy == marked:
            style = {
                "color": "#D55E00",
                "marker": "o",
                "markersize": 5,
                "linewidth": 2.5,
                "zorder": 3,
                "label": policy,
            }
        panel.plot(*zip(*mine, strict=True), **style)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    panel.set_xlabel("bytes of cache, MB")
    panel.set_ylabel("top-1 token as the full cache's, %")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})


class Methods(Directive):
    """The table of all methods, the full cache first."""

    def run(self) -> list[Any]:
        lines = ["| name | method | what it keeps | memory |", "| --- | --- | --- | --- |"]
        for name, cls in sorted(policies().items(), key=lambda item: item[0] != "full"):
            written, method = page(name)
            if "paper" in written:
                method = f"[{method}]({written['paper']}), {' '.join(_paper(name)[:2])}"
            lines.append(
                f"| [`{name}`](/methods/{name}.md) | {method} | {cls.about.summary} | {IN_SHORT[cls.about.memory]} |"
            )
        return _parsed(self, "\n".join(lines))


class Blocks(Directive):
    """The table of how methods choose when a prompt comes in blocks."""

    def run(self) -> list[Any]:
        names = defaultdict(list)
        for name in policies():
            names[page(name)[0].get("blocks", WHOLE)].append(f"[`{name}`](/methods/{name}.md)")
        rows = sorted(names.items(), key=lambda row: (row[0] == WHOLE, -len(row[1])))
        lines = ["| policy | chooses after each block by |", "| --- | --- |"]
        return _parsed(self, "\n".join(lines + [f"| {', '.join(group)} | {how} |" for how, group in rows]))


class Measured(Directive):
    """A table of `reproduction.tables`, by the name of its function."""

    required_arguments = 1

    def run(self) -> list[Any]:
        return _parsed(self, getattr(tables, self.arguments[0])())


def _parsed(directive: Directive, text: str) -> list[Any]:
    node = nodes.container()
    directive.state.nested_parse(text.splitlines(), directive.content_offset, node)
    return node.children


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", complete, priority=400)
    app.add_directive("methods", Methods)
    app.add_directive("blocks", Blocks)
    app.add_directive("measured", Measured)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
