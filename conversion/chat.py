"""Renders conversations with a model's Jinja chat template, as transformers' `apply_chat_template` does."""

import dataclasses
import datetime
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import sandbox
from .errors import shortened, told

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which a message may hold its reasoning. Most templates read the first key, some the second."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, str],
    add_generation_prompt: bool,
    now: datetime.datetime | None = None,
    arguments: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> str:
    """Render a conversation as text, as transformers' `apply_chat_template` does.

    Content in text parts reaches templates that read parts as it is. For other templates, the parts are joined by line
    breaks.

    Args:
        template: Jinja source. It comes with the model, so it runs in a sandbox with limits on time and memory.
        messages: one ``{"role": …, "content": …}`` per message.
        special: texts of the special tokens that templates refer to, by name (``bos_token``, ``eos_token`` …).
        add_generation_prompt: whether to end with the opening of the assistant's answer.
        now: time that the template sees; None uses the clock.
        arguments: other variables of the template, see `checked_arguments`.
        continue_final_message: whether to end with the last message's text, so that the model continues it. Text that
            the template puts after it is dropped.

    Returns:
        The rendered text.

    Raises:
        ValueError: the template is malformed, rejects these messages, fails, or exceeds its limits, does not read one
            of the arguments, or does not repeat the message to continue.
    """
    given, final, tag = dict(arguments or {}), None, ""
    if continue_final_message and not (messages and messages[-1].get("content")):
        raise ValueError("continue_final_message=True, but the last message has no text to continue")
    try:
        plain = [_message(message) for message in messages]
        if any(isinstance(message.get("content"), list) for message in plain) and not _reads_parts(
            template, tuple(special.items())
        ):
            plain = [_joined(message) for message in plain]
        if continue_final_message:
            final, tag = _tag_final(plain, repr((template, plain, special, given)))
        values = {
            "messages": plain,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **special,
            **given,
        }
        text = sandbox.render(template, values, now, reads=tuple(given))
    except sandbox.ExceededError as error:
        raise ValueError(f"the model's chat template refuses these messages: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"these chat messages cannot be passed to a template ({told(error)})") from error
    return text if final is None else _up_to_tag(text, final, tag)


def checked_arguments(arguments: Any) -> dict[str, Any]:
    """Validate the arguments of a template, and convert them to Python's built-in types.

    Args:
        arguments: values by name, such as `tools` (a list of JSON schemas), `documents` (a list of dictionaries) and
            whatever else the template reads, such as `enable_thinking`. None is none.

    Raises:
        ValueError: a name is not one that can be given, or a value has the wrong type.
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise ValueError(
            f"chat_template_kwargs is {shortened(arguments)}; give a dictionary of the template's arguments by name, such as "
            '{"tools": [...], "enable_thinking": False}'
        )
    for name in ("messages", "add_generation_prompt"):
        if name in arguments:
            raise ValueError(f"chat_template_kwargs has {name!r}, which the prompt determines; omit it")
    given = {name: value for name, value in arguments.items() if value is not None or name not in _LISTS}
    for name, what in _LISTS.items():
        values = given.get(name, [])
        if not isinstance(values, list | tuple):
            raise ValueError(f"{name} is {shortened(values)}; give a list of {what}")
        for i, value in enumerate(values):
            if not isinstance(value, Mapping):
                raise ValueError(f"{name}[{i}] is {shortened(value)}; give {what}")
    return _plain(given)


_LISTS = {
    "tools": 'JSON schemas, such as {"type": "function", "function": {"name": ..., "parameters": ...}}',
    "documents": 'dictionaries, such as {"title": ..., "text": ...}',
}
"""Arguments that are lists of dictionaries, and what these are."""


def unused(texts: str) -> str:
    """A marker that does not occur in these texts. Templates leave its letters and digits unchanged."""
    return next(marker for i in itertools.count() if (marker := f"marker{i}x") not in texts)


def _tag_final(messages: list[dict[str, Any]], used: str) -> tuple[str, str]:
    """Append a tag to the text of the last message, in place.

    As in transformers, the tag's last character is a space, which shows whether a template strips texts.

    Args:
        messages: the conversation.
        used: texts that do not contain the tag.

    Returns:
        The text without the tag, and the tag.
    """
    final, tag = messages[-1], f"{unused(used)} "
    content = final["content"]
    if isinstance(content, str):
        final["content"] = content + tag
        return content, tag
    text = content[-1]["text"]
    content[-1] = {**content[-1], "text": text + tag}
    return text, tag


def _up_to_tag(text: str, final: str, tag: str) -> str:
    """The rendered text up to the tag."""
    at = text.rfind(tag.strip())
    if at < 0 or final.strip() not in text:
        raise ValueError(
            "continue_final_message=True, but the model's chat template does not repeat the last message unchanged"
        )
    return text[:at] if text[at : at + len(tag)] == tag else text[:at].rstrip()


@functools.lru_cache(maxsize=32)
def _reads_parts(template: str, special: tuple[tuple[str, str], ...]) -> bool:
    """Whether a template reads content in parts: it renders one text part as it renders the text."""
    marker = "marker0x"
    try:
        text, parts = (
            sandbox.render(
                template,
                {"messages": [{"role": "user", "content": content}], "add_generation_prompt": False, **dict(special)},
            )
            for content in (marker, [{"type": "text", "text": marker}])
        )
    except sandbox.ExceededError:
        return False
    return marker in text and text == parts


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose text parts are one text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare a message for templates: drop None values, and copy its reasoning to the keys that templates read."""
    given = {name: value for name, value in _plain(message).items() if value is not None}
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Convert a value to Python's built-in types. Any other value becomes the name of its type, as templates only test
    for it.
    """
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Mapping():
            return {_plain(key): _plain(held) for key, held in value.items()}
        case list():
            return [_plain(held) for held in value]
        case tuple():
            return tuple(_plain(held) for held in value)
        case np.generic():
            return _plain(value.item())
        case _:
            pass
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return f"<{type(value).__name__}>"
