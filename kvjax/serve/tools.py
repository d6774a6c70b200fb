"""Calls of tools in the formats of Hermes and Qwen, and of Llama 3: how they are found in an answer, and how they are forced.

Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times, after other text.
Llama 3: the answer is `{"name": ..., "parameters": {...}}`, or several of them, separated by semicolons.
"""

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from .held_text import begun

Format = Literal["hermes", "llama3"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def tool_format(template: str | None) -> Format | None:
    """The format in which a model calls tools, by its chat template; None if it is not known."""
    template = template or ""
    if "tools" not in template:
        return None
    if OPEN in template:
        return None if "<function=" in template else "hermes"
    if '"parameters"' in template and "<|start_header_id|>" in template:
        return "llama3"
    return None


SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How templates write JSON, as options of llguidance."""


_COMBINED = {"$ref", "allOf", "anyOf", "oneOf"}
"""Keys of a schema that may add arguments to its own."""


def calls_grammar(
    kind: Format, functions: Mapping[str, Mapping[str, Any] | None], *, several: bool, after_thoughts: bool
) -> str:
    """A grammar of answers that call functions and say nothing else, in llguidance's variant of Lark.

    Templates of Llama 3 take a single call in an answer. A function has no other arguments than those that its schema
    names, unless the schema says so.

    Args:
        kind: the format.
        functions: JSON schemas of the arguments of each function; None for any.
        several: whether there may be more than one call.
        after_thoughts: whether the answer may begin with the blank line that follows thoughts.
    """
    first, key, last = '{"name": ', "parameters", "}"
    if kind == "hermes":
        first, key, last = f"{OPEN}\n{first}", "arguments", f"{last}\n{CLOSE}"
    before = r'"\n\n"? ' if after_thoughts else ""
    after = r' ("\n" call)*' if several and kind == "hermes" else ""
    names = " | ".join(f"f{i}" for i in range(len(functions)))
    lines = [f"start: {before}call{after}", f"call: {json.dumps(first)} ({names}) {json.dumps(last)}"]
    for i, (name, schema) in enumerate(functions.items()):
        named = json.dumps(name) + f', "{key}": '
        # References in a schema are relative to its own root, so each schema is a grammar of its own.
        given: dict[str, Any] = {"x-guidance": SEPARATORS, "type": "object"} | dict(schema or {})
        if "properties" in given and not _COMBINED & given.keys():
            given.setdefault("additionalProperties", False)
        lines += [f"f{i}: {json.dumps(named)} a{i}", f"a{i}: %json {json.dumps(given)}"]
    return "\n".join(lines)


class ToolCalls:
    """Finds calls in a growing text. Each call is returned when it is complete.

    Args:
        kind: the format.

    Attributes:
        count: number of calls so far.
    """

    def __init__(self, kind: Format) -> None:
        self._kind: Format = kind
        self._held = ""
        self._inside = False
        self._decided = False
        self.count = 0

    def push(self, text: str, *, final: bool) -> list[dict[str, Any]]:
        """Add text. Returns deltas as OpenAI has them, with `content` or `tool_calls`.

        Args:
            text: the new text.
            final: whether no text follows.
        """
        self._held += text
        find = self._hermes if self._kind == "hermes" else self._llama3
        return [delta for delta in find(final) if delta.get("content") != ""]

    def _hermes(self, final: bool) -> Iterator[dict[str, Any]]:
        while True:
            tag = CLOSE if self._inside else OPEN
            before, there, after = self._held.partition(tag)
            if not there:
                break
            self._held = after
            if not self._inside:
                # Templates put a line break between text and calls, which belongs to neither.
                yield {"content": before.rstrip() if self.count == 0 else before.strip()}
            elif (call := _call(before, "arguments")) is not None:
                yield self._delta(call)
            else:
                yield {"content": OPEN + before + CLOSE}
            self._inside = not self._inside
        if final:
            yield {"content": OPEN + self._held if self._inside else self._rest(self._held)}
            self._held = ""
        elif not self._inside:
            certain = len(self._held) - begun(self._held, OPEN)
            certain = len(self._held[:certain].rstrip())
            yield {"content": self._rest(self._held[:certain])}
            self._held = self._held[certain:]

    def _rest(self, text: str) -> str:
        """Text outside calls. Only white space is between calls."""
        return text.strip() if self.count else text

    def _llama3(self, final: bool) -> Iterator[dict[str, Any]]:
        start = self._held.lstrip()
        if not self._decided and start:
            self._decided = True
            self._inside = start.startswith("{")
        if not self._inside:
            if self._decided or final:
                yield {"content": self._held}
                self._held = ""
            return
        if final:
            calls = list(_calls(self._held))
            if calls and all(call is not None for call in calls):
                for call in calls:
                    assert call is not None
                    yield self._delta(call)
            else:
                yield {"content": self._held}
            self._held = ""

    def _delta(self, call: tuple[str, str]) -> dict[str, Any]:
        name, arguments = call
        function = {"name": name, "arguments": arguments}
        made = {"index": self.count, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
        self.count += 1
        return {"tool_calls": [made]}


def _calls(text: str) -> Iterator[tuple[str, str] | None]:
    """Calls that follow one another, separated by semicolons. None for text that is no call."""
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            yield None
            return
        yield _named(value, "parameters")
        text = text[end:].lstrip().removeprefix(";").lstrip()


def _call(text: str, arguments: str) -> tuple[str, str] | None:
    try:
        return _named(json.loads(text), arguments)
    except (ValueError, RecursionError):
        return None


def _named(value: Any, key: str) -> tuple[str, str] | None:
    """Name and arguments of a call, these as JSON; None if it is none."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get(key, {})
    if not isinstance(arguments, Mapping):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)
