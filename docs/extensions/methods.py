"""Pages and tables of methods.

docs/methods/NAME.md has what is written by hand: the idea, the source, limits, and in its front matter

- paper: the paper's address.
- blocks: by what the method selects after each block of a prompt. Without it the method needs whole prompts.
- budget: what a budget is of, where only some heads have it.

The rest is added here: usage, facts and options from the policy and its docstring, figures from result files, limits that several methods have
from docs/limits.md, and the entry of docs/references.bib.
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
from kvjax.config import PRESETS
from kvjax.policies import Full, Policy, get_policy, policies
from reproduction import tables

DOCS = Path(__file__).parents[1]
SOURCE = "## Source"
LIMITS = "## Limits\n"


MEMORY = {
    "full": "all tokens are kept",
    "freed": "evicted tokens take no memory",
    "sparse": "all tokens are kept; a query attends to a part of them",
    "quantized": "all tokens are kept in fewer bits",
}
IN_SHORT = {
    "full": "all kept",
    "freed": "freed",
    "sparse": "all kept",
    "quantized": "all kept, fewer bits",
}
STAGE = {
    "none": "never",
    "prompt": "once, after prefill",
    "decoding": "while decoding",
    "both": "after prefill and while decoding",
}
WHOLE = "not supported, the method needs the whole prompt"
POSITIONS = {"original": "as in the text", "cache_rank": "the rank among the kept tokens"}


def complete(app: Sphinx, docname: str, content: list[str]) -> None:
    """Add the generated parts to a method's page."""
    folder, _, name = docname.partition("/")
    if folder != "methods" or name not in policies():
        return
    before, mark, lines = content[0].partition(SOURCE)
    if not mark:
        raise ValueError(f"docs/{docname}.md has no heading {SOURCE!r}; the rest of the page is put around it")
    lines, _, own = lines.partition(LIMITS)
    content[0] = "\n\n".join(
        [
            before.strip(),
            _usage(name),
            _facts(name),
            _picture(name),
            "## Results",
            _measured(name),
            "## Memory and speed",
            _costs(name),
            "## Options",
            _options(name),
            "## Implementation notes",
            _prose(name),
            f"{mark}\n\n{lines.strip()}",
            *_limits(name, own.strip()),
            *_citation(name),
        ]
    )


def page(name: str) -> tuple[dict[str, str], str]:
    """The front matter of a method's page, and its title."""
    _, facts, text = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(facts), text.strip().partition("\n")[0].removeprefix("# ")


WEIGHTS = {"kvzap": "KVzap-mlp-Qwen3-8B", "fast_kvzip": "qwen3-8b/q4_dim16_sink16.pt"}
"""Published weights of policies that need them."""


def _usage(name: str) -> str:
    """Two lines of Python and one of shell."""
    cls = policies()[name]
    if cls.about.trained:
        model, weights = "Qwen/Qwen3-8B", WEIGHTS[name]
        load, policy = f'"{model}"', f'kvjax.policies.{cls.__name__}(budget=0.25, weights="{weights}")'
        options = f"--model {model} --policy {name} --budget 0.25 --set weights={weights}"
    else:
        budget = cls.about.takes_budget
        load, policy = "", f'"{name}"' + ", budget=0.25" * budget
        options = f"--policy {name}" + " --budget 0.25" * budget
    python = f"params = kvjax.load({load})\nresult = kvjax.generate(params, text, policy={policy})"
    return f'```python\n{python}\n```\n\n```sh\nkvjax generate {options} "..."\n```'


def _facts(name: str) -> str:
    about, (written, _) = policies()[name].about, page(name)
    budget = "of all tokens"
    if about.memory == "sparse":
        budget = "of the tokens that a query attends to; all are kept"
    elif about.budget_excludes_new_tokens:
        budget = "of the prompt; new tokens are kept in addition"
    facts = {
        "Name": f"`{name}`, {{class}}`kvjax.policies.{policies()[name].__name__}`",
        "Keeps": about.summary,
        "Memory": MEMORY[about.memory],
        "Compresses": STAGE[about.stage],
        "Chunked prefill": _blocks(written.get("blocks")),
        "Positions": POSITIONS[about.positions],
        "Budget": written.get("budget", budget) if about.takes_budget else "none",
    }
    rows = "\n".join(f"* - {key}\n  - {value}" for key, value in facts.items())
    return f"```{{list-table}}\n:widths: 20 80\n\n{rows}\n```"


def _blocks(by: str | None) -> str:
    if by is None:
        return WHOLE
    return (
        f"supported; {by.partition(', since ')[2]}"
        if by.startswith("nothing")
        else f"compresses after each block, by {by}"
    )


def _picture(name: str) -> str:
    about = policies()[name].about
    if about.trained:
        return "*There is no picture: the weights are not part of kvjax, and none were published for SmolLM2-135M-Instruct.*"
    if name == "fp8":
        alt = "Exact keys of one head, and the errors with 8-bit floats, by position and channel"
    elif name in ("kivi", "turboquant"):
        alt = "Exact keys of one head, and the errors with 4 and 2 bits, by position and channel"
    elif name == "shadowkv":
        alt = "Positions with exact keys at each step of a run; the others are rebuilt from low rank"
    elif about.memory == "sparse":
        alt = f"Positions that queries of one layer attend to at each step under {name}"
    else:
        alt = f"Positions that the cache holds at each step under {name}: {about.summary}"
    return (
        f"![{alt}](/pictures/{name}.png)\n\n"
        "*SmolLM2-135M-Instruct prefills the opening of Moby-Dick and generates a continuation (`python docs/draw_methods.py`).*"
    )


