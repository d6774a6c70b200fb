"""Requests that the server refuses: by headers, by size, and by what they ask for."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from serve_client import Client, serving
from serve_schema import check_schema

from kvjax.conversion import Tokenizer
from kvjax.models import Params
from kvjax.serve.schema import CompletionRequest
from kvjax.serve.settings import KEY_VARIABLE, Settings, digest, read_keys

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
TEXT: dict[str, Any] = {"prompt": "a"}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"} | fields]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (TEXT | {"logit_bias": {"5": 1.0}}, "logit_bias"),
        (TEXT | {"presence_penalty": 0.5}, "presence_penalty"),
        (TEXT | {"best_of": 2}, "best_of"),
        (TEXT | {"echo": True}, "echo"),
        (TEXT | {"suffix": "b"}, "suffix"),
        (TEXT | {"logprobs": 21}, "logprobs"),
        (TEXT | {"beams": 3}, "beams"),
        (TEXT | {"prompt": []}, "prompt"),
        (TEXT | {"prompt": [1, 2.5]}, "prompt"),
        (TEXT | {"prompt": [1, 64]}, "prompt"),
        (TEXT | {"prompt": [-1]}, "prompt"),
        (TEXT | {"prompt": ""}, "prompt"),
        (TEXT | {"prompt": None}, "prompt"),
        (TEXT | {"prompt": {"a": 1}}, "prompt"),
        ({}, "prompt"),
        (TEXT | {"n": 0}, "n"),
        (TEXT | {"n": 100}, "n"),
        (TEXT | {"n": True}, "n"),
        (TEXT | {"temperature": -1}, "temperature"),
        (TEXT | {"temperature": "hot"}, "temperature"),
        (TEXT | {"top_p": 0}, "top_p"),
        (TEXT | {"stop": ""}, "stop"),
        (TEXT | {"stop": ["a"] * 17}, "stop"),
        (TEXT | {"stop": "a<end>"}, "stop"),
        (TEXT | {"stop_token_ids": list(range(9))}, "stop_token_ids"),
        (TEXT | {"max_tokens": 10**9}, "max_tokens"),
        (TEXT | {"max_tokens": 0}, "max_tokens"),
        (TEXT | {"seed": 1.5}, "seed"),
        (TEXT | {"stream": "yes"}, "stream"),
        (CHAT | {"top_logprobs": 2}, "top_logprobs"),
        (CHAT | {"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        (CHAT | {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (CHAT | {"functions": []}, "functions"),
        (CHAT | {"modalities": ["audio"]}, "modalities"),
        (CHAT | {"chat_template_kwargs": {"nothing_reads_this": 1}}, "messages"),
        (CHAT | {"messages": []}, "messages"),
        (CHAT | {"messages": "a"}, "messages"),
        (message(role="robot"), "messages"),
        (message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages"),
        (message(content=None), "messages"),
        (message(audio={"id": "x"}), "messages"),
    ],
)
def test_fields_are_refused_by_name(client: Client, body: dict[str, Any], param: str) -> None:
    path = "/v1/completions" if "messages" not in body else "/v1/chat/completions"
    for stream in ({}, {"stream": True}) if "stream" not in body and "stream_options" not in body else ({},):
        reply = client.post(path, body | stream)
        error = reply.json["error"]
        assert (reply.status, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert error["message"]
    assert client.server.admitted == 0
    check_schema(client, path, body, reply)


def test_neutral_values_of_unsupported_fields_are_taken(client: Client) -> None:
    neutral = {"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "user": "me", "n": None, "stop": None}
    neutral |= {
        "n": 1.0,
        "top_k": 0.0,
        "stop_token_ids": [3.0],
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "seed": -(2**70),
    }
    more = {"best_of": 1, "echo": False, "suffix": None, "logprobs": None, "model": "tiny", "top_k": -1, "top_p": 1}
    assert client.post("/v1/completions", TEXT | neutral | more | {"max_tokens": 1}).status == 200
    said = [{"role": "developer", "content": "a"}, {"role": "assistant", "content": "b", "refusal": None}]
    chat = {"messages": [*said, *CHAT["messages"]], "response_format": {"type": "text"}, "max_completion_tokens": 1}
    assert client.post("/v1/chat/completions", chat | neutral).status == 200
    limits = {"max_tokens": 3, "max_completion_tokens": 2, "ignore_eos": True}
    assert client.post("/v1/chat/completions", chat | limits).json["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "error"),
        (b'{"prompt": "\\ud800"}', "unicode"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "\\ud800": 1}', "unicode"),
        (b"[]", "dictionary"),
        (b"", "required"),
    ],
)
def test_what_is_no_json_object_is_refused(client: Client, content: bytes, words: str) -> None:
    reply = client.post("/v1/completions", content)
    assert reply.status == 400
    assert words in reply.json["error"]["message"]


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize("depth", [40, 200, 450])
def test_what_is_nested_deeply_is_refused(client: Client, depth: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": nested(depth)}}
    tool = {"type": "function", "function": {"name": "a", "parameters": nested(depth)}}
    for more in ({"chat_template_kwargs": nested(depth)}, {"response_format": form}, {"tools": [tool]}):
        reply = client.post("/v1/chat/completions", CHAT | more)
        ((name, _),) = more.items()
        assert (reply.status, reply.json["error"]["param"]) == (400, name)
        assert "levels deep" in reply.json["error"]["message"]
    assert client.post("/v1/chat/completions", CHAT | {"logit_bias": nested(depth)}).status == 400
    assert client.post("/v1/completions", {"prompt": nested(depth)}).status == 400


def test_long_lists_have_one_error(client: Client) -> None:
    for prompt in ([1] * 200_000 + [""], [[1] * 100_000, [""] * 100_000], [1.5] * 200_000, ["a", *[1] * 200_000]):
        reply = client.post("/v1/completions", {"prompt": prompt})
        assert (reply.status, reply.json["error"]["param"]) == (400, "prompt")


def test_a_prompt_that_is_too_long(client: Client) -> None:
    most = client.server.preparer.longest
    reply = client.post("/v1/completions", {"prompt": [1] * (most + 1)})
    assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
    assert f"at most {most}" in reply.json["error"]["message"]
    assert client.post("/v1/completions", {"prompt": [1] * most, "max_tokens": 1}).status == 200


def test_routes_that_do_not_exist(client: Client) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/docs", 404),
        ("POST", "/nothing", 404),
        ("POST", "/v1/models", 405),
        ("DELETE", "/v1/completions", 405),
    ):
        headers = {"content-type": "" if method == "POST" else "application/json"}
        reply = client.run(client.call(method, path, headers=headers))
        assert (reply.status, reply.json["error"]["type"]) == (status, "invalid_request_error")
        other = "GET" if method == "POST" else "POST"
        assert reply.headers.get("allow") == (other if status == 405 else None)
    reply = client.post("/v1/completions", TEXT | {"model": "gpt"})
    assert (reply.status, reply.json["error"]["code"], reply.json["error"]["param"]) == (
        404,
        "model_not_found",
        "model",
    )


def test_the_schema_tells_what_is_answered(client: Client) -> None:
    routes = client.get("/openapi.json").json["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/models"} <= set(routes)
    for route in routes.values():
        for method in route.values():
            assert {"4XX", "5XX"} <= set(method["responses"]) <= {"200", "4XX", "5XX"}
    assert set(routes["/v1/chat/completions"]["post"]["responses"]["200"]["content"]) == {
        "application/json",
        "text/event-stream",
    }


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"host": "evil.example"}, 403, "host_not_allowed"),
        ({"host": "evil.example:8000", "origin": "http://evil.example:8000"}, 403, "host_not_allowed"),
        ({"host": ""}, 403, "host_not_allowed"),
        ({"origin": "http://evil.example"}, 403, "origin_not_allowed"),
        ({"origin": "null"}, 403, "origin_not_allowed"),
        ({"origin": "http://localhost:9999"}, 403, "origin_not_allowed"),
        ({"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        ({"content-type": ""}, 415, "unsupported_media_type"),
        ({"content-length": "100000000000"}, 413, "request_too_large"),
    ],
)
def test_web_pages_cannot_use_a_loopback_server(
    client: Client, headers: dict[str, str], status: int, code: str
) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/health", "/metrics"):
        method = "GET" if path in ("/health", "/metrics") else "POST"
        if method == "GET" and "content-type" in headers:
            continue
        reply = client.run(client.call(method, path, TEXT if method == "POST" else None, headers=headers))
        assert (reply.status, reply.json["error"]["code"]) == (status, code)


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "10.0.0.7:80", "LOCALHOST"])
def test_hosts_that_no_page_can_have(client: Client, host: str) -> None:
    same = {"host": host, "origin": f"http://{host}"}
    assert client.post("/v1/completions", TEXT | {"max_tokens": 1}, headers=same).status == 200


def test_named_hosts_and_origins_keys_and_size(letters: Params) -> None:
    options: dict[str, Any] = {
        "hosts": frozenset({"models.example"}),
        "origins": frozenset({"https://chat.example"}),
        "keys": frozenset({digest("sesame"), digest("öffne")}),
        "max_body": 2000,
    }
    body = TEXT | {"max_tokens": 1}
    with serving(letters, **options) as client:
        named = {"host": "models.example", "origin": "https://chat.example", "authorization": "Bearer sesame"}
        assert client.post("/v1/completions", body, headers=named).status == 200
        for key in ("", "Bearer", "Bearer sesam", "Basic sesame", "Bearer sesame2", "sesame"):
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics")):
                reply = client.run(client.call(method, path, body, headers={"authorization": key}))
                assert (reply.status, reply.json["error"]["code"]) == (401, "invalid_api_key")
                assert reply.headers["www-authenticate"] == "Bearer"
        assert client.get("/health").status == client.get("/ready").status == 200
        padded = json.dumps(body).encode() + b" " * 2000
        assert client.post("/v1/completions", padded, headers=named).status == 413


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# of a team\n\n  one \ntwo\n")
    monkeypatch.setenv(KEY_VARIABLE, "three, four")
    settings = Settings("m", read_keys(file))
    assert [settings.knows(key) for key in ("one", "two", "three", "four", "# of a team", "", "on")] == [True] * 4 + [
        False
    ] * 3
    file.write_text("# nothing\n")
    with pytest.raises(ValueError, match="no API key"):
        read_keys(file)


def test_options_that_a_server_lacks(letters: Params) -> None:
    with serving(letters, sampling=("temperature",), idle=True) as client:
        reply = client.post("/v1/completions", TEXT | {"top_p": 0.5})
        assert (reply.status, reply.json["error"]["param"]) == (400, "top_p")
        assert "temperature" in reply.json["error"]["message"]
        (prompt,) = client.server.preparer.completion(CompletionRequest(**TEXT, top_p=1), "")
        assert prompt.jobs[0].sampler.top_p is None


def test_a_model_without_a_chat_template(letters: Params) -> None:
    tokenizer = copy.copy(letters.tokenizer)
    tokenizer.chat_template = None
    with serving(letters.replace(tokenizer=tokenizer), idle=True) as client:
        for more in ({}, {"cache_report": True}, {"response_format": {"type": "json_object"}}):
            reply = client.post("/v1/chat/completions", CHAT | more)
            check_schema(client, "/v1/chat/completions", CHAT | more, reply)
            assert (reply.status, reply.json["error"]["param"]) == (400, "messages")
            assert "send a prompt to /v1/completions" in reply.json["error"]["message"]


def test_texts_that_are_certainly_too_long_are_not_tokenised(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", None)
    text = "ab " * (client.server.settings.max_body // 4)
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/tokenize", {"prompt": text}),
        ("/v1/chat/completions", message(content=text)),
        ("/v1/chat/completions", message(content=[{"type": "text", "text": text}])),
    ):
        reply = client.post(path, body)
        assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
    many = client.post("/v1/chat/completions", {"messages": CHAT["messages"] * 5000})
    assert (many.status, "at most 4096" in many.text) == (400, True)
