"""Packages that only some parts need, imported when one does; and how those that are missing are had."""

import importlib
import importlib.metadata
import shlex
import warnings
from typing import Any

from packaging.requirements import Requirement


def optional(module: str, purpose: str, extra: str = "eval") -> Any:
    """Import a module of an extra.

    Raises:
        ImportError: it is not installed; the message says how it is.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some are old, and warn of themselves
            return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{purpose} needs {module.partition('.')[0]}: {install(extra)} ({error})") from None


def import_matplotlib() -> tuple[Any, Any]:
    """Matplotlib's module of figures, which need no display, and its colour maps.

    Raises:
        ImportError: it is not installed; the message says how it is.
    """
    return optional("matplotlib.figure", "a picture", "plot"), optional("matplotlib", "a picture", "plot").colormaps


def install(extra: str) -> str:
    """The command that installs an extra's packages by their own names, which works wherever kvjax itself came from."""
    try:
        lines = importlib.metadata.requires("kvjax") or ()
    except importlib.metadata.PackageNotFoundError:  # used from a checkout that is not installed
        lines = ()
    packages = []
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            requirement.marker = None
            packages.append(shlex.quote(str(requirement)))
    return " ".join(["pip install", *packages]) if packages else f"pip install '.[{extra}]' in kvjax's checkout"
