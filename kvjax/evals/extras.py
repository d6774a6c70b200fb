"""Packages that only some evaluations need, imported when one does."""

import importlib
import warnings
from typing import Any


def optional(module: str, purpose: str, extra: str = "eval") -> Any:
    """Import a module of an extra.

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some are old, and warn of themselves
            return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{purpose} needs {module}: pip install 'kvjax[{extra}]' ({error})") from None
