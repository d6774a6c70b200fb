"""What can be asked to be continued: text, token ids, chat messages, or a list of any of these."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from kvjax._util.arguments import plain, shown
from kvjax.conversion import turns
from kvjax.models import Params

Message: TypeAlias = Mapping[str, Any]
"""A chat message, such as {"role": "user", "content": "Hello"}."""

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Text to continue, token ids (an array of one dimension serves too), or a chat (put through the model's own template)."""

Question: TypeAlias = str | Sequence[int]
"""What follows a prompt that has been read and compressed: text or token ids."""

Kind = Literal["text", "ids", "chat"]

TOLD = 8
"""Errors of rows that are told in full; of further ones the numbers of the rows are."""


def token_ids(
    params: Params, prompt: Any, *, one: bool = False, longest: int | None = None
) -> tuple[list[list[int]], bool]:
    """Every prompt as token ids, and whether one prompt was given rather than a list of them.

    Nothing is tokenised before all prompts are known to be of a known kind.

    Args:
        one: whether a list of prompts is refused.
        longest: the most tokens that a prompt may have.

    Raises:
        ValueError: a prompt is empty, of no known kind, too long, text or a chat for a model without tokenizer, or has a token id
            outside the model's vocabulary. Of a list, all such prompts are told by their numbers.
    """
    kind = _kind(prompt)
    if kind is not None:
        return [_ids(params, prompt, kind, longest=longest)], True
    rows = _listed(prompt)
    if not rows:
        raise ValueError(
            f"prompt is {shown(prompt)}; give text, token ids or chat messages, or a non-empty list of these{_hint(prompt)}"
        )
    kinds: list[Kind | None] = [_kind(row) for row in rows]
    if one and None not in kinds:
        raise ValueError(f"prompt is a list of {len(rows)}; give one prompt (generate takes several)")
    return _all_ids(params, "prompt", rows, kinds, "text, token ids or chat messages", longest=longest), False


def question_ids(params: Params, question: Any, prompts: int | None) -> list[list[int]]:
    """The questions that follow prompts, as token ids without a start token.

    Args:
        prompts: how many prompts there are; None where one was given by itself, which takes one question.

    Raises:
        ValueError: as `token_ids`, or there is not one question for each prompt.
    """
    questions = [question] if prompts is None else _listed(question)
    if prompts is not None and len(questions) != prompts:
        raise ValueError(f"question is {shown(question)}; give a list of {prompts}, one for each prompt")
    kinds: list[Kind | None] = [kind if kind != "chat" else None for kind in map(_kind, questions)]
    (kind, *_) = [*kinds, None]
    if prompts is None and kind is not None:
        return [_ids(params, question, kind, follows=True)]
    if prompts is None:
        raise ValueError(f"a question is {shown(question)}; give text or token ids{_hint(question)}")
    return _all_ids(params, "question", questions, kinds, "text or token ids", follows=True)


def _all_ids(
    params: Params, name: str, rows: Sequence[Any], kinds: Sequence[Kind | None], allowed: str, **options: Any
) -> list[list[int]]:
    """Token ids of each row of a list, of which all that are invalid are told."""
    known, found, errors = None not in kinds, [], []
    for row, kind in zip(rows, kinds, strict=True):
        error = None
        try:
            if kind is None:
                error = f" is {shown(row)}; give {allowed}{_hint(row)}"
            elif kind == "ids" or known:
                found.append(_ids(params, row, kind, **options))
        except ValueError as refused:
            error = f": {refused}"
        errors.append(error)
    refuse_rows(name, errors)
    return found


