"""What the site's build says of links that lead nowhere and of pictures without words."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOME, REPOSITORY = "https://here.example/kvjax/", "https://code.example/them/kvjax"


@pytest.fixture
def complaints(tmp_path):
    """What is wrong with a site of the page `a/page.html` with that body, and another one."""
    pytest.importorskip("sphinx", reason="needs the docs extra")
    spec = importlib.util.spec_from_file_location("links", ROOT / "docs/extensions/links.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def check(body):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a/page.html").write_text(f"<html><body><h1 id='top'>Page</h1>{body}</body></html>")
        (tmp_path / "index.html").write_text("<a href='a/page.html'>page</a><p id='here'></p>")
        return module.Site(tmp_path, HOME, REPOSITORY, ROOT).complaints()

    return check


@pytest.mark.parametrize(
    "link",
    [
        "#top",
        "../index.html#here",
        "..",
        "https://elsewhere.example/nothing#at-all",
        "mailto:a@b.example",
        HOME,
        f"{HOME}a/page.html#top",
        f"{REPOSITORY}/blob/main/README.md#tests",
        f"{REPOSITORY}/tree/main/docs",
        f"{REPOSITORY}/issues",
    ],
)
def test_links_that_lead_somewhere(complaints, link):
    assert complaints(f"<a href='{link}'>link</a>") == []


@pytest.mark.parametrize(
    ("link", "wrong"),
    [
        ("#bottom", "a/page.html has no place of that name"),
        ("../index.html#there", "index.html has no place of that name"),
        ("other.html", "there is no such file"),
        (f"{HOME}b/page.html", "there is no such file"),
        (f"{HOME}#there", "index.html has no place of that name"),
        (f"{REPOSITORY}/blob/main/docs/none.md", "the repository has no docs/none.md"),
    ],
)
def test_links_that_do_not(complaints, link, wrong):
    (line,) = complaints(f"<a href='{link}'>link</a>")
    assert line.startswith("a/page.html: ")
    assert line.endswith(wrong)


def test_pictures_tell_what_they_show(complaints, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/p.png").touch()
    assert complaints("<img src='p.png' alt='A line that falls'>") == []
    for attributes in (
        "src='p.png'",
        "src='p.png' alt=''",
        "src='p.png' alt='p.png'",
        "src='p.png' alt='_images/p.png'",
    ):
        (line,) = complaints(f"<img {attributes}>")
        assert "the picture has no text; describe what it shows" in line
    (line,) = complaints("<img src='q.png' alt='words'>")
    assert line.endswith("q.png: there is no such file")
