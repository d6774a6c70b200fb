"""Errors in OpenAI's format."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response


class APIError(Exception):
    """An answer that says why a request fails.

    Args:
        status: HTTP status.
        message: what is wrong, and what to do.
        kind: OpenAI's `type`.
        param: name of the field that is wrong.
        code: OpenAI's `code`.
        retry_after: seconds after which the client may try again.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code, self.retry_after = status, kind, param, code, retry_after
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        fields = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self) -> Response:
        """The error as an HTTP response. Only ASCII is sent, as messages may quote text that is no Unicode."""
        headers = self.headers if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(json.dumps(self.body), self.status, headers, "application/json")


def overloaded(message: str, seconds: int = 1) -> APIError:
    """The server has no room for a request now."""
    return APIError(503, message, "server_error", code="overloaded", retry_after=seconds)
