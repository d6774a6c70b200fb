"""What `python -m benchmarks.kernels` checks and times, and the device tests check: one module an operation, or two."""

import importlib
import pkgutil
from collections.abc import Iterator

from .case import Case


def modules() -> list[str]:
    """Names of the modules that have cases."""
    return sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name != "case")


def cases(module: str) -> Iterator[Case]:
    """The cases of one of them."""
    return importlib.import_module(f"{__name__}.{module}").cases()
