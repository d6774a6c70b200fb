"""Imports optional packages on first use, and reports how to install missing ones."""

import importlib
import importlib.metadata
import shlex
import warnings
from typing import Any

from packaging.requirements import Requirement


def optional(module: str, purpose: str, extra: str = "eval") -> Any:
    """Import a module of an extra.

    Args:
        module: the module's name.
        purpose: what needs it, for the message.
        extra: the extra.

    Raises:
        ImportError: the module is not installed. The message has the command that installs it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old packages warn about themselves
            return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{purpose} needs {module.partition('.')[0]}: {install(extra)} ({error})") from None


def import_matplotlib() -> tuple[Any, Any]:
    """Import matplotlib's figure module, which needs no display, and its colour maps.

    Raises:
        ImportError: matplotlib is not installed. The message has the command that installs it.
    """
    return optional("matplotlib.figure", "a picture", "plot"), optional("matplotlib", "a picture", "plot").colormaps


def install(extra: str) -> str:
    """Command that installs an extra's packages by their own names. It works however kvjax was installed."""
    try:
        lines = importlib.metadata.requires("kvjax") or ()
    except importlib.metadata.PackageNotFoundError:  # in a checkout that is not installed
        lines = ()
    packages = []
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            requirement.marker = None
            packages.append(shlex.quote(str(requirement)))
    return " ".join(["pip install", *packages]) if packages else f"pip install '.[{extra}]' in kvjax's checkout"
