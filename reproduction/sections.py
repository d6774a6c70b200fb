"""Sections of pages of docs/ that are each made from one result file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from kvjax.evals.report import write as write_file

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class Section:
    """A section of a page.

    Attributes:
        page: in `docs`.
        title: the section's heading; the section ends at the next heading.
        results: the beginning of the names of its result files. The last of several files is used.
        text: makes the text under the heading from the content of a result file.
    """

    page: str
    title: str
    results: str
    text: Callable[[Mapping[str, Any]], str]

    def file(self) -> Path | None:
        """The result file, or None."""
        return max(RESULTS.glob(f"{self.results}-*.json"), default=None)

    def of(self, file: Path) -> str:
        """The section made from a result file, with its heading."""
        return f"## {self.title}\n\n{self.text(report.read(file))}\n"

    def write(self) -> None:
        """Replace the section on the page, or append it if the page has none.

        Raises:
            SystemExit: no result file exists.
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


def device(header: Mapping[str, Any]) -> str:
    """The kind of device in the header of a result file."""
    return header["device"].partition(" x ")[2].partition(" (")[0]


def slug(header: Mapping[str, Any]) -> str:
    """That kind of device in names of result files."""
    return report.slug(device(header))
