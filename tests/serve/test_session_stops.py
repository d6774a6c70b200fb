"""Stop strings in saved conversations: the row reads no further, so the conversation continues exactly from there."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serve_client import NEW, Client, Reply, serving
from serve_schema import check_schema
from serve_sessions import BLOCK, OPTIONS, TURNS, ask, call, exact, sampled, server

import kvjax
from kvjax.models import Params

POLICIES = "snapkv:40", "treekv:64"
SAID = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789abcdefgh"
"""More tokens than either policy keeps."""

LATER = "again"
LONG: dict[str, Any] = {"max_tokens": 12}


@pytest.fixture(scope="module", params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state") / "sessions"


@pytest.fixture(scope="module")
def saving(letters: Params, folder: Path, policy: str) -> Iterator[Client]:
    with server(letters, folder, policy) as client:
        yield client


def text_of(reply: Reply) -> str:
    assert reply.status == 200, reply.text
    if reply.headers["content-type"] == "application/json":
        return reply.json["choices"][0]["message"]["content"]
    choices = [choice for chunk in reply.events[:-1] for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def reason_of(reply: Reply) -> str:
    if reply.headers["content-type"] == "application/json":
        return reply.json["choices"][0]["finish_reason"]
    return next(each for chunk in reply.events[:-1] for c in chunk["choices"] if (each := c["finish_reason"]))


def session_of(reply: Reply) -> dict[str, Any]:
    if reply.headers["content-type"] == "application/json":
        return reply.json["session"]
    (session,) = [chunk["session"] for chunk in reply.events[:-1] if "session" in chunk]
    return session


@pytest.fixture(scope="module")
def whole(saving: Client) -> Reply:
    """The answer without a stop string. A token is a character."""
    reply = ask(saving, SAID, "new", **LONG)
    assert len(text_of(reply)) == LONG["max_tokens"]
    return reply


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [0, 1, 4, 6, 10])
def test_a_conversation_goes_on_from_a_stop_string(
    letters: Params, saving: Client, whole: Reply, policy: str, at: int, stream: bool
) -> None:
    """As one whose cache never leaves the device, and whose answer had no room for more. Two tokens are between calls."""
    text = text_of(whole)
    stop = text[at : at + 2]
    count = text.index(stop) + 2
    first = ask(saving, SAID, "new", stop=["\U0001f600", stop], stream=stream, **LONG)
    assert (text_of(first), reason_of(first)) == (text[: count - 2], "stop")
    tokens, logprobs = sampled(whole)
    assert sampled(first) == (tokens[:count], logprobs[:count])
    second = ask(saving, LATER, session_of(first)["id"], stream=stream)
    assert [sampled(first), sampled(second)] == exact(letters, policy, [(SAID, count), (LATER, OPTIONS["max_tokens"])])


def test_a_stopped_conversation_goes_on_after_a_restart(letters: Params, tmp_path: Path, policy: str) -> None:
    """Each answer is stopped, by a server of its own."""
    name, turns, answers = "new", list[tuple[str, int]](), list[Any]()
    for said in (SAID, LATER, "b"):
        tokens, _ = exact(letters, policy, [*turns, (said, 8)])[-1]
        text = letters.tokenizer.decode(tokens)
        turns.append((said, text.index(text[2:5]) + 3))
        with server(letters, tmp_path / "sessions", policy) as client:
            reply = ask(client, said, name, stop=text[2:5], max_tokens=NEW)
        assert reason_of(reply) == "stop"
        name = session_of(reply)["id"]
        answers.append(sampled(reply))
    assert exact(letters, policy, turns) == answers


def test_what_the_client_saw_is_listed(saving: Client, whole: Reply) -> None:
    """Without the stop string, whose tokens count."""
    text = text_of(whole)
    stop = text[5:8]
    reply = ask(saving, SAID, "new", stop=stop, **LONG)
    found = call(saving, "GET", session_of(reply)["id"]).json
    assert [message["content"] for message in found["messages"]] == [SAID, text[: text.index(stop)]]
    usage = reply.json["usage"]
    assert found["tokens"] == usage["total_tokens"] == len(SAID) + 1 + text.index(stop) + 3


def test_a_stop_string_that_does_not_appear_changes_nothing(saving: Client, whole: Reply) -> None:
    text = text_of(whole)
    reply = ask(saving, SAID, "new", stop=text[-2:] + "\U0001f600", **LONG)
    assert (text_of(reply), reason_of(reply)) == (text, "length")
    assert sampled(reply) == sampled(whole)
    others = [ask(saving, LATER, session_of(each)["id"]) for each in (reply, whole)]
    assert sampled(others[0]) == sampled(others[1])


def test_a_stop_string_at_the_last_token(saving: Client, whole: Reply) -> None:
    """The row ends by itself then."""
    tokens, text = sampled(whole)[0], text_of(whole)
    count = next(at for at in range(2, 12) if text.index(text[at - 2 : at]) == at - 2)
    reply = ask(saving, SAID, "new", stop=text[count - 2 : count], max_tokens=count)
    assert (text_of(reply), reason_of(reply)) == (text[: count - 2], "stop")
    assert sampled(reply)[0] == tokens[:count]
    assert ask(saving, LATER, session_of(reply)["id"]).status == 200


def test_other_requests_do_not_change(saving: Client, whole: Reply) -> None:
    """Neither do those that run beside a session with a stop string, nor that session."""
    text = text_of(whole)
    path, headers = "/v1/chat/completions", {"authorization": "Bearer one"}
    other = OPTIONS | {"messages": [{"role": "user", "content": "other"}], "seed": 3, "max_tokens": NEW}
    stopped = OPTIONS | {"messages": [{"role": "user", "content": SAID}], "seed": len(SAID), "session": "new"}
    stopped |= {"stop": text[7:9]} | LONG
    alone = [saving.post(path, body, headers=headers) for body in (other, stopped)]

    async def all_of() -> list[Reply]:
        bodies = other, stopped, other, stopped
        return list(await asyncio.gather(*(saving.call("POST", path, body, headers=headers) for body in bodies)))

    together = saving.run(all_of())
    assert [sampled(reply) for reply in together] == [sampled(reply) for reply in alone] * 2
    assert saving.server.admitted == 0


@pytest.fixture(scope="module")
def unkeyed(letters: Params, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server of full caches without API keys."""
    with serving(letters, "full", block=BLOCK, folder=tmp_path_factory.mktemp("full") / "sessions") as client:
        yield client