def _docstring(name: str) -> tuple[str, str]:
    text = (inspect.getdoc(policies()[name]) or "").partition("Example:\n")[0]
    prose, _, fields = text.partition("Attributes:\n")
    return prose.strip(), textwrap.dedent(fields).strip()


def _prose(name: str) -> str:
    return _docstring(name)[0].replace("*", "\\*")


def _options(name: str) -> str:
    fields = dataclasses.fields(policies()[name])
    if not fields:
        return "None."
    meanings: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", _docstring(name)[1]):
        names, _, meaning = entry.partition(":")
        meanings |= dict.fromkeys(map(str.strip, names.split(",")), " ".join(meaning.split()))
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
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
        parts.append("TPOT of this policy was not measured; [speed](/speed.md) has other policies.")
    return "\n\n".join(parts)


def _bytes(name: str) -> str:
    about = policies()[name].about
    if about.trained:
        return "Memory depends on the weights; `kvjax plan` and `policy.nbytes` report it."
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
    what = f"Cache of one sequence with {NEW_TOKENS} new tokens, shape of `{shape}`, bfloat16 (`policy.nbytes`):"
    return what + "\n\n" + "\n".join(lines)


NEW_TOKENS = 512
PROFILED = ("catekv", "duoattention", "triattention")
"""Methods that need a profile of the model's heads: their bytes are of a model whose profile is part of kvjax."""


def _measured(name: str) -> str:
    """The leaderboard's rows, needles of prompts that end with the question, and perplexity; each if it was measured."""
    parts: list[str] = []
    if scores := tables.leaderboard_of(name):
        parts += [
            "RULER, question-agnostic, by share of the full cache's bytes ([leaderboard](/leaderboard.md)):",
            scores,
        ]
    if needles := tables.needles_of(name):
        parts += [
            "Share of 48 needles that are found in prompts of up to 8,192 tokens at a budget of 25 %, in percent, with "
            "SmolLM2-135M-Instruct ([quality](/quality.md#reading-in-blocks)). *Question-aware*: the prompt ends with the question. "
            "*Question-agnostic*: the question follows the compressed prompt. Perplexity is measured on the text that follows 48 "
            "passages of novels:",
            needles,
        ]
    elif quality := tables.quality_of(name):
        parts += [
            "Perplexity of 1,024 tokens after 7,168, SmolLM2-135M-Instruct ([quality](/quality.md)). The full cache has "
            f"{tables.full_quality()}.",
            quality,
        ]
    if not parts:
        parts.append("No result file has the quality of this policy.")
    if name == "infinigen" and not scores:
        parts.append("Measured with `alpha` 4 and 13 of 64 channels; the defaults are 5 and up to 24.")
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
    parts = ["## Citation", f"{authors} {year}, [{title}]({page(name)[0]['paper']})"]
    return [*parts, f"```bibtex\n{entry}\n```"] if (entry := references().get(name)) else parts


def references() -> dict[str, str]:
    """Entries of docs/references.bib by key, as they are written there."""
    text = (DOCS / "references.bib").read_text(encoding="utf-8")
    return {
        match[1]: match[0] for match in re.finditer(r"^@\w+\{(\w+),\n.*?^\}$", text, flags=re.MULTILINE | re.DOTALL)
    }


def _paper(name: str) -> tuple[str, str, str]:
    """Authors, year and title."""
    match = re.fullmatch(r"(.+?) (\d{4}), (.+)", policies()[name].about.paper, flags=re.DOTALL)
    assert match, f"{name}: about.paper is not 'authors year, title'"
    return match[1], match[2], match[3]


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
        return parsed(self, "\n".join(lines))


class Blocks(Directive):
    """The table of what methods select by in chunked prefill."""

    def run(self) -> list[Any]:
        names = defaultdict(list)
        for name in policies():
            names[page(name)[0].get("blocks", WHOLE)].append(f"[`{name}`](/methods/{name}.md)")
        rows = sorted(names.items(), key=lambda row: (row[0] == WHOLE, -len(row[1])))
        lines = ["| policy | selects after each block by |", "| --- | --- |"]
        return parsed(self, "\n".join(lines + [f"| {', '.join(group)} | {how} |" for how, group in rows]))


class Measured(Directive):
    """A table of `reproduction.tables` or `benchmarks.tables`, by the name of its function."""

    required_arguments = 1

    def run(self) -> list[Any]:
        name = self.arguments[0]
        return parsed(self, getattr(tables if hasattr(tables, name) else speed_tables, name)())


def parsed(directive: Directive, text: str) -> list[Any]:
    """The nodes of a directive's text."""
    node = nodes.container()
    directive.state.nested_parse(text.splitlines(), directive.content_offset, node)
    return node.children


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", complete, priority=400)
    app.add_directive("methods", Methods)
    app.add_directive("blocks", Blocks)
    app.add_directive("measured", Measured)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
