"""Answers of a given form."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serve_client import Client, serving

from kvjax.conversion import Tokenizer
from kvjax.models import Params
from kvjax.serve.grammar import Grammars
from kvjax.serve.tools import Format, ToolCalls

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yz"]}, "b": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
VOCABULARY = 300
"""That of the model `talker`."""

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "seed": 4}


def form(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}}


TOOLS = {
    "add": {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]},
    "set": {
        "type": "object",
        "properties": {"b": {"$ref": "#/$defs/c"}},
        "required": ["b"],
        "$defs": {"c": {"const": "d"}},
    }
    | {"additionalProperties": False},
    'a "\\é': {"properties": {}, "additionalProperties": False},
}
ARGUMENTS = {"add": ({"a": 1}, {"a": 22}), "set": ({"b": "d"},), 'a "\\é': ({},)}
CALLS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
}
HERMES = "{% if tools %}{# <tool_call> #}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def talking(talker: Params) -> Iterator[Client]:
    given = talker.tokenizer
    assert given is not None
    tokenizer = Tokenizer(given.backend, eos=given.eos, bos=given.bos, chat_template=HERMES, special=given.special)
    with serving(talker.replace(tokenizer=tokenizer), new=80) as client:
        yield client


def test_a_tokenizer_that_is_not_supported(client: Client) -> None:
    reply = client.post("/v1/chat/completions", CHAT | {"max_tokens": 4} | form(SCHEMA))
    assert (reply.status, reply.json["error"]["param"]) == (400, "response_format")
    assert "llguidance does not support the model's tokenizer" in reply.json["error"]["message"]


def test_answers_of_langchain_are_json_of_the_schema(talking: Client) -> None:
    openai = pytest.importorskip("openai")
    chat_model = pytest.importorskip("langchain_openai").ChatOpenAI
    transport = pytest.importorskip("httpx2").ASGITransport(app=talking.app)

    async def ask() -> Any:
        async with openai.DefaultAsyncHttpxClient(transport=transport) as http:
            options = {"model": "tiny", "api_key": "none", "max_retries": 0, "http_async_client": http}
            model = chat_model(base_url="http://localhost/v1", **options)
            return await model.with_structured_output(SCHEMA | {"title": "t"}, method="json_schema").ainvoke("hello")

    assert set(talking.run(ask())) == {"a", "b"}


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
        form({"$ref": "#"}),
        form({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        form({"$ref": "file:///etc/passwd"}),
        form(SCHEMA) | {"ignore_eos": True},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_object", "json_schema": {"name": "a"}}},
        {"response_format": {"type": "regex"}},
        {"response_format": "json"},
    ):
        reply = talking.post("/v1/chat/completions", CHAT | more)
        assert (reply.status, reply.json["error"]["param"]) == (400, "response_format")
        assert reply.json["error"]["message"]


def test_work_on_a_schema_is_bounded(talking: Client) -> None:
    """The intersection of these patterns has more states than any memory."""
    patterns = {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(60)]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": patterns}}}}
    for more in (form(patterns), {"tools": [tool], "tool_choice": "required"}):
        reply = talking.post("/v1/chat/completions", CHAT | more)
        assert (reply.status, reply.json["error"]["code"]) == (400, "unsupported_schema")
        assert "to prepare" in reply.json["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_fails_while_the_model_writes_is_the_clients(
    talking: Client, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request alone ends, with an error that says so."""
    monkeypatch.setattr("kvjax.serve.grammar.MOST_STATES", 50)
    body = CHAT | form({"type": "string", "pattern": "^[ab]{60}$"}) | {"stream": stream}
    reply = talking.post("/v1/chat/completions", body)
    error = reply.events[-1]["error"] if stream else reply.json["error"]
    assert (error["code"], error["param"]) == ("unsupported_schema", "response_format")
    assert "too many states" in error["message"]
    assert reply.status == (200 if stream else 400)
    assert talking.post("/v1/chat/completions", CHAT | {"max_tokens": 1}).status == 200


