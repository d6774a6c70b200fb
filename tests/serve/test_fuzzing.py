"""Requests at random: each ends with an answer or an error that names what is wrong, and the server goes on."""

import json
import time
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from serve_client import Client
from serve_schema import check_schema

# The server runs in other threads while requests are drawn. What these do with `random` is not part of the draw.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning"
)

TEXT = st.text(st.characters(codec=None), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
PROMPT = st.one_of(TEXT, st.lists(st.integers(-1, 65), max_size=5), st.lists(TEXT, max_size=2), JSON)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool"]) | JSON},
    optional={"content": TEXT | JSON, "tool_calls": JSON, "name": TEXT, "tool_call_id": JSON},
)
SCHEMA = st.fixed_dictionaries({"type": st.sampled_from(["object", "string", "array"])}, optional={"properties": JSON})
FORMAT = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "json_object", "json_schema"])},
    optional={"json_schema": st.fixed_dictionaries({"name": TEXT, "schema": SCHEMA}) | JSON},
)
TOOL = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": TEXT}, optional={"parameters": SCHEMA | JSON}),
    }
)
CHOICE = st.sampled_from(["auto", "none", "required"]) | st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": TEXT})}
)
SAMPLED: dict[str, Any] = {
    "model": st.sampled_from(["tiny", None]) | JSON,
    "max_tokens": st.integers(-1, 30) | JSON,
    "temperature": st.floats(0, 2) | JSON,
    "top_p": st.floats(0, 1) | JSON,
    "top_k": st.integers(-2, 9) | JSON,
    "min_p": st.floats(0, 1) | JSON,
    "n": st.integers(0, 5) | JSON,
    "stop": TEXT | st.lists(TEXT, max_size=3) | JSON,
    "seed": st.integers() | JSON,
    "stream": st.booleans() | JSON,
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}) | JSON,
    "stop_token_ids": st.lists(st.integers(-1, 70), max_size=3) | JSON,
    "ignore_eos": st.booleans() | JSON,
    "return_token_ids": st.booleans() | JSON,
    "cache_salt": TEXT | JSON,
    "logprobs": st.booleans() | st.integers(-1, 21) | JSON,
    "logit_bias": JSON,
    "user": JSON,
}
COMPLETION = st.fixed_dictionaries({"prompt": PROMPT}, optional=SAMPLED | {"echo": JSON, "suffix": JSON})
CHAT = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=3) | JSON},
    optional=SAMPLED
    | {"tools": st.lists(TOOL, max_size=2) | JSON, "tool_choice": CHOICE | JSON, "response_format": FORMAT}
    | {"chat_template_kwargs": JSON, "top_logprobs": st.integers(-1, 21) | JSON, "parallel_tool_calls": JSON}
    | {"cache_report": JSON, "session": TEXT | JSON},
)
REQUEST = st.one_of(
    st.tuples(st.just("/v1/completions"), COMPLETION),
    st.tuples(st.just("/v1/chat/completions"), CHAT),
    st.tuples(st.just("/tokenize"), st.fixed_dictionaries({}, optional={"prompt": TEXT | JSON, "messages": JSON})),
    st.tuples(st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize"]), JSON),
)


REFUSED_SECONDS = 1.0
"""Time to refuse a request on an idle server. It is taken by this process, in which the server runs, whatever else a machine does."""


def check(client: Client, path: str, body: Any) -> None:
    begun = time.process_time()
    reply = client.post(path, json.dumps(body).encode())
    took = time.process_time() - begun
    if reply.status == 200:
        if reply.headers["content-type"].startswith("text/event-stream"):
            assert reply.events[-1] == "[DONE]"
        else:
            assert reply.json
    else:
        assert 400 <= reply.status < 500
        assert reply.json["error"]["message"]
        assert took < REFUSED_SECONDS
    assert client.server.admitted == 0
    check_schema(client, path, body, reply)


@hypothesis.given(REQUEST)
@hypothesis.settings(max_examples=30, suppress_health_check=list(hypothesis.HealthCheck))
def test_random_requests(client: Client, request: tuple[str, Any]) -> None:
    check(client, *request)


@pytest.mark.slow
@hypothesis.given(REQUEST)
@hypothesis.settings(max_examples=500, suppress_health_check=list(hypothesis.HealthCheck))
def test_many_random_requests(client: Client, request: tuple[str, Any]) -> None:
    check(client, *request)