def test_a_session_of_the_library_says_the_same(letters: Params, unkeyed: Client) -> None:
    """Tokens of `kvjax.Session` for the same calls. It reads later turns token by token, so it rounds otherwise."""
    options: dict[str, Any] = {"temperature": OPTIONS["temperature"], "seed": 7, "max_new_tokens": 8}
    chat: list[Any] = [{"role": "user", "content": TURNS[0]}]
    stop = kvjax.Session(letters, chat, "full").answer(**options).text[3:6]
    session = kvjax.Session(letters, chat, "full")
    answers = [session.answer(**options, stop=stop), session.chat(LATER, **options), session.chat("b", **options)]
    assert (answers[0].stop_reason, len(answers[0].tokens)) == ("stop", 6)
    name = "new"
    for said, more, answer in zip((TURNS[0], LATER, "b"), ({"stop": stop}, {}, {}), answers, strict=True):
        reply = ask(unkeyed, said, name, seed=7, max_tokens=8, **more)
        tokens, logprobs = sampled(reply)
        assert (tokens, text_of(reply)) == (answer.tokens, answer.text)
        np.testing.assert_allclose(logprobs, answer.logprobs, rtol=1e-4, atol=1e-4)
        name = session_of(reply)["id"]
    assert session_of(reply)["tokens"] == len(session.tokens)


def test_several_answers_are_refused(unkeyed: Client) -> None:
    """As there is no single one to go on from. The schema says so, too."""
    path = "/v1/chat/completions"
    body = OPTIONS | {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    existing = session_of(unkeyed.post(path, body | {"session": "new"}))["id"]
    for name in ("new", existing):
        for more in ({"n": 2}, {"n": 2.0}, {"n": 2, "stream": True}):
            reply = unkeyed.post(path, body | {"session": name} | more)
            check_schema(unkeyed, path, body | {"session": name} | more, reply)
            error = reply.json["error"]
            assert (reply.status, error["param"], error["type"]) == (400, "n", "invalid_request_error")
            assert error["message"] == (
                "n must be 1 with session, which continues from a single answer; send n: 1, or omit session"
            )
    for more in ({"n": 1, "session": "new"}, {"n": 1.0, "session": "new"}, {"n": None, "session": "new"}, {"n": 2}):
        reply = unkeyed.post(path, body | more)
        check_schema(unkeyed, path, body | more, reply)
        assert (reply.status, len(reply.json["choices"])) == (200, int(more["n"] or 1))
    fields = unkeyed.get("/openapi.json").json["components"]["schemas"]["ChatRequest"]["properties"]
    assert "`n` must be 1" in fields["session"]["description"]
