"""The names that `import kvjax` offers."""

import ast
import importlib
from pathlib import Path

import pytest

import kvjax


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
    assert homes == kvjax._HOMES
    assert modules == set(kvjax._MODULES)
    for name, module in homes.items():
        assert getattr(kvjax, name) is getattr(importlib.import_module(f"kvjax.{module}"), name)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="'kvjax' has no attribute 'nope'"):
        kvjax.nope  # noqa: B018
