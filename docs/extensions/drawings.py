"""The directive `drawing`, with the pictures of the concepts' pages and one of the house; its content is the words for those who do not see it."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive
from imports import ROWS, Sources, package_of
from sphinx.application import Sphinx

from .svg import Drawing


def cache() -> Drawing:
    """Keys and values of every token, layer by layer."""
    d = Drawing(370, 190)
    tokens = ["Call", "me", "Ish", "mael", ".", "Some", "years"]
    for i, token in enumerate(tokens):
        d.words(78 + i * 43, 20, token, "middle")
    for layer in range(3):
        y = 45 + layer * 42
        d.words(4, y + 14, f"layer {layer}")
        for i in range(len(tokens)):
            x = 60 + i * 43
            kind = "new" if i == len(tokens) - 1 else "kept"
            d.box(x, y, 18, 28, kind, "K")
            d.box(x + 18, y, 18, 28, kind, "V")
    d.words(4, 178, "A step adds one column (green), and its query reads all.")
    return d


def budgets() -> Drawing:
    """Bytes over tokens."""
    d = Drawing(380, 210)
    d.line((30, 20), (30, 170), (370, 170))
    d.line((30, 165), (360, 30), kind="merged")
    d.words(310, 30, "full cache", "end")
    d.line((30, 165), (125, 126), (360, 126), kind="kept")
    d.words(365, 113, "budget = 512", "end")
    d.line((30, 165), (360, 131.25), kind="new")
    d.words(262, 158, "budget = 0.25", "middle")
    d.words(200, 192, "tokens of the text and its continuation", "middle")
    d.words(12, 10, "bytes")
    return d


def families() -> Drawing:
    """Eviction, merging, sparse reading, fewer bits."""
    d = Drawing(380, 210)
    n = 12
    for row, name in enumerate(("evict", "merge", "read a part", "fewer bits")):
        y = 15 + row * 48
        d.words(4, y + 14, name)
        for i in range(n):
            x = 76 + i * 25
            if row == 0:
                d.box(x, y, 21, 28, "kept" if i in (0, 1, 4, 9, 10, 11) else "gone")
            elif row == 1:
                if i in (3, 6):
                    d.box(x, y, 46, 28, "merged")
                elif i not in (4, 7):
                    d.box(x, y, 21, 28, "kept")
            elif row == 2:
                d.box(x, y, 21, 28, "read" if i in (0, 4, 5, 10, 11) else "kept")
            else:
                d.box(x, y + (0 if i > 9 else 18), 21, 28 if i > 9 else 10, "kept")
    return d


def positions() -> Drawing:
    """Kept tokens at their positions in the text, or at their rank among the kept tokens."""
    d = Drawing(380, 150)
    kept = [0, 1, 5, 8, 9, 10]
    for i in range(11):
        d.box(78 + i * 27, 15, 23, 26, "kept" if i in kept else "gone", str(i))
    d.words(4, 28, "in the text")
    for place, i in enumerate(kept):
        d.box(78 + place * 27, 62, 23, 26, "kept", str(i))
        d.box(78 + place * 27, 105, 23, 26, "new", str(place))
    d.words(4, 75, "original")
    d.words(4, 118, "cache_rank")
    return d


def stages() -> Drawing:
    """Tokens kept over time, for four ways to compress."""
    d = Drawing(390, 230)
    d.line((20, 20), (20, 190), (385, 190))
    d.line((160, 20), (160, 190))
    d.words(90, 208, "prefill", "middle")
    d.words(272, 208, "decoding", "middle")
    d.words(4, 10, "tokens kept")
    d.line((20, 190), (160, 60), (385, 20), kind="merged")
    d.words(330, 16, "full", "end")
    d.line((160, 60), (160, 130), (385, 90), kind="kept")
    d.words(382, 76, "prompt only: snapkv", "end")
    points = [(160.0, 150.0)]
    for i in range(5):
        points += [(160 + (i + 1) * 45, 122), (160 + (i + 1) * 45, 150)]
    d.line(*points, kind="read")
    d.words(382, 164, "in rounds: rkv", "end")
    d.line((160, 178), (385, 178), kind="new")
    d.words(166, 166, "every step: tova")
    return d


def ragged() -> Drawing:
    """Rows of unlike lengths."""
    d = Drawing(380, 150)
    for row, (length, kept) in enumerate(((10, 4), (6, 4), (3, 3))):
        y = 30 + row * 38
        for i in range(10):
            d.box(6 + i * 19, y, 16, 26, "kept" if i < length else "gone")
        d.line((202, y + 13), (232, y + 13), arrow=True)
        for i in range(6):
            d.box(240 + i * 23, y, 20, 26, "kept" if i < kept else "new" if i < kept + 1 else "gone")
    d.words(100, 14, "prompts, padded on the right", "middle")
    d.words(308, 14, "slots after a step", "middle")
    return d


def program() -> Drawing:
    """Two compiled programs, and what goes round in the second."""
    d = Drawing(390, 244)
    d.box(140, 8, 110, 42, "kept", "prefill")
    d.words(258, 29, "prompt in, state out")
    d.line((195, 50), (195, 88), arrow=True)
    d.box(6, 90, 378, 146, "gone")
    d.words(195, 110, "decode: one program, compiled once", "middle")
    for i, name in enumerate(("append", "attend", "compress", "sample")):
        d.box(18 + i * 92, 134, 78, 42, "new", name)
        if i:
            d.line((4 + i * 92, 155), (18 + i * 92, 155), arrow=True)
    d.line((333, 176), (333, 210), (57, 210), (57, 176), arrow=True)
    return d


def blocks() -> Drawing:
    """A long text read block by block."""
    d = Drawing(380, 196)
    for i in range(3):
        x = 4 + i * 127
        d.box(x, 20, 44, 40, "kept", "kept")
        d.box(x + 47, 20, 64, 40, "new", f"block {i + 1}")
        d.line((x + 55, 64), (x + 55, 96), arrow=True)
        d.box(x + 33, 100, 44, 40, "kept", "kept")
        if i < 2:
            d.line((x + 77, 120), (x + 112, 120), (x + 147, 64), arrow=True)
    d.words(190, 164, "The policy chooses from the kept tokens and each block.", "middle")
    d.words(190, 182, "Memory does not grow.", "middle")
    return d


def house() -> Drawing:
    """Packages in rows, each importing from rows below it alone. Read from the sources."""
    below = _packages()
    level: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in level:
            level[name] = 1 + max(map(height, below[name]), default=-1)
        return level[name]

    rows: list[list[tuple[str, str]]] = [[] for _ in range(1 + max(map(height, below)))]
    for name in below:
        rows[level[name]].append((name, name))
    # An import from further down passes the rows between in places of its own, so that its line crosses no box.
    edges = [(a, b) for a in below for b in sorted(below[a]) if not any(b in below[c] for c in below[a])]
    for a, b in edges:
        for row in range(level[b] + 1, level[a]):
            rows[row].append((a, b))
    place: dict[tuple[str, str], float] = {}
    for row in reversed(rows):
        above = {way: [place[x] for x in _above(way, edges, place)] for way in row}
        row.sort(key=lambda way: sum(above[way]) / len(above[way]) if above[way] else 0.5)
        place |= {way: (i + 0.5) / len(row) for i, way in enumerate(row)}
    d = Drawing(340, 56 * len(rows))
    for a, b in edges:
        points = [(340 * place[a, a], 56 * (len(rows) - 1 - level[a]) + 34.0)]
        for row in range(level[a] - 1, level[b], -1):
            top = 56 * (len(rows) - 1 - row)
            points += [(340 * place[a, b], top), (340 * place[a, b], top + 34)]
        points.append((340 * place[b, b], 56 * (len(rows) - 1 - level[b])))
        d.line(*points, arrow=True)
    for name in below:
        d.box(340 * place[name, name] - 72, 56 * (len(rows) - 1 - level[name]), 144, 34, "kept", name)
    return d


def _above(
    way: tuple[str, str], edges: list[tuple[str, str]], place: dict[tuple[str, str], float]
) -> list[tuple[str, str]]:
    """What stands or passes in rows above and leads to a package, or to where an import passes."""
    if way[0] != way[1]:
        return [way if way in place else (way[0], way[0])]
    return [edge if edge in place else (edge[0], edge[0]) for edge in edges if edge[1] == way[0]]


def _packages() -> dict[str, set[str]]:
    """Packages by what they import, directly or through others."""
    direct: dict[str, set[str]] = {name: set() for row in ROWS for name in row}
    for a, b in Sources().imports:
        direct[package_of(a)].add(package_of(b))

    def reached(name: str) -> set[str]:
        return set().union(*({other} | reached(other) for other in direct[name] - {name}))

    def short(names: Iterable[str]) -> list[str]:
        return [name.removeprefix("kvjax.") for name in sorted(names) if name not in LEFT_OUT]

    return {name: set(short(reached(f"kvjax.{name}"))) for name in short(direct)}


LEFT_OUT = {"kvjax", "kvjax.__main__", "kvjax._util", "kvjax._version", "kvjax.devices", "kvjax.notebooks"}
"""The top-level modules, and the helpers that all packages use."""

DRAWINGS: dict[str, Callable[[], Drawing]] = {
    drawing.__name__: drawing
    for drawing in (cache, budgets, families, positions, stages, ragged, program, blocks, house)
}


class DrawingDirective(Directive):
    """A drawing, in the page itself, so that it has the page's colours."""

    required_arguments = 1
    has_content: ClassVar[bool] = True

    def run(self) -> list[Any]:
        name, alt = self.arguments[0], " ".join(self.content)
        if name not in DRAWINGS or not alt:
            raise self.error(f"drawing {name!r}: give one of {', '.join(DRAWINGS)}, and a description")
        return [nodes.raw("", DRAWINGS[name]().svg(alt), format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("drawing", DrawingDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
