"""Cases of the kernel benchmark: operations of `kvjax.pallas_kernels` at shapes of real models.

`python -m benchmarks.kernels` checks and times them, and `tests/device/test_kernels.py` checks them. There is one
module per operation, or for two similar ones. Each has a function `cases()` that yields `Case`s.
"""

import importlib
import pkgutil
from collections.abc import Iterator

from .case import Case


def modules() -> list[str]:
    """Return the names of the modules that have cases."""
    return sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name != "case")


def cases(module: str) -> Iterator[Case]:
    """Return the cases of a module."""
    return importlib.import_module(f"{__name__}.{module}").cases()
