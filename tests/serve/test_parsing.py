"""Thoughts and calls of tools in answers, whole and however they are split."""

import json
from typing import Any

import pytest
from serve_client import Client, serving

from kvjax.conversion import Tokenizer
from kvjax.models import Params
from kvjax.serve.parsing import Parsing
from kvjax.serve.schema import ChatRequest
from kvjax.serve.tools import tool_format
from kvjax.serve.worker import Update

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": [2]}}'
ADD = ("add", {"a": 1, "b": [2]})


def streamed(how: Parsing, pieces: list[str]) -> dict[str, Any]:
    """A message from deltas, as clients put it together."""
    parser, message = how.parser(), {"content": "", "reasoning_content": "", "calls": []}
    for i, piece in enumerate(pieces):
        for delta in parser.push(piece, final=i == len(pieces) - 1):
            ((name, value),) = delta.items()
            if name == "tool_calls":
                (call,) = value
                assert call["index"] == len(message["calls"])
                message["calls"].append((call["function"]["name"], json.loads(call["function"]["arguments"])))
            else:
                assert value
                message[name] += value
    return message


@pytest.mark.parametrize(
    ("how", "text", "expected"),
    [
        (Parsing(), "<think>a</think>b", {"content": "<think>a</think>b"}),
        (
            Parsing(thoughts=True),
            "<think>\n a <b>\n\n</think>\n\nc\n",
            {"reasoning_content": "a <b>", "content": "c\n"},
        ),
        (Parsing(thoughts=True), "\n<think></think>c", {"content": "c"}),
        (Parsing(thoughts=True), "<think>\nno end ", {"reasoning_content": "no end "}),
        (Parsing(thoughts=True), "<thin", {"content": "<thin"}),
        (Parsing(thoughts=True), "no <think>s</think>", {"content": "no <think>s</think>"}),
        (
            Parsing(thoughts=True, opened=True),
            "\na </thin\n </think>b",
            {"reasoning_content": "a </thin", "content": "b"},
        ),
        (Parsing(thoughts=True, opened=True), "a</thi", {"reasoning_content": "a</thi"}),
        (Parsing(tools="hermes"), "no call < here", {"content": "no call < here"}),
        (Parsing(tools="hermes"), CALL, {"calls": [ADD]}),
        (Parsing(tools="hermes"), f"So:\n{CALL}\n{CALL}\n", {"content": "So:", "calls": [ADD, ADD]}),
        (Parsing(tools="hermes"), "<tool_call>{]</tool_call>", {"content": "<tool_call>{]</tool_call>"}),
        (Parsing(tools="hermes"), '<tool_call>{"name": "a"', {"content": '<tool_call>{"name": "a"'}),
        (Parsing(tools="hermes"), '<tool_call>{"name": "a"}</tool_call>', {"calls": [("a", {})]}),
        (Parsing(tools="llama3"), "plain {", {"content": "plain {"}),
        (Parsing(tools="llama3"), f"\n{LLAMA}", {"calls": [ADD]}),
        (Parsing(tools="llama3"), f"{LLAMA}; {LLAMA}", {"calls": [ADD, ADD]}),
        (Parsing(tools="llama3"), '{"a": 1}', {"content": '{"a": 1}'}),
        (Parsing(tools="llama3"), f"{LLAMA} and", {"content": f"{LLAMA} and"}),
        (
            Parsing(thoughts=True, opened=True, tools="hermes"),
            f"<tool_call> is a tag</think>\n\n{CALL}",
            {"reasoning_content": "<tool_call> is a tag", "calls": [ADD]},
        ),
    ],
)
def test_messages_do_not_depend_on_how_they_are_split(how: Parsing, text: str, expected: dict[str, Any]) -> None:
    expected = {"content": "", "reasoning_content": "", "calls": []} | expected
    for size in (1, 2, 3, 7, len(text)):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert streamed(how, pieces) == expected
        assert streamed(how, [*pieces, ""]) == expected
    message = how.parser().message(text)
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", ())
    ]
    said = {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": calls,
    }
    assert said == expected


