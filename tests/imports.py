"""What the modules of kvjax import of each other, and the order of its packages.

The sources are parsed and not imported, so imports within functions and under `TYPE_CHECKING` count too.
Each file is read once: `kvjax/models`, `kvjax/conversion` and `kvjax/pallas_kernels` are links to the top-level folders.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "kvjax": "kvjax",
    "models": "kvjax.models",
    "conversion": "kvjax.conversion",
    "pallas_kernels": "kvjax.pallas_kernels",
}
"""Folders with sources, and the names under which they are imported."""

ROWS = (
    ("kvjax._util", "kvjax._version", "kvjax.config", "kvjax.devices", "kvjax.notebooks"),
    ("kvjax.pallas_kernels",),
    ("kvjax.cache",),
    ("kvjax.policies",),
    ("kvjax.models",),
    ("kvjax.conversion",),
    ("kvjax.runtime",),
    ("kvjax.calibration", "kvjax.integrations", "kvjax.plots"),
    ("kvjax.analysis",),
    ("kvjax.evals",),
    ("kvjax.bench",),
    ("kvjax.planning", "kvjax.serve"),
    ("kvjax",),
    ("kvjax.cli",),
    ("kvjax.__main__",),
)
"""Packages and top-level modules, from the bottom up. Each imports only from rows below its own; `kvjax` is the top-level `__init__`."""

NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_field_defaults", "_make"}
"""Public, whatever the underscore says."""


class Import(NamedTuple):
    """One module imports another, at any place in its file."""

    importer: str
    imported: str


class Place(NamedTuple):
    """A line of a module."""

    module: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.module}, line {self.line}: {self.text}"


class Module:
    """A source file."""

    def __init__(self, name: str, file: Path):
        """Read and parse it."""
        self.name, self.file = name, file
        self.tree = ast.parse(file.read_text())

    @property
    def package(self) -> str:
        """The package that its relative imports start from."""
        return self.name if self.file.name == "__init__.py" else self.name.rpartition(".")[0]

    def place(self, node: ast.expr | ast.stmt) -> Place:
        """Where `node` is."""
        return Place(self.name, node.lineno, " ".join(ast.unparse(node).split())[:100])

    def base(self, node: ast.ImportFrom) -> str:
        """The absolute name of the module that `from … import` names."""
        if not node.level:
            return node.module or ""
        parents = self.package.split(".")
        return ".".join([*parents[: len(parents) - node.level + 1], *([node.module] if node.module else [])])


class Sources:
    """The package's modules and what they import of each other."""

    def __init__(self, folders: dict[str, str] = FOLDERS, root: Path = ROOT):
        """Read all files below `folders`, whose values are the packages' names; links are not followed."""
        files = {
            _dotted(package, file.relative_to(root / folder)): file
            for folder, package in folders.items()
            for file in sorted((root / folder).rglob("*.py"))
        }
        self.modules = {name: Module(name, file) for name, file in files.items()}

    def imported(self, module: Module) -> Iterator[tuple[str, str | None, ast.stmt]]:
        """Modules of the package that a module imports, with the name taken from each, if one is.

        `from package import name` imports `package.name` where that is a module, and not hidden by something that `__init__` calls so;
        otherwise the package's own `__init__`.
        """
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in self.modules:
                        yield alias.name, None, node
            elif isinstance(node, ast.ImportFrom):
                base = module.base(node)
                for alias in node.names:
                    submodule = f"{base}.{alias.name}"
                    if submodule in self.modules and alias.name not in self._reexported(base):
                        yield submodule, None, node
                    elif base in self.modules:
                        yield base, alias.name, node

    def _reexported(self, package: str) -> set[str]:
        """Names that a package's `__init__` takes from its modules."""
        if package not in self.modules:
            return set()
        module = self.modules[package]
        return {
            alias.asname or alias.name
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ImportFrom) and module.base(node) != package
            for alias in node.names
        }

    @cached_property
    def imports(self) -> set[Import]:
        """All imports of modules by other modules; a package's `__init__` counts as importing those of its modules that import it."""
        found = {
            Import(name, other)
            for name, module in self.modules.items()
            for other, _, _ in self.imported(module)
            if other != name
        }
        return found | {Import(b, a) for a, b in found if b == a.rpartition(".")[0]}

    def private(self) -> list[Place]:
        """Uses of another module's private names: imported, or as an attribute that the module itself does not define."""
        found = []
        for module in self.modules.values():
            found += [
                Place(module.name, node.lineno, f"{name} of {other}")
                for other, name, node in self.imported(module)
                if name and _is_private(name)
            ]
            own = {name for node in ast.walk(module.tree) for name in _defined(node)}
            outside = {"self", "cls"} | _names_of_other_packages(module.tree)
            for node in ast.walk(module.tree):
                if not isinstance(node, ast.Attribute) or not _is_private(node.attr) or node.attr in NAMED_TUPLE | own:
                    continue
                if not (isinstance(node.value, ast.Name) and node.value.id in outside):
                    found.append(module.place(node))
        return found


def upward(imports: Iterable[Import]) -> list[Import]:
    """The imports that do not lead to a lower row of `ROWS`; imports within a package are left out."""
    level = {package: number for number, row in enumerate(ROWS) for package in row}

    def rises(importer: str, imported: str) -> bool:
        return importer != imported and level[imported] >= level[importer]

    return sorted(x for x in imports if rises(package_of(x.importer), package_of(x.imported)))


def package_of(module: str) -> str:
    """The package or top-level module of `ROWS` that a module belongs to.

    Raises:
        KeyError: the module is in none of them.
    """
    name = ".".join(module.split(".")[:2])
    if not any(name in row for row in ROWS):
        raise KeyError(f"{module} is in no package of ROWS; add its package to a row")
    return name


def circles(imports: Iterable[Import]) -> list[list[str]]:
    """Modules that import each other, directly or through others: the strongly connected sets of two or more, sorted."""
    outgoing: dict[str, set[str]] = {}
    for importer, imported in imports:
        outgoing.setdefault(importer, set()).add(imported)
        outgoing.setdefault(imported, set())
    reached = {module: _reachable(module, outgoing) for module in outgoing}
    together = {module: frozenset(x for x in reached[module] if module in reached[x]) for module in outgoing}
    return sorted(sorted(group) for group in set(together.values()) if group)


def within_circles(imports: Iterable[Import]) -> list[Import]:
    """The imports that circles consist of."""
    imports = list(imports)
    home = {module: i for i, group in enumerate(circles(imports)) for module in group}
    return sorted(x for x in imports if x.importer in home and home[x.importer] == home.get(x.imported))


def _dotted(package: str, path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _defined(node: ast.AST) -> Iterator[str]:
    """Names that a node defines or assigns, attributes included."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr


def _names_of_other_packages(tree: ast.Module) -> set[str]:
    """Names bound to other distributions' modules and what is imported from them; their private names are not checked."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                alias.asname or alias.name.split(".")[0] for alias in node.names if not alias.name.startswith("kvjax")
            }
        elif isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith("kvjax"):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def _reachable(start: str, outgoing: dict[str, set[str]]) -> set[str]:
    """What can be reached from a module in one step or more."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for module in outgoing[waiting.pop()] - seen:
            seen.add(module)
            waiting.append(module)
    return seen