def check_ids(rows: Any, count: int, longest: int, vocabulary: int, name: str = "prompt", least: int = 1) -> None:
    """Raise `ValueError` unless these are `count` rows of `least` to `longest` token ids, naming all rows that are not."""
    rows = (
        list(rows)
        if isinstance(rows, Sequence | np.ndarray | jax.Array) and not isinstance(rows, str | bytes)
        else rows
    )
    if not isinstance(rows, list) or len(rows) != count:
        given = f"{len(rows)} {name}s are given" if isinstance(rows, list) else f"{name}s are {shown(rows)}"
        raise ValueError(f"{given}; give {count}, of {least} to {longest} tokens each")
    refuse_rows(name, [row_error(row, least, longest, vocabulary) for row in rows])


def row_error(row: Any, least: int, longest: int, vocabulary: int) -> str | None:
    """What is wrong with a row of token ids; None if nothing is."""
    try:
        ids = np.asarray(row)
    except (ValueError, OverflowError):  # rows within rows, of different lengths
        ids = np.asarray(None)
    if ids.ndim != 1 or (ids.size and ids.dtype != object and not np.issubdtype(ids.dtype, np.integer)):
        return f": {shown(row)} is not a list of token ids, which are whole numbers"
    if ids.dtype == object:  # numbers beyond 64 bits, or no numbers
        odd = [x for x in row if not _is_whole(x)]
        if odd:
            return f": {shown(odd[0])} is not a token id, which is a whole number"
    if not least <= ids.size <= longest:
        return f": {ids.size} tokens are not {least} to {longest}"
    bad = np.flatnonzero((ids < 0) | (ids >= vocabulary)) if ids.size else []
    return f": token id {ids[bad[0]]} is outside this model's vocabulary of {vocabulary}" if len(bad) else None


def refuse_rows(name: str, errors: Sequence[str | None], kind: type[ValueError] = ValueError) -> None:
    """Raise an error if there are errors among those of some rows, with the number of every row that has one.

    Args:
        errors: what follows a row's number, such as ": it is empty"; None for a row that is as it should be.
    """
    rows: dict[str, list[int]] = {}
    for i, error in enumerate(errors):
        if error is not None:
            rows.setdefault(error, []).append(i + 1)
    told = [_told(name, numbers, len(errors), error) for error, numbers in list(rows.items())[:TOLD]]
    if others := [number for numbers in list(rows.values())[TOLD:] for number in numbers]:
        told.append(f"{name}{'s' * (len(others) > 1)} {', '.join(map(str, sorted(others)))} of {len(errors)} as well")
    if told:
        raise kind("; ".join(told))


def _told(name: str, numbers: Sequence[int], count: int, error: str) -> str:
    if len(numbers) == 1:
        return f"{name} {numbers[0]} of {count}{error}"
    *others, last = map(str, numbers)
    several = f" are{error.removeprefix(' is')}" if error.startswith(" is ") else error
    return f"{name}s {', '.join(others)} and {last} of {count}{several}"


def asked_in_chats(
    params: Params, prompts: Sequence[Any], questions: Sequence[Any], ids: Sequence[tuple[list[int], list[int]]]
) -> list[tuple[list[int], list[int]]]:
    """Prompts and the questions that follow them as token ids, where a question after a chat is the end of the user's last message.

    What the template puts behind that message belongs to the question. If the last message is not the user's, the question is a
    message of its own.

    Args:
        params: the model.
        prompts, questions: as they were given, one of each in a row.
        ids: their tokens, as of `token_ids` and `question_ids`. Those of text and of token ids stay as they are.

    Raises:
        ValueError: the template refuses the messages, or leaves the question out.
    """
    rows = zip(prompts, questions, ids, strict=True)
    return [
        _asked(params, prompt, question, own[1]) if _kind(prompt) == "chat" else own for prompt, question, own in rows
    ]


def _asked(params: Params, messages: Sequence[Message], question: Any, ids: list[int]) -> tuple[list[int], list[int]]:
    tokenizer, messages = params.tokenizer, list(messages)
    if messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": ""})
    said, text = messages[-1]["content"] or "", question if isinstance(question, str) else ""
    # Templates trim what messages begin and end with, but not what stands between the message and tokens of a question.
    before, after = turns.split(tokenizer, messages, len(messages) - 1, said, text)
    after = tokenizer.encode(after, add_special=False)
    prompt, asked = tokenizer.encode(before, add_special=False), after if text else [*ids, *after]
    for found, what in ((prompt, "prompt"), (asked, "question")):
        _check_ids(params, found, what)
    return prompt, asked


