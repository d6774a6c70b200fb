"""The directive `drawing`, with the pictures of the concepts' pages and one of the house; its content is the words for those who do not see it."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from benchmarks.counts import Sources

from .svg import Drawing

CELL = 22
STEP = 26


def cache() -> Drawing:
    """Keys and values of every token, layer by layer."""
    d = Drawing(520, 190)
    tokens = ["Call", "me", "Ish", "mael", ".", "Some", "years"]
    for i, token in enumerate(tokens):
        d.words(150 + i * 48, 20, token, "middle")
    for layer in range(3):
        y = 45 + layer * 42
        d.words(8, y + 14, f"layer {layer}")
        for i in range(len(tokens)):
            x = 130 + i * 48
            kind = "new" if i == len(tokens) - 1 else "kept"
            d.box(x, y, 20, 28, kind, "K")
            d.box(x + 20, y, 20, 28, kind, "V")
    d.words(8, 178, "A step adds one column (green), and its query reads all of them.")
    return d


def budgets() -> Drawing:
    """Bytes over tokens."""
    d = Drawing(520, 210)
    d.line((50, 20), (50, 170), (490, 170))
    d.line((50, 165), (470, 30), kind="merged")
    d.words(400, 32, "full cache", "end")
    d.line((50, 165), (170, 126), (470, 126), kind="kept")
    d.words(475, 112, "budget = 512", "end")
    d.line((50, 165), (470, 132.5 - 1.2), kind="new")
    d.words(300, 160, "budget = 0.25", "middle")
    d.words(270, 192, "tokens of the text and its continuation", "middle")
    d.words(12, 12, "bytes")
    return d


def families() -> Drawing:
    """Eviction, merging, sparse reading, fewer bits."""
    d = Drawing(560, 210)
    n = 12
    for row, name in enumerate(("evict", "merge", "read a part", "fewer bits")):
        y = 15 + row * 48
        d.words(8, y + 14, name)
        for i in range(n):
            x = 110 + i * 36
            if row == 0:
                d.box(x, y, 28, 28, "kept" if i in (0, 1, 4, 9, 10, 11) else "gone")
            elif row == 1:
                if i in (3, 6):
                    d.box(x, y, 64, 28, "merged")
                elif i not in (4, 7):
                    d.box(x, y, 28, 28, "kept")
            elif row == 2:
                d.box(x, y, 28, 28, "read" if i in (0, 4, 5, 10, 11) else "kept")
            else:
                d.box(x, y + (0 if i > 9 else 18), 28, 28 if i > 9 else 10, "kept")
    return d


def positions() -> Drawing:
    """Kept tokens where they stood, or by their place among the kept."""
    d = Drawing(560, 150)
    kept = [0, 1, 5, 8, 9, 10]
    for i in range(11):
        d.box(130 + i * 38, 15, 30, 26, "kept" if i in kept else "gone", str(i))
    d.words(8, 28, "in the text")
    for place, i in enumerate(kept):
        d.box(130 + place * 38, 62, 30, 26, "kept", str(i))
        d.box(130 + place * 38, 105, 30, 26, "new", str(place))
    d.words(8, 75, "original")
    d.words(8, 118, "cache_rank")
    return d


def stages() -> Drawing:
    """Tokens held over time, for four ways to compress."""
    d = Drawing(560, 230)
    d.line((60, 15), (60, 190), (540, 190))
    d.line((260, 20), (260, 190))
    d.words(160, 208, "reading the prompt", "middle")
    d.words(400, 208, "decoding", "middle")
    d.words(10, 10, "tokens held")
    d.line((60, 190), (260, 60), (540, 20), kind="merged")
    d.words(470, 18, "full", "end")
    d.line((260, 60), (260, 130), (540, 90), kind="kept")
    d.words(535, 78, "prompt only: snapkv", "end")
    points = [(260.0, 150.0)]
    for i in range(5):
        points += [(260 + (i + 1) * 56, 122), (260 + (i + 1) * 56, 150)]
    d.line(*points, kind="read")
    d.words(535, 165, "in rounds: rkv", "end")
    d.line((260, 178), (540, 178), kind="new")
    d.words(270, 168, "every step: tova")
    return d


def ragged() -> Drawing:
    """Rows of unlike lengths."""
    d = Drawing(560, 150)
    for row, (length, kept) in enumerate(((10, 4), (6, 4), (3, 3))):
        y = 30 + row * 38
        for i in range(10):
            d.box(20 + i * 27, y, 23, 26, "kept" if i < length else "gone")
        d.line((296, y + 13), (336, y + 13), arrow=True)
        for i in range(6):
            d.box(350 + i * 32, y, 28, 26, "kept" if i < kept else "new" if i < kept + 1 else "gone")
    d.words(150, 14, "prompts, padded on the right", "middle")
    d.words(446, 14, "slots after a step", "middle")
    return d


def program() -> Drawing:
    """Two compiled programs, and what goes round in the second."""
    d = Drawing(580, 170)
    d.box(10, 60, 110, 46, "kept", "prefill")
    d.words(65, 125, "prompt in, state out", "middle")
    d.line((120, 83), (178, 83), arrow=True)
    d.box(165 + 15, 20, 390, 126, "gone")
    d.words(375, 34, "decode: one program, compiled once", "middle")
    for i, name in enumerate(("append", "attend", "compress", "sample")):
        d.box(196 + i * 92, 62, 78, 42, "new", name)
        if i:
            d.line((182 + i * 92, 83), (196 + i * 92, 83), arrow=True)
    d.line((511, 104), (511, 128), (235, 128), (235, 104), arrow=True)
    return d


def blocks() -> Drawing:
    """A long text read block by block."""
    d = Drawing(570, 190)
    for i in range(3):
        x = 15 + i * 190
        d.box(x, 30, 70, 40, "kept", "kept")
        d.box(x + 74, 30, 84, 40, "new", f"block {i + 1}")
        d.line((x + 80, 74), (x + 80, 106), arrow=True)
        d.box(x + 30, 110, 70, 40, "kept", "kept")
        if i < 2:
            d.line((x + 100, 130), (x + 172, 130), (x + 220, 74), arrow=True)
    d.words(285, 172, "From what is kept and each block the policy chooses anew; memory does not grow.", "middle")
    return d


def house() -> Drawing:
    """Packages by how far up they stand: each imports only from rows below it. Read from the sources."""
    groups: dict[str, set[str]] = defaultdict(set)
    for a, b in Sources().imports:
        above, below = map(_group, (a, b))
        if above and below and above != below:
            groups[above].add(below)
            groups[below]
    level: dict[str, int] = {}

    def height(name: str, path: tuple[str, ...] = ()) -> int:
        if name not in level:
            # Packages may import each other where their modules do not: the circle is cut where it closes.
            level[name] = 1 + max(
                (height(x, (*path, name)) for x in groups[name] if x not in (*path, name)), default=-1
            )
        return level[name]

    for name in sorted(groups, key=lambda name: len(groups[name])):
        height(name)
    rows: dict[int, list[str]] = defaultdict(list)
    for name in sorted(groups):
        rows[level[name]].append(name)
    order = sorted(rows, reverse=True)
    d = Drawing(640, 60 * len(order) + 10)
    place: dict[str, tuple[float, float]] = {}
    for i, row in enumerate(order):
        width = 620 / len(rows[row])
        for j, name in enumerate(rows[row]):
            place[name] = 10 + width * (j + 0.5), 60 * i + 10
    direct = {
        (a, b)
        for a in groups
        for b in groups[a]
        if level[a] > level[b] and not any(b in groups[c] for c in groups[a] if level[a] > level[c] > level[b])
    }
    for a, b in sorted(direct):
        (x, y), (u, v) = place[a], place[b]
        d.line((x, y + 34), (u, v), arrow=True)
    for name, (x, y) in place.items():
        d.box(x - 58, y, 116, 34, "kept", name.removeprefix("kvjax."))
    return d


def _group(module: str) -> str:
    """The package that a module stands in; single modules at the top serve all and are left out."""
    parts = module.split(".")
    return ".".join(parts[:2]) if len(parts) > 2 else module if module in PACKAGES else ""


PACKAGES = {
    f"kvjax.{name}"
    for name in (
        "analysis",
        "bench",
        "cache",
        "calibration",
        "cli",
        "conversion",
        "evals",
        "models",
        "pallas_kernels",
        "plots",
    )
} | {"kvjax.policies", "kvjax.runtime"}

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
            raise self.error(f"drawing {name!r}: give one of {', '.join(DRAWINGS)}, and words that say what it shows")
        return [nodes.raw("", DRAWINGS[name]().svg(alt), format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("drawing", DrawingDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
