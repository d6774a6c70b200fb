"""Whether a server takes what its own schema allows, and nothing else."""

import functools
import json
from typing import Any

import jsonschema
from serve_client import Client, Reply

from kvjax.serve.openapi import UNSTATED


@functools.cache
def validator(client: Client, path: str) -> Any:
    """Of the bodies that the server's own schema allows."""
    schema = client.get("/openapi.json").json
    body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator(body | {"components": schema["components"]})


def is_json(body: Any) -> bool:
    """Whether a body is JSON as standards have it: Unicode, without infinity."""
    try:
        json.dumps(body, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return False
    return True


def check_schema(client: Client, path: str, body: Any, reply: Reply) -> None:
    """The server takes what its schema allows, and nothing else. A few rules that no schema can state have codes of their own."""
    allowed = is_json(body) and validator(client, path).is_valid(body)
    if reply.status == 200:
        assert allowed
    elif reply.status == 400:
        assert not allowed or reply.json["error"]["code"] in UNSTATED, reply.text
