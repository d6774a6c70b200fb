"""Validates and tokenises prompts: text, token ids, chat messages, or lists of these."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from kvjax._util.arguments import plain, short, shown
from kvjax.conversion import turns
from kvjax.models import Params
from kvjax.runtime.token_ids import TokenIds

Message: TypeAlias = Mapping[str, Any]
"""A chat message, such as {"role": "user", "content": "Hello"}."""

PromptLike: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Text, token ids (also as a one-dimensional array), or chat messages (rendered with the model's template)."""

Question: TypeAlias = str | Sequence[int]
"""Text or token ids that follow a compressed prompt."""

Kind = Literal["text", "ids", "chat"]

TOLD = 8
"""Number of different errors that are reported in full. For further errors, only the rows are listed."""


def for_chat(params: Params, prompt: Any, arguments: Any) -> tuple[Params, bool]:
    """Give a model's chat template its arguments.

    Args:
        params: the model.
        prompt: what is to be rendered.
        arguments: `chat_template_kwargs` as passed by the user; None for none.

    Returns:
        The model with a tokenizer whose template gets the arguments, and whether the last message is to be continued.

    Raises:
        ValueError: an argument has the wrong type, or the prompt has no chat messages.
    """
    if arguments is None:
        return params, False
    given = dict(arguments) if isinstance(arguments, Mapping) else arguments
    continued = given.pop("continue_final_message", False) if isinstance(given, dict) else False
    if not isinstance(continued, bool):
        raise ValueError(f"continue_final_message={short(continued)}; give True or False")
    if params.tokenizer is None:
        raise ValueError("chat_template_kwargs are given, but this model has no tokenizer; omit them")
    tokenizer = params.tokenizer.for_chat(given)
    if "chat" not in map(_kind, [prompt, *([] if _kind(prompt) else _listed(prompt))]):
        raise ValueError(
            f"chat_template_kwargs are given, but prompt is {shown(prompt)}; give chat messages, or omit them"
        )
    return dataclasses.replace(params, tokenizer=tokenizer), continued


def token_ids(
    params: Params, prompt: Any, *, one: bool = False, longest: int | None = None, continued: bool = False
) -> tuple[list[Sequence[int]], bool]:
    """Convert prompts to token ids. Also returns whether a single prompt was given instead of a list.

    All prompts are validated before any is tokenised.

    Args:
        params: the model.
        prompt: a prompt, or a list of prompts.
        one: whether to refuse a list.
        longest: maximum number of tokens of a prompt.
        continued: whether chats end with the text of their last message, which the model continues.

    Raises:
        ValueError: a prompt is empty, of an unknown kind or too long, has an invalid token id, or is text or a chat and
            the model has no tokenizer. For a list, the message numbers all invalid prompts.
    """
    kind = _kind(prompt)
    if kind is not None:
        return [_ids(params, prompt, kind, longest=longest, continued=continued)], True
    rows = _listed(prompt)
    if not rows:
        raise ValueError(
            f"prompt is {shown(prompt)}; give text, token ids or chat messages, or a non-empty list of these{_hint(prompt)}"
        )
    kinds: list[Kind | None] = [_kind(row) for row in rows]
    if one and None not in kinds:
        raise ValueError(f"prompt is a list of {len(rows)}; give one prompt (generate takes several)")
    options = {"longest": longest, "continued": continued}
    return _all_ids(params, "prompt", rows, kinds, "text, token ids or chat messages", **options), False


def is_one(prompt: Any) -> bool:
    """Whether this is a single valid prompt, instead of a list of prompts or something else."""
    return _kind(prompt) is not None