def grammars_of(talker: Params) -> Grammars:
    assert talker.tokenizer is not None
    return Grammars(talker.tokenizer, talker.config.vocab_size, talker.tokenizer.eos)


def allowed(grammar: Any, tokens: list[int]) -> set[int]:
    bits = np.asarray(grammar(tokens)).view(np.uint32)
    return {i for i in range(VOCABULARY) if bits[i // 32] >> i % 32 & 1}


@pytest.mark.parametrize("kind", ["hermes", "llama3"])
@pytest.mark.parametrize("several", [True, False])
def test_texts_of_the_grammar_are_calls(talker: Params, kind: Format, several: bool) -> None:
    """Random texts that the grammar allows, up to their end tokens: `ToolCalls` finds calls and nothing else."""
    draw = np.random.default_rng(0)
    how: dict[str, Any] = {"several": several, "thoughts": False, "opened": False}
    made, tokenizer = grammars_of(talker).calls(kind, TOOLS, **how), talker.tokenizer
    assert tokenizer is not None
    names, counts = set[str](), set[int]()
    for _ in range(12):
        grammar, tokens = made.copy(), list[int]()
        while not tokens or tokens[-1] not in tokenizer.eos:
            options = allowed(grammar, tokens)
            # Calls end as soon as they may, or go on, one time of two each.
            ends = options & set(tokenizer.eos)
            ending = bool(ends) and (draw.random() < 0.5 or options == ends)
            tokens.append(int(draw.choice(sorted(ends if ending else options - ends))))
        deltas = ToolCalls(kind).push(tokenizer.decode(tokens), final=True)
        calls = [call["function"] for delta in deltas for call in delta["tool_calls"]]
        for call in calls:
            assert json.loads(call["arguments"]) in ARGUMENTS[call["name"]]
        names |= {call["name"] for call in calls}
        counts.add(len(calls))
    assert names == set(TOOLS)
    assert (max(counts) > 1) == (several and kind == "hermes")
    assert min(counts) == 1


def test_tools_that_must_be_called(talking: Client) -> None:
    """Any of them or a named one, whole and streamed."""
    one = CHAT | CALLS | {"parallel_tool_calls": False, "tool_choice": "required"}
    named = one | {"tool_choice": {"type": "function", "function": {"name": "set"}}}
    replies = talking.posts("/v1/chat/completions", [one, named, one | {"stream": True}, named | {"stream": True}])
    for whole, streamed in zip(replies[:2], replies[2:], strict=True):
        assert whole.status == 200, whole.text
        (choice,) = whole.json["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"
        assert json.loads(call["function"]["arguments"]) in ARGUMENTS[call["function"]["name"]]
        parts = [part for event in streamed.events[:-1] for part in event["choices"]]
        ((again,),) = [part["delta"]["tool_calls"] for part in parts if "tool_calls" in part["delta"]]
        assert again["function"] == call["function"]
        assert "".join(part["delta"].get("content", "") for part in parts) == ""
        assert parts[-1]["finish_reason"] == "tool_calls"
    assert replies[1].json["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "set"


def test_thoughts_are_free(talker: Params) -> None:
    """After the tag that closes them the form begins. A model may begin with the tag that opens them, or with the answer."""
    made = grammars_of(talker).json(SCHEMA, thoughts=False, opened=False)
    brace, letter = (talker.tokenizer.encode(text, add_special=False)[0] for text in "{q")
    opening, closing = 31, 32
    start = allowed(made.copy(), [])
    assert brace in start
    assert len(start) < 5
    grammar = type(made)(made._matcher.deep_copy(), *made._how[:2], (opening, closing), False, "")
    assert allowed(grammar, []) == start | {opening}
    assert len(allowed(grammar, [opening])) == VOCABULARY
    assert len(allowed(grammar, [opening, letter])) == VOCABULARY
    assert allowed(grammar, [opening, letter, closing]) == start
    opened = type(made)(made._matcher.deep_copy(), *made._how[:2], (opening, closing), True, "")
    assert len(allowed(opened, [])) == VOCABULARY
    assert allowed(opened, [letter, closing]) == start
    assert brace not in allowed(opened, [letter, closing, brace])
