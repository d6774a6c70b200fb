"""The pages at the repository's door: short enough, citable, and without links that lead nowhere."""

import re
import runpy
import subprocess
import tomllib
import unicodedata
from pathlib import Path

import pytest
import yaml  # flax and huggingface_hub, without which there is no kvjax, require it

import kvjax

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "notebooks/README.md")),
    *sorted(
        page
        for folder in ("", "start/", "concepts/", "methods/", "howto/", "claims/")
        for page in ROOT.glob(f"docs/{folder}*.md")
    ),
]


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings: letters, digits, hyphens and underscores in lower case, hyphens for spaces."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 8192


def test_limits_are_few() -> None:
    """Those of a single feature are on its own page."""
    page = (ROOT / "docs/limits.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^- ", page, flags=re.MULTILINE)) <= 10


def test_readme_has_one_test_command() -> None:
    """`.ci/run` runs that line."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert sum("python -m pytest" in line for line in lines) == 1


def test_tests_over_meshes_are_in_one_folder() -> None:
    """`.ci/run` collects it alone."""
    files = (ROOT / "tests").rglob("*.py")
    marked = {file.parent for file in files if re.search(r"\bmark\.mesh", file.read_text(encoding="utf-8"))}
    assert marked == {ROOT / "tests" / "mesh"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^()\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT.resolve()), f"{link} leads out of the repository"
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{target.name} has no heading for #{anchor}"


def test_the_readme_leads_somewhere_from_a_package_index_too() -> None:
    """Its links there are to the site's pages and the repository's files, and none is left that needs a file beside it."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    page = runpy.run_path(str(ROOT / "setup.py"))["readme"]()
    links = re.findall(r"\]\(([^()\s]+)\)", page)
    assert len(links) == len(re.findall(r"\]\(([^()\s]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))) >= 15
    for link in links:
        if page_of := re.match(re.escape(urls["Homepage"]) + r"([^#]+)\.html", link):
            assert (ROOT / f"docs/{page_of[1]}.md").is_file(), link
        elif file := re.match(re.escape(urls["Repository"]) + "/(?:blob|raw)/main/([^#]+)", link):
            assert (ROOT / file[1]).exists(), link
        else:
            assert link.startswith("https://"), link


def test_pages_are_reachable_from_the_readme() -> None:
    """Every page of docs/ is a few links away from README.md. Methods have theirs in a table that the site makes."""
    found, new = set(), {ROOT / "README.md"}
    while new:
        found |= new
        links = {
            (page.parent / link.partition("#")[0]).resolve()
            for page in new
            for link in re.findall(r"\]\(([^()\s]+)\)", prose(page))
            if re.match(r"[^:#]+\.md", link)
        }
        if ROOT / "docs/methods.md" in new:
            links |= {page.resolve() for page in (ROOT / "docs/methods").glob("*.md")}
        new = {page for page in PAGES if page.resolve() in links} - found
    assert found == set(PAGES)


def test_citation() -> None:
    """Citation File Format 1.2.0: its required keys, and what else is known of the package."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]
    assert citation["title"] == project["name"]
    assert citation["authors"] == project["authors"]
    assert citation["version"] == kvjax.__version__
    assert citation["repository-code"] == project["urls"]["Repository"]
    assert set(citation["license"]) == set(project["license"].split(" AND "))
    methods = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/methods").glob("*.md"))
    assert len(citation["references"]) == 5
    for reference in citation["references"]:
        assert reference["type"] in ("article", "conference-paper")
        assert reference["title"]
        assert all(author["family-names"] and author["given-names"] for author in reference["authors"])
        assert f"\npaper: {reference['url']}\n" in methods


def test_the_public_address_stands_in_one_place() -> None:
    """`pyproject.toml` has it. The few others are files in whose formats it cannot be left out, and tests compare them."""
    address = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    name = address.removeprefix("https://github.com/")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if not listed:
        pytest.skip("needs a git checkout")
    files = [ROOT / file for file in listed.split("\0") if file]
    having = {
        str(file.relative_to(ROOT))
        for file in files
        if file.is_file() and not file.is_symlink() and name.encode() in file.read_bytes()
    }
    notebooks = {f"notebooks/{file.name}" for file in (ROOT / "notebooks").glob("*.ipynb")}
    assert having == {"pyproject.toml", "CITATION.cff", "notebooks/README.md", *notebooks}


def _plain(name: str) -> str:
    """A name without accents, which arXiv leaves out of some."""
    return unicodedata.normalize("NFD", name).encode("ascii", "ignore").decode()


def test_references_are_those_of_the_policies() -> None:
    """Each entry of references.bib has the address on its method's page, and the title, first author and year of the policy."""
    text = (ROOT / "docs/references.bib").read_text(encoding="utf-8")
    entries = re.findall(r"^@\w+\{(\w+),\n(.*?)^\}$", text, flags=re.MULTILINE | re.DOTALL)
    assert len(entries) == text.count("\n@") >= 20
    for name, body in entries:
        fields = dict(re.findall(r"^  (\w+) = \{(.*)\},$", body, flags=re.MULTILINE))
        written = yaml.safe_load((ROOT / f"docs/methods/{name}.md").read_text(encoding="utf-8").split("---\n", 2)[1])
        assert fields["url"] == written["paper"]
        if "eprint" in fields:
            assert fields["url"] == f"https://arxiv.org/abs/{fields['eprint']}"
        authors, year, title = re.fullmatch(
            r"(.+?) (\d{4}), (.+)", kvjax.policies.policies()[name].about.paper
        ).groups()
        assert (fields["title"], fields["year"]) == (title, year)
        first_author, *_ = re.split(r" and | et al\.", authors)
        assert _plain(fields["author"].split(" and ")[0]).endswith(_plain(first_author))
        assert "others" not in fields["author"]


PRESSES = """
AdaKVPress BasePress BlockPress CAMPress CURPress CapPress ChunkKVPress ChunkPress CompactorPress
ComposedPress CompressionRatioDecodingPress CriticalAdaKVPress CriticalKVPress DMSPress DecodingPress
DuoAttentionPress EntropyGatedChunkKVPress ExpectedAttentionPress ExpectedAttentionStatsPress FastKVzipPress
FinchPress KVComposePress KVgradPress KVzapPress KVzipPress KeyDiffPress KeyRerotationPress KnormPress
LUKVPress LagKVPress LeverageScorePress MergingPress NonCausalAttnPress ObservedAttentionPress
PerLayerCompressionPress PrefillDecodingPress PyramidKVPress QFilterPress RandomPress RestoreKVPress
ScorerPress SimLayerKVPress SnapKVPress StreamingLLMPress TOVAPress ThinKPress
"""
"""The presses of kvpress 0.5.5, as its `__all__` has them."""


def test_each_press_of_kvpress_is_in_one_table() -> None:
    """With what to use instead, which is a policy that exists, or with the reason why it is missing."""
    presses, page = PRESSES.split(), (ROOT / "docs/howto/from_kvpress.md").read_text(encoding="utf-8")
    there, _, missing = page.partition("## Presses without a counterpart")
    missing = missing.partition("\n## ")[0]
    without = {name for name in presses if f"`{name}`" in missing}
    lines = [line.split(" | ") for line in there.splitlines() if re.match(r"\| `\w+Press", line)]
    having = {name for name in presses if any(re.search(rf"\b{name}\b", line[0]) for line in lines)}
    assert (having | without, having & without) == (set(presses), set())
    assert f"Of the {len(presses)} presses and wrappers of kvpress 0.5.5, {len(having)} have a counterpart" in page
    texts = [re.match(r"`([a-z_]+[:(]?[^`]*)`", line[1]) for line in lines]
    policies = [text[1] for text in texts if text and "PATH" not in text[1] and "..." not in text[1]]
    assert len(policies) >= 20
    for text in policies:
        kvjax.get_policy(text)


def test_the_sidebar_is_short() -> None:
    """At most 25 entries, each with a title of at most three words."""
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    entries = re.findall(r"^(.+) <[\w/]+>$", index, flags=re.MULTILINE)
    assert 15 <= len(entries) <= 25
    assert max(len(entry.split()) for entry in entries) <= 3