def question_ids(params: Params, question: Any, prompts: int | None) -> list[Sequence[int]]:
    """Convert questions to token ids, without a start token.

    Args:
        params: the model.
        question: a question, or a list of questions.
        prompts: number of prompts; None for a single prompt, which takes a single question.

    Raises:
        ValueError: as `token_ids`, or there is not one question per prompt.
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
) -> list[Sequence[int]]:
    """Token ids of each row of a list. The error reports all invalid rows."""
    known, found, errors = None not in kinds, [], []
    for row, kind in zip(rows, kinds, strict=True):
        error = None
        try:
            if kind is None:
                error = f" is {shown(row)}; give {allowed}{_hint(row)}"
            elif kind == "ids" or known or not row:
                found.append(_ids(params, row, kind, **options))
            else:
                _check_untokenised(row)
        except ValueError as refused:
            error = f": {refused}"
        errors.append(error)
    refuse_rows(name, errors)
    return found


def check_ids(rows: Any, count: int, longest: int, vocabulary: int, name: str = "prompt", least: int = 1) -> None:
    """Raise `ValueError` unless `rows` are `count` rows of `least` to `longest` token ids. The error names all invalid rows."""
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
    """Describe what is wrong with a row of token ids; None if nothing is."""
    try:
        ids = np.asarray(row)
    except (ValueError, OverflowError):  # nested rows of different lengths
        ids = np.asarray(None)
    if ids.ndim != 1 or (ids.size and ids.dtype != object and not np.issubdtype(ids.dtype, np.integer)):
        return f": {shown(row)} is not a list of token ids, which are whole numbers"
    if ids.dtype == object:  # numbers beyond 64 bits, or no numbers
        odd = [x for x in row if not _is_whole(x)]
        if odd:
            return f": {shown(odd[0])} is not a token id, which is a whole number"
    if not least <= ids.size <= longest:
        return f": {ids.size} tokens are not {least} to {longest}"
    outside = _outside(ids, vocabulary)
    return None if outside is None else f": token id {outside} is outside this model's vocabulary of {vocabulary}"


def _outside(ids: np.ndarray, vocabulary: int) -> Any:
    """The first token id that is not in the vocabulary; None if all are."""
    if not ids.size or (ids.min() >= 0 and ids.max() < vocabulary):
        return None
    return ids[np.flatnonzero((ids < 0) | (ids >= vocabulary))[0]]


def refuse_rows(name: str, errors: Sequence[str | None], kind: type[ValueError] = ValueError) -> None:
    """Raise one error for all rows that have one, with their numbers. Do nothing if there is none.

    Args:
        name: what a row is, such as "prompt".
        errors: for each row, the text after its number, such as ": it is empty"; None for a valid row.
        kind: type of the error.
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
    params: Params, prompts: Sequence[Any], questions: Sequence[Any], ids: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Move questions that follow chats to the end of the user's last message.

    The template's text after that message becomes part of the question. If the last message is not the user's, the
    question becomes a user message.

    Args:
        params: the model.
        prompts, questions: as passed by the user, one question per prompt.
        ids: token ids of both, from `token_ids` and `question_ids`. Those of text and token ids are returned unchanged.

    Raises:
        ValueError: the template rejects the messages, or omits the question.
    """
    rows = zip(prompts, questions, ids, strict=True)
    return [
        _asked(params, prompt, question, own[1]) if _kind(prompt) == "chat" else own for prompt, question, own in rows
    ]


def _asked(
    params: Params, messages: Sequence[Message], question: Any, ids: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    tokenizer, messages = params.tokenizer, list(messages)
    if messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": ""})
    said, text = turns.last_text(messages[-1]), question if isinstance(question, str) else ""
    # Templates strip whitespace around messages, but not between the message and the question's tokens.
    before, after = turns.split(tokenizer, messages, len(messages) - 1, said, text)
    after = tokenizer.encode(after, add_special=False)
    prompt, asked = tokenizer.encode(before, add_special=False), after if text else [*ids, *after]
    for found, what in ((prompt, "prompt"), (asked, "question")):
        _check_ids(params, found, what)
    return prompt, asked


def _check_untokenised(row: Any) -> None:
    """Raise `ValueError` for text or chat messages that cannot be tokenised."""
    if isinstance(row, str):
        _check_text(row)
    else:
        for message in row:
            check_message(message)


def check_message(message: Any) -> None:
    """Raise `ValueError` unless a chat message has a role, and content that can be encoded."""
    if not isinstance(message.get("role"), str):
        raise ValueError(f'a chat message is {shown(message)}; give {{"role": ..., "content": ...}}, the role as text')
    content = message.get("content")
    if isinstance(content, str):
        _check_text(content)
    elif isinstance(content, list | tuple) and content:
        for i, part in enumerate(content):
            _check_part(i + 1, part)
    elif content is not None or not message.get("tool_calls"):
        raise ValueError(
            f'the content of a chat message is {shown(content)}; give {{"role": ..., "content": ...}}, the content as text, or as a list of '
            f"{_PART}"
        )


_PART = '{"type": "text", "text": ...}'
"""A part of a message's content."""


