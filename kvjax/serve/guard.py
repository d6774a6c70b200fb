"""Checks of requests before they are parsed: host, origin, content type, API key, and size.

A web page can send requests to a loopback server without the user's knowledge. It cannot choose the `Host` and `Origin`
headers, and without the server's consent it cannot send `Content-Type: application/json`.
"""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from starlette.routing import BaseRoute, Match

from .errors import APIError
from .settings import Settings, digest

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

OPEN = frozenset({"/", "/health", "/ready"})
"""Routes that need no API key."""

CLIENT = "kvjax.client"
"""Entry of the scope with a text that is the same for all requests with the same API key."""

NO_BODY = 1 << 16
"""Maximum size in bytes of the body of a request that needs none."""


class Guard:
    """ASGI middleware that refuses requests by their headers and size.

    The whole body is received before the app is called, so that a slow client holds nothing else.

    Args:
        app: the app.
        settings: whom the server answers, and its limits.
        routes: the app's routes. A request that none of them takes is left to the app, which refuses it.
    """

    def __init__(self, app: App, settings: Settings, routes: Sequence[BaseRoute]) -> None:
        self._app, self._settings, self._routes = app, settings, routes

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
            scope[CLIENT] = self._check(scope, headers)
            body = await self._body(scope["method"], headers, receive)
        except APIError as error:
            await error.response()(scope, receive, send)
            return
        if body is None:  # the client has gone
            return
        rest = [body]

        async def replay() -> Message:
            if rest:
                return {"type": "http.request", "body": rest.pop(), "more_body": False}
            return await receive()

        await self._app(scope, replay, send)

    def _check(self, scope: Any, headers: list[tuple[str, str]]) -> str:
        """Check the headers. Returns a text that is the same for all requests with the same API key."""
        host = _only(headers, "host")
        if host is None or not self._allows_host(_hostname(host)):
            raise APIError(
                403,
                f"Host {host!r} is not one of this server's names; use its IP address, or start it with --allowed-host",
                code="host_not_allowed",
            )
        for name, origin in headers:
            if name == "origin" and origin.partition("://")[2] != host and origin not in self._settings.origins:
                raise APIError(
                    403,
                    f"requests from web pages of {origin!r} are refused; start the server with --allowed-origin",
                    code="origin_not_allowed",
                )
        if scope["method"] == "POST" and any(route.matches(scope)[0] == Match.FULL for route in self._routes):
            kind = (_only(headers, "content-type") or "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise APIError(415, f"Content-Type is {kind!r}; send application/json", code="unsupported_media_type")
        if self._settings.keys and scope["path"] not in OPEN:
            scheme, _, key = (_only(headers, "authorization") or "").partition(" ")
            if scheme.lower() != "bearer" or not self._settings.knows(key.strip()):
                raise APIError(
                    401,
                    "no valid API key; send one as Authorization: Bearer KEY",
                    "authentication_error",
                    code="invalid_api_key",
                )
            return digest(key.strip()).hex()
        return ""

    def _allows_host(self, name: str) -> bool:
        """Whether a `Host` header may have this name. Pages whose name leads to this server have other names."""
        allowed = self._settings.hosts
        return name == "localhost" or name in allowed or "*" in allowed or _is_address(name)

    async def _body(self, method: str, headers: list[tuple[str, str]], receive: Receive) -> bytes | None:
        most = self._settings.max_body if method == "POST" else NO_BODY
        large = APIError(413, f"the request has more than {most} bytes; send less", code="request_too_large")
        length = _only(headers, "content-length") or "0"
        if not length.isdecimal() or int(length[:20]) > most:
            raise large
        try:
            async with asyncio.timeout(self._settings.read_seconds):
                parts, size = [], 0
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            seconds = self._settings.read_seconds
            raise APIError(408, f"the request took more than {seconds:g} seconds to arrive", code="timeout") from None


def _only(headers: list[tuple[str, str]], name: str) -> str | None:
    """The value of a header; None if there is none, or more than one."""
    found = [value for key, value in headers if key == name]
    return found[0] if len(found) == 1 else None


def _hostname(host: str) -> str:
    """The name in a `Host` header, without port."""
    name, colon, port = host.rpartition(":")
    name = name if colon and port.isdecimal() else host
    return name.strip("[]").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
