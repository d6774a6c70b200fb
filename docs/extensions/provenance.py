"""The end of a page of results: the result files of its figures, their devices, versions and dates, and the methods that are missing."""

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from benchmarks import report
from benchmarks import tables as speed
from kvjax.policies import policies
from reproduction import tables as quality

PAGES = {
    "quality": ("policy-quality*", "streaming-perplexity*", "block-sizes*", "constant-memory*", "reasoning*"),
    "leaderboard": ("leaderboard*",),
    "reproduction": ("reproduction*", "decode-h200*"),
    "speed": (
        "decode-h200*",
        "decode-rounds*",
        "long-context-[!t]*",
        "offload*",
        "beside*",
        "first-token*",
        "host-time*",
        "throughput*",
    ),
    "kernels": ("kernels*", "quantized-products*"),
    "howto/from_kvpress": ("peer-quality*", "peer-float32*"),
    "howto/weights": ("decode-weights*", "fits-v5e*", "weights-quality*", "weights-error*"),
    "howto/servers": ("serving*", "soak*"),
    "howto/training": ("distillation*",),
    "howto/several_devices": ("decode-two*", "long-context-two*", "timeline*", "fits-llama-70b*"),
}
"""Patterns of the names of each page's result files, in `benchmarks/results` and `reproduction/results`."""

MISSING = {
    "quality": lambda name: not (quality.quality_of(name) or quality.needles_of(name)),
    "speed": lambda name: not speed.speed_of(name),
}
"""Whether a page has no figures of a method."""


def complete(app: Sphinx, docname: str, content: list[str]) -> None:
    if docname not in PAGES:
        return
    parts = [content[0].rstrip(), "## Provenance", provenance(*PAGES[docname])]
    if docname in MISSING:
        names = [f"[`{name}`](/methods/{name}.md)" for name in policies() if MISSING[docname](name)]
        parts.append(f"Not measured: {', '.join(names) or 'none'}.")
    content[0] = "\n\n".join(parts) + "\n"


def provenance(*patterns: str) -> str:
    """Device, versions and dates of result files, one row per file.

    Args:
        patterns: of their names, without `.json`.
    """
    lines = []
    for pattern in patterns:
        found: list[Path] = sorted(
            file for tables in (speed, quality) for file in tables.RESULTS.glob(f"{pattern}.json")
        )
        if not found:
            raise ValueError(f"no result file is named {pattern}.json")
        for file in found:
            header, measured = (report.read(file)[key] for key in ("header", "rows"))
            days = sorted({row.get("date", header["date"])[:10] for row in measured})
            chip = header.get("settings", {}).get("chip")  # of programs that were compiled without a device
            lines.append(
                [
                    f"`{file.name}`",
                    f"{chip}, by its compiler" if chip else header["device"],
                    f"{header['versions']['jax']}, {header['versions']['python']}",
                    str(len(measured)),
                    " to ".join(dict.fromkeys((days[0], days[-1]))),
                ]
            )
    return report.table(["file", "device", "JAX, Python", "rows", "measured"], lines, "lllrl")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", complete, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
