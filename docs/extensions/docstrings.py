"""Docstrings are plain text with code in single backticks; here they become what Sphinx reads. Examples stay as they are."""

import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

_EXAMPLE = re.compile(r"(^ *>>> .*(?:\n.*\S.*)*)", re.MULTILINE)
"""An example with its output, up to a blank line."""

_CODE = re.compile(r"(``[^`]+``|`[^`]+`)")
_NAME = re.compile(r"`(kvjax(?:\.\w+)+)`")


def convert(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Code in backticks becomes literal, or a link where it is a name of kvjax; bars and stars in prose are just that."""
    # Code may run over the end of a line: joined, converted, and parted again, since Google's sections go by lines.
    parts = _EXAMPLE.split("\n".join(lines))
    text = "".join(part if i % 2 else "".join(map(_converted, _CODE.split(part))) for i, part in enumerate(parts))
    if what in ("attribute", "data", "property"):
        # An empty comment: napoleon takes what stands before a colon in the first line that is not empty for a type.
        text = f"..\n\n{text}"
    lines[:] = re.sub(r"``(?=[a-z])(?<=\w``)", r"``\\ ", text).split("\n")


def _converted(part: str) -> str:
    if part.startswith("``"):
        return part
    if match := _NAME.fullmatch(part):
        return f":py:obj:`{match[1]}`"
    if part.startswith("`"):
        return f"`{part}`"
    part = re.sub(r"(?<!\\)\|", r"\\|", part)
    return re.sub(r"(?m)(?<![\\*\s])\*|(?<=\S )\*(?!\*)", r"\\*", part)


def show_options(app: Sphinx) -> None:
    """Show `kvjax.generate` with the signature of its code, which has every option and its default, and not with its overloads."""
    analyzer = ModuleAnalyzer.for_module("kvjax.runtime.generation")
    analyzer.analyze()
    analyzer.overloads.clear()


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", show_options)
    app.connect("autodoc-process-docstring", convert, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
