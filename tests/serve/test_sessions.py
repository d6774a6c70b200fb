"""Saved conversations: continued exactly after a restart, owned, limited, and refused when damaged."""

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from serve_client import NEW, Client
from serve_sessions import BLOCK, OPTIONS, POLICY, TURNS, ask, call, exact, finish, sampled, server, without_files

from kvjax.models import Params
from kvjax.runtime.batch import Batch, Begun, Job
from kvjax.serve import session_file
from kvjax.serve.metrics import compilations
from kvjax.serve.session_file import Conversation, DamagedError
from kvjax.serve.settings import digest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state") / "sessions"


@pytest.fixture(scope="module")
def saving(letters: Params, folder: Path) -> Iterator[Client]:
    with server(letters, folder) as client:
        yield client


def test_a_conversation_goes_on_after_a_restart(letters: Params, saving: Client, folder: Path) -> None:
    """With the tokens and log-probabilities of one server, and of a cache that never leaves the device."""
    compiled = compilations()
    before = compiled.count
    first = ask(saving, TURNS[0], "new")
    name = first.json["session"]["id"]
    second = ask(saving, TURNS[1], name, stream=True)
    chunks = second.events[:-1]
    assert [chunk["session"]["id"] for chunk in chunks if "session" in chunk] == [name]
    third = ask(saving, TURNS[2], name)
    assert third.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 40

    assert compiled.count == before

    again = ask(saving, TURNS[0], "new").json["session"]["id"]
    assert again != name
    answers = [sampled(first)]
    for text in TURNS[1:]:
        with server(letters, folder) as restarted:
            answers.append(sampled(ask(restarted, text, again)))
    assert answers[2] == sampled(third)
    assert answers[1] == sampled(second)
    assert exact(letters, POLICY, [(text, OPTIONS["max_tokens"]) for text in TURNS]) == answers


def test_sessions_are_listed_and_deleted_by_their_key(saving: Client) -> None:
    name = ask(saving, "abc", "new").json["session"]["id"]
    answer = ask(saving, "def", name).json
    listed = call(saving, "GET").json
    assert listed["data"][0] == answer["session"]
    one = call(saving, "GET", name).json
    assert one["tokens"] == answer["usage"]["total_tokens"]
    said = [(message["role"], message["content"]) for message in one["messages"]]
    assert [role for role, _ in said] == ["user", "assistant"] * 2
    assert (said[0][1], said[2][1], said[3][1]) == ("abc", "def", answer["choices"][0]["message"]["content"])
    assert call(saving, "GET", key="two").json["data"] == []
    for method in ("GET", "DELETE"):
        assert call(saving, method, name, key="two").json["error"]["code"] == "session_not_found"
    assert ask(saving, "d", name, key="two").status == 404
    assert call(saving, "DELETE", name).json == {"id": name, "object": "session.deleted", "deleted": True}
    assert ask(saving, "d", name).json["error"]["code"] == "session_not_found"
    assert name not in [each["id"] for each in call(saving, "GET").json["data"]]


def test_sessions_are_in_the_schema(saving: Client, client: Client) -> None:
    schema = saving.get("/openapi.json", headers={"authorization": "Bearer one"}).json
    assert sorted(schema["paths"]["/v1/sessions/{name}"]) == ["delete", "get"]
    assert "get" in schema["paths"]["/v1/sessions"]
    assert "description" in schema["components"]["schemas"]["ChatRequest"]["properties"]["session"]
    refused = client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "session": "new"})
    assert (refused.status, refused.json["error"]["param"]) == (400, "session")
    assert client.get("/v1/sessions").status == 400


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "%2e%2e", "a" * 64, "\u0000", "NEW", "x.session"])
def test_names_of_requests_are_no_paths(
    saving: Client, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched(*_: Any, **__: Any) -> Any:
        raise AssertionError("a request reached the file system")

    (folder.parent / "secret.session").write_text("secret")
    for method in ("open", "unlink", "stat"):
        monkeypatch.setattr(Path, method, touched)
    reply = ask(saving, "a", name)
    assert (reply.status, reply.json["error"]["code"]) == (404, "session_not_found")
    for method in ("GET", "DELETE"):
        assert call(saving, method, name).status in (404, 405)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"session": ""}, "session"),
        ({"session": "a" * 65}, "session"),
        ({"session": 1}, "session"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
    ],
)
def test_what_cannot_be_saved_is_refused(saving: Client, more: dict[str, Any], param: str) -> None:
    reply = ask(saving, "a", "new", **more)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert saving.server.admitted == 0


