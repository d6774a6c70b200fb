"""A number and its unit stay on one line, and so do the parts of a date, which in narrow tables they would not."""

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

_NUMBER_AND_UNIT = re.compile(r"(?<=\d) (?=(?:%|[kMGT]?B\b|ms\b|s\b))")
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


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_post_transform(UnitsStayWithNumbers)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
