"""Where lines break: not between a number and its unit or in a date, but after commas and brackets in code of tables."""

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

_NUMBER_AND_UNIT = re.compile(r"(?<=\d) (?=(?:%|[kMGT]?B\b|ms\b|s\b))")
_PUNCTUATION = re.compile(r"(?<=[(\[,=./])(?=[^\s)\]])")
_SHORT = 24
"""Characters of code that do not break."""
_DATE = re.compile(r"\b(\d{4})-(\d{2})-(\d{2})\b")


class UnitsStayWithNumbers(SphinxPostTransform):
    """Puts spaces and hyphens that do not break between them, in prose and tables."""

    default_priority = 900

    def run(self, **kwargs: Any) -> None:
        for text in list(self.document.findall(nodes.Text)):
            parent = text.parent
            if parent is not None and not isinstance(parent, nodes.literal | nodes.FixedTextElement | nodes.raw):
                joined = _NUMBER_AND_UNIT.sub("\N{NO-BREAK SPACE}", text)
                parent.replace(
                    text, nodes.Text(_DATE.sub("\\1\N{NON-BREAKING HYPHEN}\\2\N{NON-BREAKING HYPHEN}\\3", joined))
                )


class CodeInTablesBreaks(SphinxPostTransform):
    """Lets long code in a table break after punctuation. What is copied from the page stays the same."""

    default_priority = 901

    def run(self, **kwargs: Any) -> None:
        for entry in self.document.findall(nodes.entry):
            for text in [text for code in entry.findall(nodes.literal) for text in code.findall(nodes.Text)]:
                if len(text) > _SHORT:
                    pieces = [nodes.Text(piece) for piece in _PUNCTUATION.split(text)]
                    breaks = [nodes.raw("", "<wbr>", format="html") for _ in pieces[1:]]
                    text.parent.replace(
                        text, [node for pair in zip(pieces, [*breaks, None], strict=True) for node in pair if node]
                    )


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_post_transform(UnitsStayWithNumbers)
    app.add_post_transform(CodeInTablesBreaks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