def test_a_conversation_that_outgrows_the_server_is_refused_and_remains(saving: Client) -> None:
    name = ask(saving, "a" * 60, "new").json["session"]["id"]
    before = call(saving, "GET", name).json
    reply = ask(saving, "b" * 60, name)
    assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
    assert call(saving, "GET", name).json == before
    assert ask(saving, "b", name).status == 200


def test_a_client_that_leaves_changes_nothing(saving: Client) -> None:
    name = ask(saving, "abc", "new").json["session"]["id"]
    before = call(saving, "GET").json
    options = {"stream": True, "max_tokens": NEW, "ignore_eos": True}
    body = OPTIONS | options | {"messages": [{"role": "user", "content": "d"}], "session": name}
    headers = {"authorization": "Bearer one"}
    assert saving.post("/v1/chat/completions", body, headers=headers, leave_after=1).status == 200
    saving.wait_until(lambda: saving.server.admitted == 0)
    assert call(saving, "GET").json == before
    assert ask(saving, "d", name).status == 200


def test_one_request_at_a_time(saving: Client) -> None:
    name = ask(saving, "abc", "new").json["session"]["id"]
    with saving.server.sessions.use(digest("one").hex(), name):
        assert ask(saving, "d", name).json["error"]["code"] == "session_busy"
        assert call(saving, "DELETE", name).json["error"]["code"] == "session_busy"
    assert ask(saving, "d", name).status == 200


