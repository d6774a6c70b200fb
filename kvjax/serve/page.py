"""The web page at `/`: one file, which loads nothing but the server's own routes."""

import base64
import hashlib
import importlib.resources
import re

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class Page:
    """The page, and headers that let the browser run nothing but what is in the file.

    Attributes:
        body: the page as it is sent.
        headers: headers of the response.
    """

    def __init__(self) -> None:
        text = (importlib.resources.files("kvjax.serve") / "page.html").read_text(encoding="utf-8")
        self.body = text.encode()
        self.headers = {
            "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _policy(text).items()),
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }


def _policy(text: str) -> dict[str, str]:
    """The Content-Security-Policy of a page: its inline scripts and styles by their hashes, and requests to its server."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _INLINE.findall(text):
        found = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{found}'")
    return {
        "default-src": "'none'",
        "script-src": " ".join(hashes["script"]),
        "style-src": " ".join(hashes["style"]),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
