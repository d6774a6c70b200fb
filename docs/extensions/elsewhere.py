"""Pages that lie outside docs/, and links as GitHub has them: both lead somewhere on the site, too.

Files are copied into docs/ before the build reads it (git ignores the copies). A relative link to a page of the site is
rewritten to lead there; one to any other file of the repository leads to the repository.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
COPIES = {
    "project/changelog.md": "CHANGELOG.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "notebooks/index.md": "notebooks/README.md",
    **{f"notebooks/{path.name}": f"notebooks/{path.name}" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))},
}
"""Files by where the site has them."""

ADDRESS = "REPOSITORY_URL"
"""Placeholder on pages for the repository's address, which pyproject.toml has."""

_LINK = re.compile(r"\]\((?!https?:|mailto:|#|/)([^()\s#]+)(#[^()\s]*)?\)")


def copy(app: Sphinx) -> None:
    for page, original in COPIES.items():
        source, target = ROOT / original, Path(app.srcdir) / page
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != source.read_bytes():
            shutil.copyfile(source, target)


def relink(app: Sphinx, docname: str, content: list[str]) -> None:
    """Rewrite links in a page's source. They are relative to the file that it was copied from."""
    file = Path(app.env.doc2path(docname)).relative_to(app.srcdir).as_posix()
    folder = (ROOT / COPIES.get(file, f"docs/{file}")).parent
    pages = {original: f"/{page}" for page, original in COPIES.items()}

    def rewritten(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        path = Path(os.path.normpath(folder / target))
        if not path.is_relative_to(ROOT) or not path.exists():
            return match[0]  # Sphinx reports it
        name = path.relative_to(ROOT).as_posix()
        if name in pages:
            return f"]({pages[name]}{anchor})"
        if name.startswith("docs/"):
            return f"](/{name.removeprefix('docs/')}{anchor})"
        kind = "tree" if path.is_dir() else "blob"
        return f"]({app.config.html_theme_options['repository_url']}/{kind}/main/{name}{anchor})"

    content[0] = _LINK.sub(rewritten, content[0]).replace(ADDRESS, app.config.html_theme_options["repository_url"])
    if docname == "notebooks/index":
        content[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", copy, priority=1)
    app.connect("source-read", relink)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
