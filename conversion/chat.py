"""Chat templates: the Jinja dialect that model repositories are written in."""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import sandbox
from .errors import told

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that a message's reasoning goes by. Most templates read the first, some the second."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, str],
    add_generation_prompt: bool,
    now: datetime.datetime | None = None,
) -> str:
    """The text of a conversation, as transformers' `apply_chat_template` makes it.

    Args:
        template: Jinja source. It comes with the model, so it runs sandboxed, within bounds of time and memory.
        messages: ``{"role": …, "content": …}`` each.
        special: texts of ``bos_token``, ``eos_token`` … that templates refer to.
        add_generation_prompt: end with the opening of the assistant's answer.
        now: the time that the template sees; by default that of the clock.

    Raises:
        ValueError: the template is malformed, refuses these messages, fails, or goes beyond its bounds.
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
        raise ValueError(f"these chat messages cannot be given to a template ({told(error)})") from error


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: nothing that is None, and its reasoning by the names that they read."""
    given = {name: value for name, value in _plain(message).items() if value is not None}
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A value made of Python's own types; of anything else the name of its type, which is all that templates look at."""
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
