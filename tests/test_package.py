"""The names that `import kvjax` offers."""

import ast
import doctest
import functools
import importlib
import importlib.util
import inspect
import re
import tomllib
import types
from pathlib import Path

import pytest
from packaging.licenses import canonicalize_license_expression

import kvjax
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
    """Their names exist, and their calls have arguments that are taken. The site's doctests run them (docs/conf.py)."""
    calls = 0
    for file, code in examples():
        for node in ast.walk(ast.parse(code)):
            if not isinstance(node, ast.Call) or not re.fullmatch(r"kvjax(\.\w+)+", name := ast.unparse(node.func)):
                continue
            given = [*node.args, *(keyword.arg for keyword in node.keywords)]
            if not any(isinstance(each, ast.Starred) or each is None for each in given):
                function = functools.reduce(getattr, name.split(".")[1:], kvjax)
                keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
                try:
                    inspect.signature(function).bind(*[None] * len(node.args), **keywords)
                except TypeError as error:
                    raise AssertionError(f"{file}: {ast.unparse(node)}: {error}") from None
                calls += 1
    assert calls >= 10


WITHOUT_EXAMPLE = {
    "kvjax.Plan": "`plan` returns it",
    "kvjax.CompiledGenerator": "`aot_compile` returns it",
    "kvjax.Exported": "`export` returns it",
    "kvjax.Generation": "`generate` returns it",
    "kvjax.GenerationStats": "`Generation` has it",
    "kvjax.Reply": "`beam_search` and sessions return it",
    "kvjax.conversion.Description": "`describe` returns it",
    "kvjax.PolicyError": "an error",
    "kvjax.conversion.CheckpointError": "an error",
    "kvjax.config.RopeScaling": "a protocol",
    "kvjax.runtime.sampling.RequestSampler": "a base class without a method that samples",
    "kvjax.policies.Surrogate": "made from files of published weights, which `KVzap` and `FastKVzip` read",
    "kvjax.pallas_kernels.Distance": "names of distances",
}
"""Public names whose docstrings need no example, and why."""


def public_names() -> dict[str, object]:
    """Public names of the reference with their values, as the build of the site finds them."""
    path = Path(kvjax.__file__).parents[1] / "docs/extensions/public.py"
    spec = importlib.util.spec_from_file_location("public", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.public_names())


def test_public_names_have_an_example() -> None:
    """Every function and class of the reference; its doctests run as the site is built."""
    pytest.importorskip("sphinx")
    names = {name: value for name, value in public_names().items() if callable(value)}
    assert len(names) >= 200
    assert set(WITHOUT_EXAMPLE) <= set(names)
    exempt = {id(names[name]) for name in WITHOUT_EXAMPLE}
    parser = doctest.DocTestParser()
    missing = [
        name
        for name, value in names.items()
        if id(value) not in exempt and not parser.get_examples(value.__doc__ or "")
    ]
    assert not missing, f"give the docstrings of {', '.join(missing)} an example"
    needless = [name for name in WITHOUT_EXAMPLE if parser.get_examples(names[name].__doc__ or "")]
    assert not needless, f"{', '.join(needless)} have an example; take them from WITHOUT_EXAMPLE"
