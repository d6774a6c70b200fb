"""Every notebook runs from top to bottom in a fresh kernel, and shows its reader neither an error nor a warning."""

import importlib.util
import itertools
import json
import os
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from long_share import SHARES, VARIABLE, choose, head_commit

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
LIMIT = 600 * 1024
"""Bytes of a notebook with its outputs."""

BY_SHARE = (
    "chat_history",
    "compare_policies",
    "long_context_tpu",
    "quickstart",
    "what_a_policy_keeps",
    "your_own_policy",
)
"""Notebooks of which a CI run executes one with the whole model, and a third of the others with two of its layers.

`convert_and_share` compiles little, so it always runs as it is.
"""


def runs_whole(name: str, index: int | None) -> bool:
    """Whether a notebook is executed with the whole model, by the index of the share of long tests; None selects all."""
    return name not in BY_SHARE or index is None or BY_SHARE[index % len(BY_SHARE)] == name


def runs(name: str, index: int | None) -> bool:
    """Whether a notebook is executed at all."""
    return runs_whole(name, index) or (BY_SHARE.index(name) + (index or 0) // len(BY_SHARE)) % 3 == 0


@pytest.fixture(scope="module")
def execution():
    """The script that executes them, as a module."""
    pytest.importorskip("nbclient", reason="needs the notebooks extra")
    pytest.importorskip("ipykernel", reason="needs the notebooks extra")
    spec = importlib.util.spec_from_file_location("execute", NOTEBOOKS[0].parent / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_without_a_complaint(path, execution, monkeypatch):
    ci = os.environ.get("CI", "").lower() in ("1", "true", "yes")
    index = choose(os.environ.get(VARIABLE), head_commit(), ci).index
    whole, executed = runs_whole(path.stem, index), runs(path.stem, index)
    monkeypatch.setenv("PYTHONPATH", str(path.parents[1]))
    if whole:  # compiled as readers' are
        monkeypatch.delenv("XLA_FLAGS", raising=False)
        monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
    if executed:
        notebook = execution.execute(path, few_layers=not whole)
        assert execution.complaints(notebook) == []
    if not whole:  # readers see what is in the repository
        notebook = pytest.importorskip("nbformat").read(path, as_version=4)
    if cache := os.environ.get("KVJAX_NOTEBOOK_CACHE"):  # the site's build takes them from there
        base = pytest.importorskip("jupyter_cache.base", reason="needs the docs extra")
        bundle = base.CacheBundleIn(notebook, path.name)
        cache = pytest.importorskip("jupyter_cache").get_cache(cache)
        # The check of validity refuses notebooks with cells that are not executed, as the one that installs kvjax.
        cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
    if not executed:
        pytest.skip("runs of other shares execute it")


def test_shares_execute_every_notebook():
    names = {path.stem for path in NOTEBOOKS}
    assert set(BY_SHARE) < names
    assert SHARES % len(BY_SHARE) == 0  # so that each is as likely
    chosen = [[name for name in names if runs_whole(name, index)] for index in range(len(BY_SHARE))]
    assert all(len(each) == len(names) - len(BY_SHARE) + 1 for each in chosen)
    assert set().union(*chosen) == {name for name in names if runs_whole(name, None)} == names
    few = [[name for name in names if runs(name, index) > runs_whole(name, index)] for index in range(SHARES)]
    assert {len(each) for each in few} == {1, 2}
    counts = Counter(itertools.chain.from_iterable(few))
    assert set(counts) == set(BY_SHARE)
    assert len(set(counts.values())) == 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_kept_with_the_outputs_of_one_clean_run(path):
    nbformat = pytest.importorskip("nbformat", reason="needs the notebooks extra")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    install, *cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    assert (install.execution_count, install.outputs) == (None, [])
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}
    pictures = [cell for cell in cells if any("image/png" in output.get("data", {}) for output in cell.outputs)]
    assert all(cell.metadata["mystnb"]["image"]["alt"] for cell in pictures), "the site's text of a picture"
    assert path.stat().st_size < LIMIT
    assert str(path.parents[1]) not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_badge_gives_the_projects_address_and_its_first_cell_installs(path):
    root = path.parents[1]
    address = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    colab = address.replace("https://github.com/", "https://colab.research.google.com/github/")
    lines = path.with_name("README.md").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"| [{path.stem}]({path.name}) |"))
    assert f"colab-badge.svg)]({colab}/blob/main/notebooks/{path.name})" in line
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    install, prepare, *_ = (cell for cell in cells if cell["cell_type"] == "code")
    extras = "plot,tpu" if path.stem == "long_context_tpu" else "plot"  # it asks the compiler for TPUs on any machine
    assert "".join(install["source"]) == f'%pip install --quiet "kvjax[{extras}] @ git+{address}"'
    assert install["metadata"]["tags"] == ["remove-output", "skip-execution"]  # here kvjax is the checkout's
    assert "import kvjax.notebooks\n" in prepare["source"]
    assert "kvjax.notebooks.prepare()\n" in "".join([*prepare["source"], "\n"])


def test_kvjax_is_installed_from_its_address_or_a_checkout():
    """It is on no package index."""
    root = NOTEBOOKS[0].parents[1]
    files = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("notebooks/*"), *root.glob("kvjax/**/*.py")]
    said = re.compile(r"""pip install(?: -[\w-]+)* ["']?kvjax\b(?!\[[\w,]+\] @ git\+)[^\n]*""")
    found = [f"{file.name}: {line}" for file in files if file.is_file() for line in said.findall(_text(file))]
    assert found == []


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8").replace('\\"', '"')
