"""Answers of the server: OpenAI's format, and the tokens of `kvjax.generate`."""

import itertools
import re
from typing import Any

import jax
import numpy as np
import pytest
from serve_client import NEW, ROWS, TOTAL, Client

import kvjax
from kvjax.models import Params


def alphabet_prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 62, rng.integers(1, TOTAL - NEW + 1)).tolist() for _ in range(count)]


def test_answers_are_those_of_generate(client: Client, letters: Params) -> None:
    """Bit for bit, sampled and greedy, whatever else runs. And nothing is compiled once the server is ready."""
    prompts = alphabet_prompts(10)
    options = [
        {"max_tokens": NEW if i == 0 else 1 + 7 * i % NEW, "temperature": 0.9 * (i % 2), "seed": 100 + i}
        for i in range(len(prompts))
    ]
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if event.endswith("/backend_compile_duration") else None
    )
    bodies = [
        {"prompt": prompt, **each, "return_token_ids": True, "logprobs": 0, "ignore_eos": True}
        for prompt, each in zip(prompts, options, strict=True)
    ]
    replies = client.posts("/v1/completions", bodies)
    assert not compiled
    expected = kvjax.generate(
        letters,
        prompts,
        "treekv:32",
        max_new_tokens=[each["max_tokens"] for each in options],
        temperature=[each["temperature"] for each in options],
        seed=[each["seed"] for each in options],
        ignore_eos=True,
        rows=ROWS,
        max_total_tokens=TOTAL,
    )
    for reply, prompt, other in zip(replies, prompts, expected, strict=True):
        (choice,) = reply.json["choices"]
        assert choice["token_ids"] == other.tokens
        assert choice["logprobs"]["token_logprobs"] == other.logprobs
        assert choice["text"] == other.text
        assert choice["finish_reason"] == other.stop_reason
        used = {"prompt_tokens": len(prompt), "completion_tokens": len(other.tokens)}
        assert reply.json["usage"] == used | {
            "total_tokens": sum(used.values()),
            "prompt_tokens_details": {"cached_tokens": 0},
        }


GOLDEN = """\
data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":0,"model":"tiny","system_fingerprint":"kvjax-0","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":0,"model":"tiny","system_fingerprint":"kvjax-0","choices":[{"index":0,"delta":{"content":"A"},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":0,"model":"tiny","system_fingerprint":"kvjax-0","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null}

data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":0,"model":"tiny","system_fingerprint":"kvjax-0","choices":[],"usage":{"prompt_tokens":6,"completion_tokens":1,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":0}}}

data: [DONE]

"""


