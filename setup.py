"""All is in pyproject.toml but this: on a package index no file lies beside the README, so its links there lead to the site and the repository."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def readme() -> str:
    """README.md with links that lead somewhere from anywhere: pages of docs/ to the site, pictures and other files to the repository."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]

    def absolute(match: re.Match[str]) -> str:
        picture, words, path, anchor = match.groups()
        if picture:
            return f"![{words}]({urls['Repository']}/raw/main/{path})"
        page = re.fullmatch(r"docs/(?:(.+)\.md)?", path)
        where = f"{urls['Homepage']}{page[1] or 'index'}.html" if page else f"{urls['Repository']}/blob/main/{path}"
        return f"[{words}]({where}{anchor or ''})"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^()\s#]+)(#[^()\s]*)?\)", absolute, text)


if __name__ == "__main__":
    setup(long_description=readme(), long_description_content_type="text/markdown")