def _check_part(number: int, part: Any) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind != "text":
        raise ValueError(f"part {number} of a chat message is of type {short(kind)}; text alone is read, as {_PART}")
    if kind is None or not isinstance(part.get("text"), str):
        raise ValueError(f"part {number} of a chat message is {shown(part)}; give {_PART}")
    _check_text(part["text"])


def check_messages(messages: Sequence[Any], name: str) -> None:
    """Call `check_message` for several messages. The error numbers all invalid ones."""
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
        if _are_ints(prompt) or all(map(_is_whole, prompt)):
            return "ids"
        if all(isinstance(x, Mapping) for x in prompt):
            return "chat"
    return None


def _listed(prompt: Any) -> list[Any]:
    """Items of a list of prompts; empty if it is not such a list."""
    if isinstance(prompt, np.ndarray | jax.Array):
        return list(np.asarray(prompt)) if prompt.ndim == 2 else []
    return list(prompt) if _is_sequence(prompt) else []


def _is_sequence(value: Any) -> bool:
    """Whether `value` is a sequence other than text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _are_ints(values: Sequence[Any]) -> bool:
    """Whether all are Python's own `int`. This is the fast case of `_is_whole` for long prompts."""
    return type(values[0]) is int and set(map(type, values)) == {int}


def _is_whole(value: Any) -> bool:
    value = plain(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _hint(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return "; bytes are decoded to text first"
    if isinstance(value, Mapping):
        return "; a chat is a list of messages"
    return "; put them in a list" if isinstance(value, Iterator) else ""


def _ids(
    params: Params,
    prompt: Any,
    kind: Kind,
    follows: bool = False,
    longest: int | None = None,
    continued: bool = False,
) -> Sequence[int]:
    what = "question" if follows else "prompt"
    if kind == "ids":
        ids = _as_array(prompt)
        _check_ids(params, ids, what, longest)
        return TokenIds(ids)
    if params.tokenizer is None:
        raise ValueError("this model has no tokenizer; give token ids instead of text")
    elif kind == "chat":
        for message in prompt:
            check_message(message)
        ids = params.tokenizer.chat(prompt, continue_final_message=continued)
    else:
        _check_text(prompt)
        ids = params.tokenizer.encode(prompt, add_special=not follows)
    _check_ids(params, ids, what, longest)
    return ids


def _as_array(ids: Any) -> np.ndarray:
    """Whole numbers as an array, of Python's numbers if one of them has more than 64 bits."""
    if isinstance(ids, np.ndarray | jax.Array):
        return np.asarray(ids)
    numbers = ids if _are_ints(ids) else [int(i) for i in ids]
    try:
        return np.asarray(numbers, np.int64)
    except OverflowError:
        return np.asarray(numbers, object)


def _check_ids(params: Params, ids: Any, what: str, longest: int | None = None) -> None:
    if not len(ids):
        raise ValueError(f"a {what} is empty; give at least one token")
    if longest is not None and len(ids) > longest:
        raise ValueError(f"a prompt has {len(ids)} tokens, but the programs take {longest}; compile for longer ones")
    outside = _outside(_as_array(ids), params.config.vocab_size)
    if outside is not None:
        raise ValueError(f"token id {outside} is outside this model's vocabulary of {params.config.vocab_size}")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text has half of a surrogate pair, {text[error.start]!r}, as character {error.start}, which is no character; "
            'repair it, for example by text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")'
        ) from None
