"""How the package is laid out: imports run one way, and private names stay in their modules."""

import textwrap
from pathlib import Path

import pytest
from imports import ROWS, Import, Sources, circles, package_of, upward, within_circles


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources()


def test_packages_import_only_from_rows_below(sources: Sources) -> None:
    """Without exception; imports within functions count."""
    found = upward(sources.imports)
    assert not found, "these imports lead to no lower row of `imports.ROWS`:\n" + "\n".join(
        f"  {x.importer} imports {x.imported}" for x in found
    )


def test_modules_do_not_import_each_other(sources: Sources) -> None:
    assert not circles(sources.imports), "modules import each other; move what both need into a third:\n" + "\n".join(
        f"  {x.importer} imports {x.imported}" for x in within_circles(sources.imports)
    )


def test_private_names_stay_in_their_modules(sources: Sources) -> None:
    found = sources.private()
    assert not found, (
        "private names of other modules are used; make them public, or move the code to them:\n"
        + "\n".join(map(str, found))
    )


def package(root: Path, **files: str) -> Sources:
    """A package of that source, by module with `__` for dots; `p__package` is what stands in `p/__init__.py`."""
    for name, text in files.items():
        path = root / "kvjax" / f"{name.replace('__', '/').replace('package', '__init__')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        (path.parent / "__init__.py").touch()
    return Sources({"kvjax": "kvjax"}, root)


@pytest.mark.parametrize(
    "back",
    [
        "from kvjax.a import x",
        "from .a import x",
        "from . import a",
        "import kvjax.a",
        "def f():\n    from kvjax.a import x",
        "if TYPE_CHECKING:\n    from .a import x",
        "from .c import y",
    ],
)
def test_circles_are_found(tmp_path: Path, back: str) -> None:
    found = package(tmp_path, a="from kvjax.b import y\nx = 1", b=back, c="def f():\n    from . import a")
    assert any({"kvjax.a", "kvjax.b"} <= set(group) for group in circles(found.imports))
    assert Import("kvjax.a", "kvjax.b") in within_circles(found.imports)


def test_a_package_reexports_and_its_modules_do_not_ask_it(tmp_path: Path) -> None:
    files = {"p__package": "from .a import f as f\nfrom .b import b as b", "p__a": "f = 1", "p__b": "b = 1"}
    assert not circles(package(tmp_path, **files, user="from kvjax.p import f, b").imports)
    # The package's `b` is what `__init__` took from the module of that name, not the module.
    assert circles(package(tmp_path, **files | {"p__a": "from kvjax.p import b"}).imports) == [["kvjax.p", "kvjax.p.a"]]
    assert circles(package(tmp_path, p__package="SIZE = 1", p__a="from . import SIZE").imports) == [
        ["kvjax.p", "kvjax.p.a"]
    ]


def test_private_uses_are_found(tmp_path: Path) -> None:
    found = package(
        tmp_path,
        a="def _f(): ...\nclass C:\n    _size = 1\n    def g(self, other): return self._size + other._size",
        b="import os\nfrom . import a\nfrom .a import C, _f\na._f(C._size)\nos._exit(1)\nC._replace()",
    )
    assert {place.text for place in found.private()} == {"_f of kvjax.a", "a._f", "C._size"}
    assert {place.module for place in found.private()} == {"kvjax.b"}


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("config__model", "from kvjax._util import texts"),
        ("_util__texts", "from kvjax.config.model import x"),
        ("cache__spec", "from kvjax.models import Params"),
        ("cache__spec", "def f():\n    from ..models import params"),
        ("policies__base", "if TYPE_CHECKING:\n    import kvjax.models.params"),
        ("evals__task", "from kvjax.cli import options"),
        ("runtime__engine", "from kvjax import cli"),
        ("models__package", "import kvjax"),
    ],
)
def test_upward_imports_are_found(tmp_path: Path, module: str, text: str) -> None:
    files = {
        "package": "",
        "_util__texts": "",
        "config__model": "x = 1",
        "models__params": "from kvjax.config.model import x",
        "models__package": "from .params import Params as Params",
        "cli__options": "from kvjax.models import params",
    }
    assert not upward(package(tmp_path, **files).imports)
    found = upward(package(tmp_path, **files | {module: text}).imports)
    assert [x.importer for x in found] == ["kvjax." + module.replace("__package", "").replace("__", ".")]


def test_every_package_is_in_a_row(sources: Sources) -> None:
    """So that a new one gets its place in the order."""
    assert {package_of(module) for module in sources.modules} == {name for row in ROWS for name in row}
    with pytest.raises(KeyError, match=r"kvjax\.new\.a is in no package"):
        package_of("kvjax.new.a")
