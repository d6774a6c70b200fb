"""How the package's own code is laid out, in numbers, each beside its goal: `python -m benchmarks.counts`.

Everything is read from the sources with `ast`, nothing is imported, so that a circle cannot hide behind a lazy import. Each file counts
once: `kvjax.models`, `kvjax.conversion` and `kvjax.pallas_kernels` are links to the folders at the top.
"""

import ast
import dataclasses
import re
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

BELOW_THE_COMMAND_LINE = ("kvjax.evals", "kvjax.calibration", "kvjax.bench", "kvjax.analysis")
"""What serves Python as well, and so never imports `kvjax.cli`."""

NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_field_defaults", "_make"}
"""Public, whatever the underscore says."""


class Import(NamedTuple):
    """One module names another, wherever in the file and for whatever reason (`TYPE_CHECKING`, lazily)."""

    importer: str
    imported: str


class Place(NamedTuple):
    """A line of a module, with something to count."""

    module: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.module}, line {self.line}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Count:
    """A number, what it is to be at most, and what it consists of."""

    name: str
    value: int
    limit: int
    offenders: tuple[str, ...] = ()


class Module:
    """A source file."""

    def __init__(self, name: str, file: Path):
        """Read and parse it."""
        self.name, self.file = name, file
        self.text = file.read_text()
        self.tree = ast.parse(self.text)

    @property
    def package(self) -> str:
        """The package that its relative imports start from."""
        return self.name if self.file.name == "__init__.py" else self.name.rpartition(".")[0]

    def within(self, *packages: str) -> bool:
        """Whether it lies in one of the packages."""
        return any(self.name == package or self.name.startswith(f"{package}.") for package in packages)

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

    def lines(self) -> int:
        """Lines of all files."""
        return sum(len(module.text.splitlines()) for module in self.modules.values())

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

    def operation_folders(self, package: str = "kvjax.pallas_kernels") -> list[str]:
        """Packages of kernels, one per idea."""
        return sorted(
            module.name
            for module in self.modules.values()
            if module.file.name == "__init__.py" and module.name.rpartition(".")[0] == package
        )

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

    def uses_of_the_command_line(self) -> list[Import]:
        """Imports of `kvjax.cli` by what must do without it."""
        return sorted(
            found
            for found in self.imports
            if found.imported.startswith("kvjax.cli") and self.modules[found.importer].within(*BELOW_THE_COMMAND_LINE)
        )

    @cached_property
    def state_classes(self) -> tuple[set[str], set[str]]:
        """Names of all policies, and of all pytree dataclasses beside them and in the cache's own modules."""
        bases: dict[str, set[str]] = {}
        states = set()
        for module in self.modules.values():
            for node in ast.walk(module.tree) if module.within("kvjax.policies", "kvjax.cache") else ():
                if isinstance(node, ast.ClassDef):
                    bases[node.name] = {name for base in node.bases for name in _names(base)}
                    marks = " ".join(map(ast.unparse, [*node.decorator_list, *node.bases]))
                    if re.search(
                        r"\b(struct\.dataclass|register_dataclass|register_pytree_node_class|PyTreeNode)\b", marks
                    ):
                        states.add(node.name)
        policies = {"Policy"}
        while found := {name for name, above in bases.items() if above & policies} - policies:
            policies |= found
        while found := {name for name, above in bases.items() if above & states} - states:
            states |= found
        return policies, states

    def instance_tests(self) -> list[Place]:
        """`isinstance` of a policy or of a state, for which code should not have to ask."""
        policies, states = self.state_classes
        found = []
        for module in self.modules.values():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" and len(node.args) == 2:
                    own_type = module.within("kvjax.policies") and ast.unparse(node.args[1]).startswith("type(")
                    if own_type or _names(node.args[1]) & (policies | states):
                        found.append(module.place(node))
        return found

    def identity_tests(self) -> list[Place]:
        """`type(x).f is Base.f`: whether a method was overridden, which is to be declared instead."""
        policies, _ = self.state_classes
        return [
            module.place(node)
            for module in self.modules.values()
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Compare)
            and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
            and any(_attribute_of_class(side, policies) for side in (node.left, *node.comparators))
        ]

    def ignores(self, package: str = "kvjax.policies") -> list[Place]:
        """Lines at which the type checker is told to look away."""
        return [
            Place(module.name, number, line.strip())
            for module in self.modules.values()
            if module.within(package)
            for number, line in enumerate(module.text.splitlines(), 1)
            if re.search(r"#\s*(pyright|type):\s*ignore", line)
        ]

    def public_methods(self, name: str, module: str = "kvjax.policies.base") -> list[str]:
        """Functions that a class defines in its own body for others to call, its properties left out; none where there is no such class."""
        body = self.modules[module].tree.body if module in self.modules else []
        return sorted(
            {
                method.name
                for node in body
                if isinstance(node, ast.ClassDef) and node.name == name
                for method in node.body
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
                and not method.name.startswith("_")
                and not any(isinstance(x, ast.Name) and x.id == "property" for x in method.decorator_list)
            }
        )