def check_message(message: Any) -> None:
    """Raise `ValueError` unless a chat message says who speaks, and what, in text that can be encoded."""
    if not isinstance(message.get("role"), str):
        raise ValueError(f'a chat message is {shown(message)}; give {{"role": ..., "content": ...}}, the role as text')
    content = message.get("content")
    if isinstance(content, str):
        _check_text(content)
    elif content is not None or not message.get("tool_calls"):
        raise ValueError(
            f'the content of a chat message is {shown(content)}; give {{"role": ..., "content": ...}}, the content as text'
        )


def check_messages(messages: Sequence[Any], name: str) -> None:
    """`check_message` of each of several messages; all that are none are told by their numbers."""
    errors: list[str | None] = []
    for message in messages:
        try:
            check_message(message)
        except ValueError as error:
            errors.append(f": {error}")
        else:
            errors.append(None)
    refuse_rows(name, errors)


def _kind(prompt: Any) -> Kind | None:
    if isinstance(prompt, str):
        return "text"
    if isinstance(prompt, np.ndarray | jax.Array):
        return "ids" if prompt.ndim == 1 and prompt.size and np.issubdtype(prompt.dtype, np.integer) else None
    if _is_sequence(prompt) and len(prompt):
        if all(type(x) is int or _is_whole(x) for x in prompt):
            return "ids"
        if all(isinstance(x, Mapping) for x in prompt):
            return "chat"
    return None


def _listed(prompt: Any) -> list[Any]:
    """What a list of prompts is made of; nothing, if it is no such list."""
    if isinstance(prompt, np.ndarray | jax.Array):
        return list(np.asarray(prompt)) if prompt.ndim == 2 else []
    return list(prompt) if _is_sequence(prompt) else []


def _is_sequence(value: Any) -> bool:
    """Whether it is a list or the like, and not text or bytes, whose items are no prompts and no token ids."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _is_whole(value: Any) -> bool:
    value = plain(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _hint(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return "; bytes are decoded to text first"
    if isinstance(value, Mapping):
        return "; a chat is a list of messages"
    return "; put them in a list" if isinstance(value, Iterator) else ""


def _ids(params: Params, prompt: Any, kind: Kind, follows: bool = False, longest: int | None = None) -> list[int]:
    if kind == "ids":
        ids = np.asarray(prompt).tolist() if isinstance(prompt, np.ndarray | jax.Array) else [int(i) for i in prompt]
    elif params.tokenizer is None:
        raise ValueError("this model has no tokenizer; give token ids instead of text")
    elif kind == "chat":
        for message in prompt:
            check_message(message)
        ids = params.tokenizer.chat(prompt)
    else:
        _check_text(prompt)
        ids = params.tokenizer.encode(prompt, add_special=not follows)
    _check_ids(params, ids, "question" if follows else "prompt", longest)
    return ids


def _check_ids(params: Params, ids: Sequence[int], what: str, longest: int | None = None) -> None:
    if not ids:
        raise ValueError(f"a {what} is empty; give at least one token")
    if longest is not None and len(ids) > longest:
        raise ValueError(f"a prompt has {len(ids)} tokens, but the programs take {longest}; compile for longer ones")
    bad = next((i for i in ids if not 0 <= i < params.config.vocab_size), None)
    if bad is not None:
        raise ValueError(f"token id {bad} is outside this model's vocabulary of {params.config.vocab_size}")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text has half of a surrogate pair, {text[error.start]!r}, as character {error.start}, which is no character; "
            'repair it, for example by text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")'
        ) from None
