"""Checks of the built site: every link within it leads to a page and a place, and every picture has a text.

Sphinx checks the links that it makes itself. This module checks the links in HTML, whatever made them. Links to the project's repository lead to files
of this checkout, and links to the project's own address to pages of this site. None of that needs a network. `python -m sphinx -b linkcheck docs
linkcheck` checks other people's pages.
"""

from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

ROOT = Path(__file__).parents[2]

_POINTERS = {"a": "href", "link": "href", "img": "src", "script": "src", "source": "src", "iframe": "src"}
_NO_PAGES = ("_static", "_modules")
"""Files of the theme, and source code, of whose links back Sphinx gives some the place of another name that an object has."""


class _Page(HTMLParser):
    """A page's links, its places that links can lead to, and its pictures."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.pictures: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.places |= {value for name in ("id", "name") if (value := given.get(name))}
        link = given.get(_POINTERS.get(tag, ""))
        if link and not (tag == "link" and given.get("rel") in ("preconnect", "canonical")):
            self.links.append(link)
        if tag == "img":
            self.pictures.append(given)


class Site:
    """A built site.

    Args:
        home: the folder that it was built into.
        address: where it is published.
        repository: where the project's files are published.
        root: the checkout that has these files.
    """

    def __init__(self, home: Path, address: str, repository: str, root: Path = ROOT):
        self.home, self.address, self.repository, self.root = home, address.rstrip("/"), repository.rstrip("/"), root
        self._page = cache(lambda path: _Page(path.read_text(encoding="utf-8")))

    def complaints(self) -> list[str]:
        """What is wrong, one line each: the page, and its broken link or picture without text."""
        found: list[str] = []
        pages = {path.relative_to(self.home): path for path in sorted(self.home.rglob("*.html"))}
        for name, path in pages.items():
            if name.parts[0] in _NO_PAGES:
                continue
            page = self._page(path)
            said = [self.wrong(path, link) for link in dict.fromkeys(page.links)]
            said += [_untold(picture) for picture in page.pictures]
            found += [f"{name}: {line}" for line in said if line]
        return found

    def wrong(self, path: Path, link: str) -> str | None:
        """What is wrong with a link of the page at `path`; None if nothing is, or if it needs a network to know."""
        if link.startswith(self.address):
            link, path = "." + (link.removeprefix(self.address) or "/"), self.home / "index.html"
        elif link.startswith(self.repository):
            kind, _, rest = link.removeprefix(self.repository).strip("/").partition("/main/")
            there = (self.root / unquote(urlsplit(rest).path)).exists()
            return (
                None
                if there or kind not in ("blob", "tree", "edit", "raw")
                else f"{link}: the repository has no {rest}"
            )
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            return None
        target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
        target = target / "index.html" if target.is_dir() else target
        if not target.is_file():
            return f"{link}: there is no such file"
        place = unquote(parts.fragment)
        if place and target.suffix == ".html" and place not in self._page(target).places:
            return f"{link}: {target.relative_to(self.home)} has no place of that name"
        return None


def _untold(picture: dict[str, str | None]) -> str | None:
    """What is wrong with what a picture says of itself to those who do not see it: nothing, or its file's name."""
    source, alt = picture.get("src") or "", (picture.get("alt") or "").strip()
    if not alt or Path(alt).name == Path(source).name:
        return f"{source}: the picture has no text; describe what it shows (of a notebook's cell: metadata mystnb.image.alt)"
    return None


def _check(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None or app.builder.name != "html":
        return
    site = Site(Path(app.outdir), app.config.html_baseurl, app.config.html_theme_options["repository_url"])
    if found := site.complaints():
        raise ExtensionError("the site has links that lead nowhere, or pictures without words:\n" + "\n".join(found))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", _check, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
