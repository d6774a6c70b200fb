"""Where a message's text lies in a rendered conversation, and what a chat template puts around it.

A marker is put into the message and looked for in what the template makes of it. The marker is in none of the messages and not in
the template, so what is found is the marker and nothing else.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from .tokenizer import Tokenizer

_Messages = Sequence[Mapping[str, Any]]


def split(tokenizer: Tokenizer, messages: _Messages, message: int, before: str, after: str) -> tuple[str, str]:
    """A conversation up to a place in one of its messages, and from there to the opening of the assistant's answer.

    Args:
        tokenizer: whose template it is.
        messages: the conversation.
        message: index of the message, whose content is replaced.
        before, after: what its content is on both sides of the place.

    Raises:
        ValueError: the model has no template, or its template refuses the messages or leaves this one out.
    """
    marker = _marker(tokenizer, messages, before, after)
    marked = _with_content(messages, message, before + marker + after)
    text, found, rest = tokenizer.render(marked).rpartition(marker)
    if not found:
        raise _left_out(messages[message])
    return text, rest


def following(tokenizer: Tokenizer, messages: _Messages, message: int, *, add_generation_prompt: bool = True) -> str:
    """What a template puts behind the content of a message: its end, later messages, and the opening of the assistant's answer.

    Args:
        tokenizer: whose template it is.
        messages: the conversation.
        message: index of the message; what its content is does not matter.
        add_generation_prompt: whether the opening is there.

    Raises:
        ValueError: as `split`, or the last message does not come after this one.
    """
    marker = _marker(tokenizer, messages)
    marked = _with_content(messages, message, marker)
    text = tokenizer.render(marked, add_generation_prompt=add_generation_prompt)
    _, found, rest = text.rpartition(marker)
    if not found:
        raise _left_out(messages[message])
    if message < len(messages) - 1:
        last = _marker(tokenizer, marked)
        order = tokenizer.render(_with_content(marked, -1, last))
        if last not in order.rpartition(marker)[2]:
            raise _changed()
    return rest


def next_turn(tokenizer: Tokenizer, messages: _Messages, message: Mapping[str, Any]) -> str:
    """What a template adds to a conversation for one more message, up to the opening of the assistant's answer.

    Raises:
        ValueError: the model has no template, or its template refuses the messages or puts the message elsewhere than at the end.
    """
    longer, last = [*messages, message], len(messages) - 1
    try:
        end = following(tokenizer, messages, last, add_generation_prompt=False)
    except ValueError:  # the last message's content is not shown, as that of a call of a tool may not be
        end, rest = tokenizer.render(messages, add_generation_prompt=False), tokenizer.render(longer)
        marker = _marker(tokenizer, longer)
        if marker not in tokenizer.render(_with_content(longer, -1, marker)):
            raise _left_out(message) from None
    else:
        rest = following(tokenizer, longer, last)
    if not rest.startswith(end):
        raise _changed()
    return rest.removeprefix(end)


def history(tokenizer: Tokenizer, messages: _Messages) -> str:
    """A conversation that the user's next message is to follow.

    Some templates write the assistant's last message otherwise once a message follows it: Qwen3's leaves out its reasoning.

    Raises:
        ValueError: the model has no template, or its template refuses the messages.
    """
    text = tokenizer.render(messages, add_generation_prompt=False)
    message = {"role": "user", "content": _marker(tokenizer, messages)}
    try:
        whole, turn = tokenizer.render([*messages, message]), next_turn(tokenizer, messages, message)
    except ValueError:  # the user's turn is not next
        return text
    return whole.removesuffix(turn) if whole.endswith(turn) else text


def _marker(tokenizer: Tokenizer, messages: _Messages, *texts: str) -> str:
    """Letters and digits, which templates leave as they are, that are neither in these texts nor in the template."""
    used = "\n".join([repr(messages), tokenizer.chat_template or "", *tokenizer.special.values(), *texts])
    return next(marker for i in itertools.count() if (marker := f"marker{i}x") not in used)


def _with_content(messages: _Messages, message: int, content: str) -> list[Mapping[str, Any]]:
    changed = [*messages]
    changed[message] = {**messages[message], "content": content}
    return changed


def _left_out(message: Mapping[str, Any]) -> ValueError:
    return ValueError(f"the model's chat template does not repeat a message of the {message.get('role')}'s as it is")


def _changed() -> ValueError:
    return ValueError("this model's chat template changes earlier messages when one is added")
