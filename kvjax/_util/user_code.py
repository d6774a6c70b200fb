"""Python code of the user's own that commands load: policies of `--policies-from`, and tasks."""

import importlib
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from . import user_files

POLICIES = "KVJAX_POLICIES"
"""Environment variable with the module of `--policies-from`; processes that a command starts inherit it."""


def load_module(source: str) -> ModuleType:
    """Import a Python file, or a module by its dotted name, which may be in the working directory.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: there is no such module, or importing it raises an error.
    """
    path = user_files.expanded(source)
    if path.suffix != ".py" and os.sep not in source:
        return _imported(source, os.getcwd(), source)
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{source}: no such file; give a Python file, or the name of a module")
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) != str(path):
        raise ImportError(f"{source}: Python has another module named {path.stem} already; give the file another name")
    return _imported(path.stem, str(path.parent), source)


def _imported(name: str, folder: str, source: str) -> ModuleType:
    """The module of that name; modules beside it in `folder` can be imported, too."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name is not None
            and f"{name}.".startswith(f"{error.name}.")
        ):
            raise ImportError(
                f"{source}: no such module; give a Python file, or a module that can be imported from here"
            ) from None
        raise ImportError(f"{source}: {_where(error)}{type(error).__name__}: {error}") from error


def _where(error: BaseException) -> str:
    """The line of the user's module that failed, as "line 3 of my_policy.py: "; nothing where it is not known."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if each.filename != __file__ and "importlib" not in each.filename]
    return f"line {own[0].lineno} of {Path(own[0].filename).name}: " if own else ""
