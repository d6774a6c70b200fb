"""The names that `import kvjax` offers."""

import ast
import doctest
import functools
import importlib
import inspect
import pkgutil
import re
import tomllib
import types
from pathlib import Path

import numpy as np
import pytest
from packaging.licenses import canonicalize_license_expression

import kvjax
from kvjax.models import Params
from kvjax.policies import registry
from kvjax.policies.text import _OF_PARTS, _WRAPPERS


def test_every_name_is_there() -> None:
    for name in dir(kvjax):
        assert getattr(kvjax, name) is not None


def test_type_checkers_and_python_see_the_same_names() -> None:
    tree = ast.parse(Path(kvjax.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    homes = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module is not None
    }
    modules = {
        alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom) and not node.module
        for alias in node.names
    }
    assert homes == {"*": "policies.methods", **kvjax._HOMES}
    del homes["*"]
    homes |= dict.fromkeys(kvjax._methods(), "policies.methods")
    assert modules == set(kvjax._MODULES)
    for name, module in homes.items():
        assert getattr(kvjax, name) is getattr(importlib.import_module(f"kvjax.{module}"), name)


def test_every_policy_and_transform_is_there() -> None:
    ours = [policy for policy in kvjax.policies.policies().values() if policy.__module__.startswith("kvjax.")]
    assert [getattr(kvjax, policy.__name__, None) for policy in ours] == ours
    for name in (*_WRAPPERS, *_OF_PARTS, "chunk_token_hybrid"):
        assert getattr(kvjax, name) is getattr(kvjax.policies, name)


def test_every_bundled_licence_is_declared() -> None:
    """PEP 639: the expression says which licences what is installed comes under, and the package carries their texts."""
    root = Path(kvjax.__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    # Folders that are links are found under both names, and no licence lies in them.
    found = [path for path in [root / "LICENSE", *root.glob("kvjax/**/LICENSE*")] if path.is_file()]
    assert sorted(project["license-files"]) == sorted(str(path.relative_to(root)) for path in found)
    titles = {"Apache License": "Apache-2.0", "MIT License": "MIT"}
    named = {licence for path in found for title, licence in titles.items() if title in path.read_text()}
    assert set(canonicalize_license_expression(project["license"]).split(" AND ")) == named
    assert len(named) == len(found)


def test_all_is_what_the_reference_shows() -> None:
    """`__all__` has modules, the names under `kvjax` in the reference, and names of its other pages; no more, and each exists."""
    pages = {page.stem: page for page in (Path(kvjax.__file__).parents[1] / "docs/api").glob("*.rst")}
    texts = {name: page.read_text(encoding="utf-8") for name, page in pages.items()}
    listed = {name for text in texts.values() for name in re.findall(r"^   (\w+)$", text, flags=re.MULTILINE)}
    parts = re.findall(
        r"currentmodule:: kvjax\n(.*?)(?=^\.\. currentmodule|\Z)", texts["kvjax"], flags=re.MULTILINE | re.DOTALL
    )
    own = {name for part in parts for name in re.findall(r"^   (\w+)$", part, flags=re.MULTILINE)}
    modules = {name for name in kvjax.__all__ if isinstance(getattr(kvjax, name), types.ModuleType)}
    methods = {cls.__name__ for cls in kvjax.policies.policies().values()}
    assert len(own) >= 10
    assert own | methods <= set(kvjax.__all__)
    assert set(kvjax.__all__) - modules - methods <= listed
    assert modules == {"conversion", "evals", "models", "plots", "policies"}


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="'kvjax' has no attribute 'nope'"):
        kvjax.nope  # noqa: B018


def examples() -> list[tuple[str, str]]:
    """The examples in docstrings of the package, by file."""
    root = Path(kvjax.__file__).parent
    found = []
    linked = [root / name for name in ("models", "conversion", "pallas_kernels")]  # `rglob` does not follow links
    for file in {file.resolve() for folder in (root, *linked) for file in folder.rglob("*.py")}:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (said := ast.get_docstring(node)):
                code = "".join(example.source for example in doctest.DocTestParser().get_examples(said))
                found += [(file.name, code)] if code else []
    return found


def test_examples_in_docstrings_call_what_there_is() -> None:
    """They need models, so they do not run here. Their names exist, and their calls have arguments that are taken."""
    calls = 0
    for file, code in examples():
        for node in ast.walk(ast.parse(code)):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name.startswith("kvjax."):
                function = functools.reduce(getattr, name.split(".")[1:], kvjax)
                keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
                try:
                    inspect.signature(function).bind(*[None] * len(node.args), **keywords)
                except TypeError as error:
                    raise AssertionError(f"{file}: {ast.unparse(node)}: {error}") from None
                calls += 1
    assert calls >= 10


WITH_DOWNLOADS = {"load", "generate", "iterate", "stream", "aot_compile", "plan", "export", "register_for_export"}
"""Functions whose examples load the default model; the pages of the site run such calls."""

FUNCTIONS = [name for name in kvjax.__all__ if inspect.isfunction(getattr(kvjax, name))]
MORE = [
    *(f"plots.{name}" for name in ("draw", "costs", "coloured_text", "save", "check_format")),
    *(f"policies.{name}" for name in ("budget_tokens", "policies", "policy_class")),
    *("conversion.from_hf", "conversion.to_hf", "runtime.inspection.retained_positions"),
    *("evals.intervals.standard_error", "evals.intervals.mean_interval"),
]


@pytest.mark.parametrize("name", [*FUNCTIONS, *MORE])
def test_public_functions_have_an_example_that_runs(name: str, tiny: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_POLICIES", dict(registry._POLICIES))
    function = pkgutil.resolve_name(f"kvjax.{name}")
    (test,) = doctest.DocTestFinder(recurse=False).find(
        function, name, globs={"kvjax": kvjax, "params": tiny, "np": np}
    )
    assert test.examples
    if name not in WITH_DOWNLOADS:
        result = doctest.DocTestRunner().run(test)
        assert result.failed == 0
