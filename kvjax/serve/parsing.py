"""From the text of an answer to the fields of OpenAI's message: thoughts, content and calls of tools."""

import dataclasses
from typing import Any

from .reasoning import Reasoning
from .tools import Format, ToolCalls


@dataclasses.dataclass(frozen=True)
class Parsing:
    """How the answers to a prompt are parsed.

    Attributes:
        thoughts: whether the answers may have thoughts.
        opened: whether the prompt has opened them.
        tools: format of calls; None if there are no tools.
    """

    thoughts: bool = False
    opened: bool = False
    tools: Format | None = None

    def parser(self) -> "Parser":
        """A parser of one answer."""
        return Parser(self)


class Parser:
    """Parses one growing answer."""

    def __init__(self, how: Parsing) -> None:
        self._reasoning = Reasoning(how.opened) if how.thoughts else None
        self._tools = ToolCalls(how.tools) if how.tools is not None else None

    @property
    def called(self) -> bool:
        """Whether a tool was called."""
        return self._tools is not None and self._tools.count > 0

    def push(self, text: str, *, final: bool) -> list[dict[str, Any]]:
        """Add text. Returns OpenAI's deltas, each with one field.

        Args:
            text: the new text.
            final: whether no text follows.
        """
        parts = [("content", text)] if self._reasoning is None else self._reasoning.push(text, final=final)
        found = [{"reasoning_content": part} for kind, part in parts if kind == "reasoning"]
        content = "".join(part for kind, part in parts if kind == "content")
        if self._tools is not None:
            return [*found, *self._tools.push(content, final=final)]
        return [*found, {"content": content}] if content else found

    def message(self, text: str) -> dict[str, Any]:
        """OpenAI's message with a whole text."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for delta in self.push(text, final=True):
            for name, value in delta.items():
                empty: Any = [] if name == "tool_calls" else ""
                message[name] = message.get(name, empty) + value
        for call in message.get("tool_calls", ()):
            del call["index"]
        if self.called and not message["content"]:
            message["content"] = None
        return message
