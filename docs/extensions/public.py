"""What is public: the names that packages take from their modules (`from .x import y as y`), and those of some modules.

A public name that is on no page of the reference, or has no docstring, is a warning, and so fatal in a build with `-W`.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

PACKAGES = (
    "kvjax",
    "kvjax.cache",
    "kvjax.config",
    "kvjax.conversion",
    "kvjax.evals",
    "kvjax.evals.ruler",
    "kvjax.models",
    "kvjax.pallas_kernels",
    "kvjax.policies",
)
MODULES = (
    "kvjax.analysis.attention",
    "kvjax.analysis.key_similarity",
    "kvjax.analysis.layers",
    "kvjax.analysis.recall",
    "kvjax.analysis.recording",
    "kvjax.analysis.wavelet",
    "kvjax.calibration.make_profile",
    "kvjax.evals.compare",
    "kvjax.evals.intervals",
    "kvjax.evals.recommend",
    "kvjax.notebooks",
    "kvjax.plots",
    "kvjax.runtime.beam",
    "kvjax.runtime.inspection",
    "kvjax.runtime.sampling",
)

logger = logging.getLogger(__name__)


def public_names() -> Iterator[tuple[str, Any]]:
    """All public names with their values, except modules."""
    for name in (*PACKAGES, *MODULES):
        module = importlib.import_module(name)
        for attribute in _of_package(module) if name in PACKAGES else _of_module(module):
            value = getattr(module, attribute)
            if not inspect.ismodule(value):
                yield f"{name}.{attribute}", value


def _of_package(module: Any) -> list[str]:
    """Names imported as themselves, by which a package exports them; with `*`, those of the module."""
    tree = ast.parse(inspect.getsource(module))
    found: list[str] = []
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
        for alias in node.names:
            if alias.name == "*":
                found += _of_package(importlib.import_module(f".{node.module}", module.__name__))
            elif alias.asname == alias.name and not alias.name.startswith("_"):
                found.append(alias.name)
    return found


def _of_module(module: Any) -> list[str]:
    """Functions and classes without an underscore that are made there."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]


def missing(documented: set[str]) -> list[str]:
    """What is wrong: public names that no page of the reference has, by this or another name, or without a docstring."""
    names = list(public_names())
    reached = {id(value) for name, value in names if name in documented}
    found: list[str] = []
    for name, value in names:
        if id(value) not in reached:
            found.append(f"{name} is public and on no page of docs/api; add it to one")
        if (inspect.isclass(value) or inspect.isfunction(value)) and not inspect.getdoc(value):
            found.append(f"{name} is public and has no docstring; write one")
    return found


def _check(app: Sphinx, env: BuildEnvironment) -> None:
    for line in missing(set(env.domains.python_domain.objects)):
        logger.warning(line, type="public")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("env-check-consistency", _check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
