"""Sections of the pages of docs/ that are made from one result file each."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvjax.evals.report import write as write_file

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"

FILES = {"qwen.gguf": "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf"}
"""What files of models hold whose names, as result files have them, tell little."""


@dataclass(frozen=True)
class Section:
    """A section of a page.

    Attributes:
        page: of `docs`.
        title: of the section, which ends where the next begins.
        results: what names of its files begin with; of several the last counts.
        text: from a file's content to what stands under the title.
    """

    page: str
    title: str
    results: str
    text: Callable[[Mapping[str, Any]], str]

    def file(self) -> Path | None:
        """The result file, if there is one."""
        return max(RESULTS.glob(f"{self.results}-*.json"), default=None)

    def of(self, file: Path) -> str:
        """The section of a result file, title and all."""
        return f"## {self.title}\n\n{self.text(json.loads(file.read_text(encoding='utf-8')))}\n"

    def write(self) -> None:
        """Write the section anew, or after the others if the page has none.

        Raises:
            SystemExit: there is no result file.
        """
        file, path = self.file(), DOCS / self.page
        if file is None:
            raise SystemExit(f"{RESULTS} has no {self.results}-*.json, from which {path} would have {self.title!r}")
        page = path.read_text(encoding="utf-8")
        before, found, rest = page.partition(f"## {self.title}\n")
        _, following, after = rest.partition("\n## ")
        text = self.of(file)
        page = before + text + following + after if found else page.rstrip("\n") + "\n\n" + text
        write_file(path, page)
        print(f"wrote {path} from {file}")


def model(settings: Mapping[str, Any]) -> str:
    """The model that a result file's settings name."""
    name: str = settings["model"]
    return FILES.get(name, name)


def device(header: Mapping[str, Any]) -> str:
    """The kind of device that a result file's header names."""
    return header["device"].partition(" x ")[2].partition(" (")[0]


def slug(header: Mapping[str, Any]) -> str:
    """The same, as names of result files have it."""
    return "-".join(device(header).lower().replace("nvidia", "").split())
