"""What a page of results has at its end: of which files its figures are, on what and when these were measured, and which methods are missing."""

from typing import Any

from sphinx.application import Sphinx

from benchmarks import tables
from kvjax.policies import policies

PAGES = {
    "quality": ("policy-quality*", "streaming-perplexity*", "block-sizes*", "constant-memory*", "reasoning*"),
    "leaderboard": ("leaderboard*",),
    "reproduction": ("reproduction*", "decode-h200*"),
    "speed": ("decode-h200*", "decode-rounds*", "long-context-[!t]*", "offload*", "beside*"),
    "kernels": ("kernels*", "quantized-products*"),
    "howto/from_kvpress": ("peer-quality*", "peer-float32*"),
    "howto/weights": ("decode-weights*", "fits-v5e*", "weights-quality*"),
    "howto/several_devices": ("decode-two*", "long-context-two*", "timeline*", "fits-llama-70b*"),
}
"""Patterns of the files in `benchmarks/results` that each page is of."""

MISSING = {
    "quality": lambda name: not (tables.quality_of(name) or tables.needles_of(name)),
    "speed": lambda name: not tables.speed_of(name),
}
"""Whether a page has nothing of a method."""


def complete(app: Sphinx, docname: str, content: list[str]) -> None:
    if docname not in PAGES:
        return
    parts = [content[0].rstrip(), "## On what, and when", tables.provenance(*PAGES[docname])]
    if docname in MISSING:
        names = [f"[`{name}`](/methods/{name}.md)" for name in policies() if MISSING[docname](name)]
        parts.append(f"Not measured yet: {', '.join(names) or 'none'}.")
    content[0] = "\n\n".join(parts) + "\n"


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", complete, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
