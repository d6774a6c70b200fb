"""Small drawings of boxes, lines and words, which take their colours from the page, light or dark."""

from html import escape

COLOURS = {"kept": "#0072B2", "new": "#009E73", "read": "#E69F00", "merged": "#CC79A7"}
"""Fills that every colour vision distinguishes, on white and on black; "gone" is an outline alone."""


class Drawing:
    """What has been drawn so far, within `width` × `height` points."""

    def __init__(self, width: float, height: float):
        self.width, self.height, self.parts = width, height, list[str]()

    def box(self, x: float, y: float, w: float, h: float, kind: str = "plain", words: str = "") -> None:
        """A rectangle filled by its kind, with words in its middle."""
        dashes = ' stroke-dasharray="3 3" opacity="0.6"' if kind == "gone" else ""
        fill = f'fill="{COLOURS[kind]}" fill-opacity="0.75"' if kind in COLOURS else 'fill="none"'
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="2" {fill} stroke="currentColor"{dashes}/>'
        )
        if words:
            self.words(x + w / 2, y + h / 2, words, anchor="middle")

    def words(self, x: float, y: float, words: str, anchor: str = "start", size: float = 12) -> None:
        """One line of words, centred in height on y."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" dominant-baseline="central" '
            f'fill="currentColor">{escape(words)}</text>'
        )

    def line(self, *points: tuple[float, float], kind: str = "", arrow: bool = False) -> None:
        """A line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        colour = COLOURS.get(kind, "currentColor")
        head = ' marker-end="url(#arrow)"' if arrow else ""
        width = 2.5 if kind else 1.2
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{head}/>')

    def svg(self, alt: str) -> str:
        """The whole, with words for those who do not see it."""
        arrow = (
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto-start-reverse">'
            '<path d="M0,0 L8,4 L0,8 z" fill="currentColor"/></marker></defs>'
        )
        return (
            f'<div class="drawing"><svg role="img" aria-label="{escape(alt)}" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'xmlns="http://www.w3.org/2000/svg"><title>{escape(alt)}</title>{arrow}{"".join(self.parts)}</svg></div>'
        )
