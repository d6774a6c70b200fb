"""A number and its unit stay on one line, which in narrow tables they would not."""

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

_NUMBER_AND_UNIT = re.compile(r"(?<=\d) (?=(?:%|[kMGT]?B\b|ms\b|s\b))")


class UnitsStayWithNumbers(SphinxPostTransform):
    """Puts a space that does not break between the two, in prose and tables."""

    default_priority = 900

    def run(self, **kwargs: Any) -> None:
        for text in list(self.document.findall(nodes.Text)):
            parent = text.parent
            if parent is not None and not isinstance(parent, nodes.literal | nodes.FixedTextElement | nodes.raw):
                parent.replace(text, nodes.Text(_NUMBER_AND_UNIT.sub("\N{NO-BREAK SPACE}", text)))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_post_transform(UnitsStayWithNumbers)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