def test_what_is_being_saved_is_not_used_by_others(saving: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the client leaves meanwhile."""
    name = ask(saving, "abc", "new").json["session"]["id"]
    begun, may_end, write = threading.Event(), threading.Event(), session_file.write

    def slow(*args: Any) -> Any:
        begun.set()
        assert may_end.wait(60)
        return write(*args)

    monkeypatch.setattr(session_file, "write", slow)
    body = OPTIONS | {"messages": [{"role": "user", "content": "d"}], "session": name, "stream": True}
    headers = {"authorization": "Bearer one"}
    before = call(saving, "GET", name).json["tokens"]

    async def leave() -> None:
        task = asyncio.ensure_future(saving.call("POST", "/v1/chat/completions", body, headers=headers))
        while not begun.is_set():
            await asyncio.sleep(0.005)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    saving.run(leave())
    saving.wait_until(lambda: saving.server.admitted == 0)
    assert ask(saving, "d", name).json["error"]["code"] == "session_busy"
    may_end.set()
    saving.wait_until(lambda: call_tokens(saving, name) > before)
    assert ask(saving, "d", name).status == 200


def call_tokens(client: Client, name: str) -> int:
    found = client.server.sessions.listed(digest("one").hex())
    return next(each["tokens"] for each in found if each["id"] == name)


def test_a_full_disk_is_told_and_what_was_saved_remains(saving: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    name = ask(saving, "abc", "new").json["session"]["id"]

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(session_file, "write", full)
        assert ask(saving, "d", name).json["error"]["code"] == "session_not_saved"
        assert ask(saving, "d", name, stream=True).events[-1]["error"]["code"] == "session_not_saved"
    assert ask(saving, "d", name).status == 200


def test_an_end_token_that_comes_first_is_saved(saving: Client) -> None:
    """The row has then ended before it is told, and its cache arrives later."""
    for seed in range(200):
        reply = ask(saving, "abc", "new", temperature=5.0, seed=seed, max_tokens=2)
        if reply.json["choices"][0]["token_ids"] == [63]:
            break
    assert reply.json["choices"][0]["finish_reason"] == "stop"
    assert ask(saving, "d", reply.json["session"]["id"]).status == 200


def test_over_the_limit_the_oldest_is_deleted(letters: Params, tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    with server(letters, probe) as client:
        size = ask(client, "abc", "new").json["session"]["bytes"]
    folder = tmp_path / "sessions"
    with server(letters, folder, limit=2 * size + size // 2) as client:
        names = [ask(client, "abc", "new").json["session"]["id"] for _ in range(2)]
        other = ask(client, "abc", "new", key="two").json["session"]["id"]
        assert ask(client, "d", names[0]).status == 200  # now the other one is older
        names.append(ask(client, "abc", "new").json["session"]["id"])
        kept = [names[2], names[0]]
        assert [each["id"] for each in call(client, "GET").json["data"]] == kept
        assert ask(client, "d", names[1]).status == 404
        assert sorted(path.stem for path in folder.glob("*")) == sorted([*kept, other])
        total = sum(path.stat().st_size for path in folder.glob("*") if path.stem != other)
        assert total <= client.server.sessions.limit
    with pytest.raises(ValueError, match="more than all sessions may, 1000"), server(letters, folder, limit=1000):
        pass


def test_what_is_damaged_is_refused(
    letters: Params, saving: Client, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = ask(saving, "abc", "new").json["session"]["id"]
    path = folder / f"{name}.session"
    whole = path.read_bytes()
    head = whole.index(b"\n") + 40
    random = np.random.default_rng(0)
    cuts = [whole[:-1], whole[: len(whole) // 2], b"", whole + b"x"]
    flips = [*random.integers(head, len(whole), 5).tolist(), len(whole) - 1, head, 3]
    for content in [*cuts, *(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in flips)]:
        path.write_bytes(content)
        reply = ask(saving, "d", name)
        assert (reply.status, reply.json["error"]["code"]) == (409, "session_damaged")
        with pytest.raises(DamagedError, match=name):
            session_file.read(path)
    path.write_bytes(whole)
    assert ask(saving, "d", name).status == 200

    foreign = json.loads(path.read_bytes().split(b"\n")[1]) | {"origin": {"jax": "0.0"}}
    parts = {each: foreign[each] for each in ("id", "owner", "origin", "created", "tokens")}
    _, conversation, arrays = session_file.read(path)
    session_file.write(path, parts, conversation, arrays)
    reply = ask(saving, "d", name)
    assert reply.json["error"]["code"] == "session_of_another_server"
    assert "another value of kvjax and jax and device" in reply.json["error"]["message"]
    assert call(saving, "DELETE", name).status == 200
    assert not path.exists()


def test_files_return_what_was_written(tmp_path: Path) -> None:
    """Of every type that caches have, and scalars and empty arrays."""
    kinds = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int4", "uint4", "int8", "uint8", "int32", "bool"]
    random = np.random.default_rng(0)
    arrays = [random.integers(0, 7, (2, 3)).astype(jax.numpy.dtype(kind)) for kind in kinds]
    arrays += [np.asarray(3, np.float32), np.zeros((0, 4), np.int32), arrays[0].T]
    conversation = Conversation([1, 2, 3], 2, [{"role": "user", "content": "\U0001f600 \n"}])
    head = {"id": "a", "owner": "b", "origin": {"c": "d"}, "created": 1, "tokens": 3}
    written = session_file.write(tmp_path / "file", head, conversation, arrays)
    found_head, found, read = session_file.read(tmp_path / "file")
    assert (found_head, found) == (session_file.read_head(tmp_path / "file"), conversation)
    assert json.dumps(dataclasses.asdict(written)) == json.dumps(dataclasses.asdict(found_head))
    for mine, theirs in zip(arrays, read, strict=True):
        assert (mine.dtype, mine.shape, mine.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "treekv:24", "rkv:24", "kivi", "adakv:40", "quest"])
def test_caches_go_on_exactly_through_files(letters: Params, tmp_path: Path, policy: str) -> None:
    """Of more policies, in a batch."""
    sizes: dict[str, Any] = {"rows": 2, "prompt_len": 96, "max_new_tokens": NEW, "block": BLOCK, "anchor": "start"}
    random = np.random.default_rng(0)
    turns = [(random.integers(0, 62, size).tolist(), {"max_new_tokens": 8}) for size in (37, 5, 21)]
    expected = without_files(Batch(letters, policy, **sizes), turns)
    ids: list[int] = []
    begun: Begun | None = None
    for number, (tail, options) in enumerate(turns):
        ids = [*ids, *tail]
        batch = Batch(letters, policy, **sizes)
        job = Job(ids, **options, begun=begun)
        (*_, (reading, _)) = batch.reading(job)
        tokens, logprobs = finish(batch, reading, job, 1)
        assert (tokens, logprobs) == expected[number]
        caches, count, _ = batch.copy_row(1)
        ids += tokens
        assert count == len(ids) - 1
        leaves, tree = jax.tree.flatten(caches)
        head = {"id": "a", "owner": "b", "origin": {}, "created": 1, "tokens": 3}
        session_file.write(tmp_path / "file", head, Conversation(ids, count, []), leaves)
        begun = Begun(tree.unflatten(session_file.read(tmp_path / "file")[2]), count)
