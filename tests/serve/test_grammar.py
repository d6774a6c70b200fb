"""Answers of a given form."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serve_client import Client, serving

from kvjax.models import Params
from kvjax.serve.grammar import Grammars

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yz"]}, "b": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "seed": 4}


def form(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}}


@pytest.fixture(scope="module")
def talking(talker: Params) -> Iterator[Client]:
    with serving(talker) as client:
        yield client


def test_answers_are_json_of_the_schema(talking: Client) -> None:
    """And their neighbours' tokens are those that they have alone."""
    plain = CHAT | {"max_tokens": 20, "return_token_ids": True, "logprobs": True}
    (alone,) = talking.post("/v1/chat/completions", plain).json["choices"]
    formed = CHAT | form(SCHEMA, strict=True) | {"n": 2}
    replies = talking.posts("/v1/chat/completions", [plain, formed, plain, formed | {"stream": True}])
    for reply in (replies[0], replies[2]):
        assert reply.json["choices"] == [alone]
    texts = [choice["message"]["content"] for choice in replies[1].json["choices"]]
    for text in texts:
        found = json.loads(text)
        assert list(found) == ["a", "b"]
        assert found["a"] in ("x", "yz")
        assert found["b"] in range(10)
    assert {choice["finish_reason"] for choice in replies[1].json["choices"]} == {"stop"}
    streamed = ["", ""]
    for event in replies[3].events[:-1]:
        for part in event["choices"]:
            streamed[part["index"]] += part["delta"].get("content", "")
    assert streamed == texts


def test_json_objects(talking: Client) -> None:
    body = CHAT | {"response_format": {"type": "json_object"}, "temperature": 0}
    (choice,) = talking.post("/v1/chat/completions", body).json["choices"]
    text = choice["message"]["content"]
    assert text.startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


def test_forms_that_are_refused(talking: Client) -> None:
    for more in (
        form({"type": "nothing"}),
        form({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}),
        form({"type": "string", "description": "a" * (1 << 16)}),
        form(SCHEMA) | {"ignore_eos": True},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_object", "json_schema": {"name": "a"}}},
        {"response_format": {"type": "regex"}},
        {"response_format": "json"},
    ):
        reply = talking.post("/v1/chat/completions", CHAT | more)
        assert (reply.status, reply.json["error"]["param"]) == (400, "response_format")
        assert reply.json["error"]["message"]


def test_thoughts_are_free(talker: Params) -> None:
    """After the tag that closes them the form begins. A model may begin with the tag that opens them, or with the answer."""
    eos = talker.tokenizer.eos
    made = Grammars(talker.tokenizer, talker.config.vocab_size, eos).json(SCHEMA, thoughts=False, opened=False)

    def allowed(grammar: Any, tokens: list[int]) -> set[int]:
        bits = np.asarray(grammar(tokens)).view(np.uint32)
        return {i for i in range(talker.config.vocab_size) if bits[i // 32] >> i % 32 & 1}

    brace, letter = (talker.tokenizer.encode(text, add_special=False)[0] for text in "{q")
    opening, closing = 31, 32
    start = allowed(made.copy(), [])
    assert brace in start
    assert len(start) < 5
    grammar = type(made)(made._matcher.deep_copy(), *made._how[:2], (opening, closing), False)
    assert allowed(grammar, []) == start | {opening}
    assert len(allowed(grammar, [opening])) == talker.config.vocab_size
    assert len(allowed(grammar, [opening, letter])) == talker.config.vocab_size
    assert allowed(grammar, [opening, letter, closing]) == start
    opened = type(made)(made._matcher.deep_copy(), *made._how[:2], (opening, closing), True)
    assert len(allowed(opened, [])) == talker.config.vocab_size
    assert allowed(opened, [letter, closing]) == start
    assert brace not in allowed(opened, [letter, closing, brace])