HERMES = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }}{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or () %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}<|assistant|>{% if think %}<think>\n{% endif %}{# </think> #}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_formats_of_templates() -> None:
    assert tool_format(HERMES) == "hermes"
    assert tool_format(None) is tool_format("no such thing") is None
    assert tool_format(HERMES + "<function=add>") is None
    assert tool_format("{{ tools }} <|start_header_id|> {'name': , \"parameters\": }") == "llama3"


@pytest.fixture(scope="module")
def talking(talker: Params) -> Any:
    given = talker.tokenizer
    tokenizer = Tokenizer(given.backend, eos=given.eos, bos=given.bos, chat_template=HERMES, special=given.special)
    with serving(talker.replace(tokenizer=tokenizer), idle=True) as client:
        yield client


def says(client: Client, monkeypatch: pytest.MonkeyPatch, text: str, size: int = 5) -> None:
    """Let the model say a text, a few tokens at a time."""
    server = client.server
    tokens = [*server.preparer.tokenizer.encode(text, add_special=False), 1]

    def submit(jobs: Any, owners: Any, **_: Any) -> None:
        for owner in owners:
            for at in range(0, len(tokens), size):
                part = tokens[at : at + size]
                ended = "eos" if at + size >= len(tokens) else None
                server._on_updates([Update(owner, part, [-1.0] * len(part), ended, None)])

    monkeypatch.setattr(server.worker, "submit", submit)


def test_calls_and_thoughts_in_answers(talking: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    says(talking, monkeypatch, f"hm\n</think>\n\nWell.\n{CALL}")
    body = {"messages": [{"role": "user", "content": "1+2?"}], "tools": [TOOL], "chat_template_kwargs": {"think": True}}
    (choice,) = (whole := talking.post("/v1/chat/completions", body)).json["choices"]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "Well.", "reasoning_content": "hm"}
    assert choice["finish_reason"] == "tool_calls"
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    assert json.loads(call["function"]["arguments"]) == ADD[1]

    streamed = talking.post("/v1/chat/completions", body | {"stream": True, "return_token_ids": True, "logprobs": True})
    parts = [event["choices"][0] for event in streamed.events[:-1]]
    deltas = [part["delta"] for part in parts]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "Well."
    ((again,),) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert again == call | {"index": 0, "id": again["id"]}
    assert parts[-1]["finish_reason"] == "tool_calls"
    count = whole.json["usage"]["completion_tokens"]
    assert sum(len(part.get("token_ids", ())) for part in parts) == count
    assert sum(len(part["logprobs"]["content"]) for part in parts if part["logprobs"]) == count

    ask = {"role": "assistant", "content": None, "tool_calls": [call]}
    said = [*body["messages"], ask, {"role": "tool", "content": "3", "tool_call_id": call["id"]}]
    ids = talking.post("/tokenize", {"messages": said}).json["tokens"]
    text = talking.server.preparer.tokenizer.decode(ids)
    assert '<|assistant|><tool_call>add{"a": 1, "b": [2]}</tool_call><|tool|>3<|assistant|>' in text


def schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool with such parameters."""
    return {"type": "function", "function": {"name": "add", "parameters": parameters}}


def test_tools_that_are_refused(letters: Params, talking: Client) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]}
    with serving(letters, idle=True) as client:
        reply = client.post("/v1/chat/completions", body)
        assert (reply.status, reply.json["error"]["param"]) == (400, "tools")
        unused = client.server.preparer.chat(ChatRequest(**body, tool_choice="none"), "")
        assert unused.parsing.tools is None
    for more, param in (
        ({"tool_choice": "required", "ignore_eos": True}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": [schema({"type": "string"})]}, "tools"),
        ({"tool_choice": "required", "tools": [schema({"$ref": "#/nowhere"})]}, "tools"),
        ({"tool_choice": "required", "tools": [schema({"properties": {"a": {"not": {}}}})]}, "tools"),
        ({"tool_choice": "required", "tools": [schema({"description": "a" * (1 << 16)})]}, "tools"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOL | {"function": {"name": "a", "strict": True}}]}, "tools"),
    ):
        reply = talking.post("/v1/chat/completions", body | more)
        assert (reply.status, reply.json["error"]["param"]) == (400, param), more