def circles(imports: Iterable[Import]) -> list[list[str]]:
    """Modules that import each other, directly or through others: the strongly connected sets of more than one, sorted."""
    outgoing: dict[str, set[str]] = {}
    for importer, imported in imports:
        outgoing.setdefault(importer, set()).add(imported)
        outgoing.setdefault(imported, set())
    reached = {module: _reachable(module, outgoing) for module in outgoing}
    together = {module: frozenset(x for x in reached[module] if module in reached[x]) for module in outgoing}
    return sorted(sorted(group) for group in set(together.values()) if group)


def within_circles(imports: Iterable[Import]) -> list[Import]:
    """Those imports that circles consist of."""
    imports = list(imports)
    home = {module: i for i, group in enumerate(circles(imports)) for module in group}
    return sorted(x for x in imports if x.importer in home and home[x.importer] == home.get(x.imported))


def counts(sources: Sources | None = None) -> list[Count]:
    """Everything that is counted."""
    sources = sources or Sources()
    policy, layer = (tuple(sources.public_methods(name)) for name in ("Policy", "Layer"))
    operations = tuple(sources.operation_folders())
    groups = tuple(" <-> ".join(group) for group in circles(sources.imports))

    def listed(name: str, found: Iterable[object]) -> Count:
        texts = tuple(map(str, found))
        return Count(name, len(texts), 0, texts)

    return [
        listed("circles of imports", groups),
        listed("private names used across modules", sources.private()),
        listed(
            "imports of the command line below it", (f"{a} imports {b}" for a, b in sources.uses_of_the_command_line())
        ),
        Count("public methods of Policy", len(policy), 8, policy),
        Count("public methods of Layer", len(layer), 5, layer),
        listed("isinstance of a policy or state", sources.instance_tests()),
        listed("tests whether a method is overridden", sources.identity_tests()),
        listed("type errors ignored in policies", sources.ignores()),
        Count("operation folders of kernels", len(operations), 12, operations),
        Count("source lines", sources.lines(), 26337),
    ]


def _dotted(package: str, path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _defined(node: ast.AST) -> Iterator[str]:
    """Names that a node gives to something: definitions, assigned names and attributes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr


def _names_of_other_packages(tree: ast.Module) -> set[str]:
    """Names bound to what other packages offer, whose private names are between them and us."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                alias.asname or alias.name.split(".")[0] for alias in node.names if not alias.name.startswith("kvjax")
            }
        elif isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith("kvjax"):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def _names(node: ast.expr) -> set[str]:
    """Classes that an expression names: `A`, `module.A`, `A | B`, `(A, B)`, `A[int]`."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute):
        return {node.attr}
    if isinstance(node, ast.Subscript):
        return _names(node.value)
    if isinstance(node, ast.BinOp):
        return _names(node.left) | _names(node.right)
    if isinstance(node, ast.Tuple):
        return {name for item in node.elts for name in _names(item)}
    return set()


def _attribute_of_class(node: ast.expr, classes: set[str]) -> bool:
    """`type(x).name` or `Class.name`, for one of the classes; also by `getattr`."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and node.args:
        owner = node.args[0]
    elif isinstance(node, ast.Attribute):
        owner = node.value
    else:
        return False
    return bool(_names(owner) & classes) or (isinstance(owner, ast.Call) and ast.unparse(owner.func) == "type")


def _reachable(start: str, outgoing: dict[str, set[str]]) -> set[str]:
    """What can be reached from a module in one step or more."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for module in outgoing[waiting.pop()] - seen:
            seen.add(module)
            waiting.append(module)
    return seen


def main() -> None:
    """Print the table, and below it what stands in the way of each goal."""
    found = counts()
    width = max(len(count.name) for count in found)
    for count in found:
        print(f"{count.name:{width}} {count.value:7,}   goal: at most {count.limit:,}")
    for count in found:
        if count.value > count.limit and count.offenders:
            print(f"\n{count.name}:")
            print("\n".join(f"  {offender}" for offender in count.offenders))


if __name__ == "__main__":
    main()
