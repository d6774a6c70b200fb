"""Locates a message's text in a rendered conversation, and the text that a chat template puts around it.

A unique marker is put into the message and searched for in the rendered text. It occurs neither in the messages nor in
the template and its arguments, so every match is the marker.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .chat import unused
from .tokenizer import Tokenizer

_Messages = Sequence[Mapping[str, Any]]


def split(tokenizer: Tokenizer, messages: _Messages, message: int, before: str, after: str) -> tuple[str, str]:
    """Split a rendered conversation at a place within a message, up to the opening of the assistant's answer.

    Args:
        tokenizer: tokenizer with the chat template.
        messages: the conversation.
        message: index of the message whose content is replaced; of content in parts, the text of the last part.
        before, after: content of the message before and after the place.

    Returns:
        The text before and after the place.

    Raises:
        ValueError: the model has no template, or the template rejects the messages or omits this message.
    """
    marker = _marker(tokenizer, messages, before, after)
    marked = _with_content(messages, message, before + marker + after)
    text, found, rest = tokenizer.render(marked).rpartition(marker)
    if not found:
        raise _left_out(messages[message])
    return text, rest


def following(tokenizer: Tokenizer, messages: _Messages, message: int, *, add_generation_prompt: bool = True) -> str:
    """Text after a message's content: its end, later messages, and the opening of the assistant's answer.

    Args:
        tokenizer: tokenizer with the chat template.
        messages: the conversation.
        message: index of the message. Its content has no effect; of content in parts, the text of the last part.
        add_generation_prompt: whether to include the opening of the answer.

    Raises:
        ValueError: as `split`, or the last message is not rendered after this one.
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


def unfinished(tokenizer: Tokenizer, messages: _Messages) -> str:
    """Render a conversation up to the end of the last message's content, so that the model continues this message.

    This is transformers' `continue_final_message=True`. If the template removes white space around messages, trailing
    white space of the content is removed too.

    Raises:
        ValueError: the model has no template, or the template rejects the messages or omits the last one.
    """
    marker, content = _marker(tokenizer, messages), str(messages[-1]["content"])
    text, found, rest = tokenizer.render(
        _with_content(messages, -1, f"{content}{marker} "), add_generation_prompt=False
    ).rpartition(marker)
    if not found or content.strip() not in text:
        raise _left_out(messages[-1])
    return text if rest.startswith(" ") else text.rstrip()


def next_turn(tokenizer: Tokenizer, messages: _Messages, message: Mapping[str, Any]) -> str:
    """Text that a template adds for one more message, up to the opening of the assistant's answer.

    Raises:
        ValueError: the model has no template, or the template rejects the messages or does not append the message.
    """
    longer, last = [*messages, message], len(messages) - 1
    try:
        end = following(tokenizer, messages, last, add_generation_prompt=False)
    except ValueError:  # the last message's content is not rendered, as can happen with tool calls
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
    """Render a conversation that a user's message will follow.

    Some templates render the assistant's last message differently once a message follows it. Qwen3's template, for
    example, drops its reasoning.

    Raises:
        ValueError: the model has no template, or the template rejects the messages.
    """
    text = tokenizer.render(messages, add_generation_prompt=False)
    message = {"role": "user", "content": _marker(tokenizer, messages)}
    try:
        whole, turn = tokenizer.render([*messages, message]), next_turn(tokenizer, messages, message)
    except ValueError:  # a user's message cannot follow
        return text
    return whole.removesuffix(turn) if whole.endswith(turn) else text


def _marker(tokenizer: Tokenizer, messages: _Messages, *texts: str) -> str:
    """A marker that occurs neither in these texts nor in what the tokenizer's template renders."""
    given = [repr(messages), tokenizer.chat_template or "", *tokenizer.special.values(), repr(tokenizer.chat_arguments)]
    return unused("\n".join([*given, *texts]))


def last_text(message: Mapping[str, Any]) -> str:
    """A message's content; of content in parts, the text of the last part."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else content[-1]["text"]


def text_of(message: Mapping[str, Any]) -> str:
    """A message's content; parts are joined by line breaks."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _with_content(messages: _Messages, message: int, text: str) -> list[Mapping[str, Any]]:
    """The messages, with another `last_text` in one of them."""
    changed, content = [*messages], messages[message].get("content")
    if content and not isinstance(content, str):
        changed[message] = {**messages[message], "content": [*content[:-1], {"type": "text", "text": text}]}
    else:
        changed[message] = {**messages[message], "content": text}
    return changed


def _left_out(message: Mapping[str, Any]) -> ValueError:
    return ValueError(f"the model's chat template does not repeat a message with role {message.get('role')} unchanged")


def _changed() -> ValueError:
    return ValueError("this model's chat template changes earlier messages when one is added")
