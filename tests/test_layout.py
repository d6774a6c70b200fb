"""How the package is laid out: imports run one way, and what is private to a module stays there. `benchmarks.counts` counts."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from benchmarks.counts import Import, Sources, circles, counts, within_circles

CIRCULAR: frozenset[Import] = frozenset()
"""Imports that close a circle and cannot be mended yet. This list only ever gets shorter."""

# What programs compiled ahead of time share with `generate`; both become clients of one engine.
PRIVATE: frozenset[tuple[str, str]] = frozenset()
"""Private names that other modules use, and who does. This list only ever gets shorter."""

REACHED = (
    "imports of the command line below it",
    "public methods of Policy",
    "public methods of Layer",
    "isinstance of a policy or state",
    "tests whether a method is overridden",
    "type errors ignored in policies",
    "operation folders of kernels",
)
"""Goals of `benchmarks.counts` that are reached, and stay so; the first two counts have lists of their own above."""


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources()


@pytest.fixture(scope="module")
def counted(sources: Sources) -> dict[str, Any]:
    """All counts of the package, by name."""
    return {count.name: count for count in counts(sources)}


def test_imports_run_one_way(sources: Sources) -> None:
    left = sources.imports - CIRCULAR
    assert not circles(left), "modules import each other; move what both need into a third:\n" + "\n".join(
        f"  {x.importer} imports {x.imported}" for x in within_circles(left)
    )
    needless = [x for x in CIRCULAR if not circles(left | {x})]
    assert not needless, f"these no longer close a circle; take them out of CIRCULAR: {needless}"


def test_private_names_stay_in_their_modules(sources: Sources) -> None:
    uses = {(place.module, place.text): place for place in sources.private()}
    new = [str(place) for use, place in uses.items() if use not in PRIVATE]
    assert not new, (
        "private names of other modules are used; make them public, or move the code to them:\n" + "\n".join(new)
    )
    assert uses.keys() >= PRIVATE, f"these are no longer used; take them out of PRIVATE: {PRIVATE - uses.keys()}"


@pytest.mark.parametrize("name", REACHED)
def test_reached_goals_stay_reached(counted: dict[str, Any], name: str) -> None:
    count = counted[name]
    assert count.value <= count.limit, f"{name}: {count.value}, at most {count.limit}: {', '.join(count.offenders)}"


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


def test_policies_are_counted(tmp_path: Path) -> None:
    found = package(
        tmp_path,
        policies__base="""
            class Policy:
                def f(self): ...
                @property
                def name(self): ...
                def _g(self): return type(self).f is Policy.f
            class Layer:
                def init(self): ...
        """,
        policies__mine="""
            @flax.struct.dataclass
            class State: ...
            @dataclasses.dataclass(frozen=True)
            class Profile: ...
            @partial(jax.tree_util.register_dataclass, data_fields=())
            class Other: ...
            class Mine(Policy):
                def f(self, x):  # pyright: ignore
                    return isinstance(x, State), isinstance(x, Profile | int), isinstance(x, Other), isinstance(x, type(self))
        """,
        engine="def f(p, n): return isinstance(p, int | mine.Mine), getattr(type(p), n) is not 1, isinstance(n, int), n is Kind.A",
        other="def f(c): return c.f is Mine.f",
        evals__x="from kvjax.cli import y",
        pallas_kernels__f__api="def f(): ...",
        pallas_kernels__f__reference="def f(): ...",
        cli__y="from kvjax.evals import x",
    )
    found = {count.name: count.value for count in counts(found)}
    assert found == {
        "circles of imports": 1,
        "private names used across modules": 0,
        "imports of the command line below it": 1,
        "public methods of Policy": 1,
        "public methods of Layer": 1,
        "isinstance of a policy or state": 4,
        "tests whether a method is overridden": 3,
        "type errors ignored in policies": 1,
        "operation folders of kernels": 1,
        "source lines": 24,
    }