def test_transcript_of_a_stream(client: Client) -> None:
    """Byte for byte, but for the id, the time, the fingerprint and the letter that the model says."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    reply = client.post("/v1/chat/completions", body)
    assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    said = client.post("/v1/completions", {"prompt": "Hello ", "max_tokens": 1, "temperature": 0}).json["choices"][0][
        "text"
    ]
    assert len(said) == 1
    text = re.sub(r'"id":"chatcmpl-\w{32}"', '"id":"chatcmpl-0"', reply.text)
    text = re.sub(r'"created":\d{10,}', '"created":0', text)
    text = re.sub(r'"kvjax-\w{12}"', '"kvjax-0"', text)
    assert text == GOLDEN.replace('"A"', f'"{said}"')


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_has_the_text_of_the_whole_answer(client: Client, path: str) -> None:
    chat = path.endswith("chat/completions")
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}]} if chat else {"prompt": "abc "}
    body |= {
        "n": 3,
        "seed": 5,
        "temperature": 1.3,
        "max_tokens": 20,
        "logprobs": True if chat else 0,
        "stop": ["ab", "7"],
    }
    body |= {"return_token_ids": True}
    whole, streamed = client.post(path, body), client.post(path, body | {"stream": True})
    assert streamed.events[-1] == "[DONE]"
    for choice in whole.json["choices"]:
        parts = [
            part for event in streamed.events[:-1] for part in event["choices"] if part["index"] == choice["index"]
        ]
        text = (part["delta"].get("content", "") if chat else part["text"] for part in parts)
        assert "".join(text) == (choice["message"]["content"] if chat else choice["text"])
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        ids = itertools.chain.from_iterable(part.get("token_ids", ()) for part in parts)
        assert list(ids) == choice["token_ids"]
        found = [part["logprobs"] for part in parts if part["logprobs"]]
        name = "content" if chat else "token_logprobs"
        assert list(itertools.chain.from_iterable(each[name] for each in found)) == choice["logprobs"][name]


def test_the_most_likely_tokens_are_reported(client: Client) -> None:
    """Whole and streamed, and with a grammar or without. The answers are those of requests that do not ask for them."""
    text: dict[str, Any] = {"prompt": "abc", "seed": 5, "temperature": 1.3, "max_tokens": 12}
    chat: dict[str, Any] = text | {"messages": [{"role": "user", "content": "abc"}], "logprobs": True}
    del chat["prompt"]
    asked = [text | {"logprobs": 4}, text | {"logprobs": 0}, chat | {"top_logprobs": 20}, chat]
    replies = client.posts("/v1/completions", asked[:2]) + client.posts("/v1/chat/completions", asked[2:])
    some, none, many, without = (reply.json["choices"][0] for reply in replies)
    for name in ("tokens", "token_logprobs"):
        assert some["logprobs"][name] == none["logprobs"][name]
    columns = (some["logprobs"][name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    for token, value, tops in zip(*columns, strict=True):
        assert 4 <= len(tops) <= 5
        assert tops[token] == value
        assert list(tops)[:4] == sorted(list(tops)[:4], key=lambda text, tops=tops: -tops[text])
    assert any(len(tops) == 5 for tops in some["logprobs"]["top_logprobs"])  # the token was not among the likely ones
    for each, other in zip(many["logprobs"]["content"], without["logprobs"]["content"], strict=True):
        tops = each.pop("top_logprobs")
        assert each == {name: value for name, value in other.items() if name != "top_logprobs"}
        assert other["top_logprobs"] == []
        assert len(tops) == 20
        assert [top["logprob"] for top in tops] == sorted((top["logprob"] for top in tops), reverse=True)
        assert each in tops or each["logprob"] <= tops[-1]["logprob"]
    for path, body, whole in zip(("/v1/completions", "/v1/chat/completions"), asked[::2], replies[::2], strict=True):
        name = "top_logprobs" if path == "/v1/completions" else "content"
        events = client.post(path, body | {"stream": True}).events[:-1]
        parts = [part["logprobs"][name] for event in events for part in event["choices"] if part["logprobs"]]
        assert list(itertools.chain.from_iterable(parts)) == whole.json["choices"][0]["logprobs"][name]


def test_samples_have_the_seeds_of_generate(client: Client, letters: Params) -> None:
    body = {
        "prompt": ["abc", "xyz"],
        "n": 2,
        "seed": 2**32 - 1,
        "max_tokens": NEW,
        "temperature": 1,
        "ignore_eos": True,
    }
    choices = client.post("/v1/completions", body).json["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    seeds = {"seed": [2**32 - 1, 0, 1, 2], "temperature": 1.0, "ignore_eos": True}
    sizes = {"max_new_tokens": NEW, "rows": ROWS, "max_total_tokens": TOTAL}
    expected = kvjax.generate(letters, ["abc", "abc", "xyz", "xyz"], "treekv:32", **sizes, **seeds)
    assert [choice["text"] for choice in choices] == [each.text for each in expected]


def test_stop_strings_end_the_text_before_them(client: Client) -> None:
    plain = client.post("/v1/completions", {"prompt": "abc", "temperature": 0, "max_tokens": NEW}).json["choices"][0]
    assert len(plain["text"]) > 8
    stop = plain["text"][5:7]
    cut = client.post("/v1/completions", {"prompt": "abc", "temperature": 0, "max_tokens": NEW, "stop": stop})
    (choice,) = cut.json["choices"]
    assert (choice["text"], choice["finish_reason"]) == (plain["text"][: plain["text"].index(stop)], "stop")
    assert cut.json["usage"]["completion_tokens"] <= 7


def test_tokens_of_text_and_chats(client: Client) -> None:
    found = client.post("/tokenize", {"prompt": "abz"}).json
    assert found == {"count": 3, "max_model_len": found["max_model_len"], "tokens": [0, 1, 25]}
    assert found["max_model_len"] >= TOTAL
    chat = client.post("/tokenize", {"messages": [{"role": "user", "content": "ab"}]})
    assert chat.json["tokens"] == [0, 1, 62]


def test_what_the_server_says_of_itself(client: Client) -> None:
    (model,) = client.get("/v1/models").json["data"]
    assert client.get("/v1/models/tiny").json == model
    assert (model["id"], model["object"], model["kvjax"]["rows"]) == ("tiny", "model", ROWS)
    assert model["kvjax"]["policy"].startswith("treekv:")
    assert client.get("/v1/models/other").status == 404
    assert client.get("/health").json == {"status": "ok"}
    assert client.get("/ready").json == {"status": "ready"}
    before = client.get("/metrics").text
    client.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True})
    after = client.get("/metrics").text

    def value(text: str, name: str) -> float:
        (line,) = [line for line in text.splitlines() if line.startswith(f'kvjax:{name}{{model_name="tiny"}} ')]
        return float(line.split()[-1])

    assert value(after, "prompt_tokens_total") == value(before, "prompt_tokens_total") + 3
    assert value(after, "generation_tokens_total") == value(before, "generation_tokens_total") + 2
    assert value(after, "num_requests_waiting") == value(after, "num_requests_running") == 0
