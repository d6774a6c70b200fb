"""Renders conversations with a model's Jinja chat template, as transformers' `apply_chat_template` does."""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import sandbox
from .errors import told

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which a message may hold its reasoning. Most templates read the first key, some the second."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, str],
    add_generation_prompt: bool,
    now: datetime.datetime | None = None,
) -> str:
    """Render a conversation as text, as transformers' `apply_chat_template` does.

    Args:
        template: Jinja source. It comes with the model, so it runs in a sandbox with limits on time and memory.
        messages: one ``{"role": …, "content": …}`` per message.
        special: texts of the special tokens that templates refer to, by name (``bos_token``, ``eos_token`` …).
        add_generation_prompt: whether to end with the opening of the assistant's answer.
        now: time that the template sees; None uses the clock.

    Returns:
        The rendered text.

    Raises:
        ValueError: the template is malformed, rejects these messages, fails, or exceeds its limits.
    """
    try:
        values = {
            "messages": [_message(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **special,
        }
        return sandbox.render(template, values, now)
    except sandbox.ExceededError as error:
        raise ValueError(f"the model's chat template refuses these messages: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"these chat messages cannot be passed to a template ({told(error)})") from error


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
