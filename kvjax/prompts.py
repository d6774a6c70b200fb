"""What can be asked to be continued: text, token ids, chat messages, or a list of any of these."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import jax
import numpy as np

from kvjax.models import Params

Message: TypeAlias = Mapping[str, Any]
"""A chat message, such as {"role": "user", "content": "Hello"}."""

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Text to continue, token ids, or a chat (put through the model's own template)."""

Question: TypeAlias = str | Sequence[int]
"""What follows a prompt that has been read and compressed: text or token ids."""


def token_ids(params: Params, prompt: Any) -> tuple[list[list[int]], bool]:
    """Every prompt as token ids, and whether one prompt was given rather than a list of them.

    Raises:
        ValueError: a prompt is empty, of no known kind, text or a chat for a model without tokenizer, or has a token id
            outside the model's vocabulary.
    """
    one = _kind(prompt)
    prompts = [prompt] if one else prompt
    if not one and (isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence) or len(prompts) == 0):
        raise ValueError(
            f"prompt is {_shown(prompt)}; give text, token ids or chat messages, or a non-empty list of these"
        )
    return [_ids(params, p) for p in prompts], one is not None


def question_ids(params: Params, question: Any, prompts: int | None) -> list[list[int]]:
    """The questions that follow prompts, as token ids without a start token.

    Args:
        prompts: how many prompts there are; None where one was given by itself, which takes one question.

    Raises:
        ValueError: as `token_ids`, or there is not one question for each prompt.
    """
    questions = [question] if prompts is None else question
    listed = isinstance(questions, Sequence) and not isinstance(questions, str | bytes)
    if not listed or len(questions) != (1 if prompts is None else prompts):
        raise ValueError(f"question is {_shown(question)}; give a list of {prompts}, one for each prompt")
    return [_ids(params, q, follows=True) for q in questions]


def _kind(prompt: Any) -> Literal["text", "ids", "chat"] | None:
    if isinstance(prompt, str):
        return "text"
    if isinstance(prompt, np.ndarray | jax.Array) and prompt.ndim == 1 and np.issubdtype(prompt.dtype, np.integer):
        return "ids"
    if isinstance(prompt, Sequence) and len(prompt):
        if all(isinstance(x, int | np.integer) and not isinstance(x, bool) for x in prompt):
            return "ids"
        if all(isinstance(x, Mapping) for x in prompt):
            return "chat"
    return None


def _ids(params: Params, prompt: Any, follows: bool = False) -> list[int]:
    kind = _kind(prompt)
    if follows and (kind is None or kind == "chat"):
        raise ValueError(f"a question is {_shown(prompt)}; give text or token ids")
    if kind is None:
        raise ValueError(f"a prompt is {_shown(prompt)}; give text, token ids or chat messages")
    if kind == "ids":
        ids = [int(i) for i in prompt]
    elif params.tokenizer is None:
        raise ValueError("this model has no tokenizer; give token ids instead of text")
    elif kind == "chat":
        ids = params.tokenizer.chat(cast(Sequence[Message], prompt))
    else:
        ids = params.tokenizer.encode(prompt, add_special=not follows)
    if not ids:
        raise ValueError(f"a {'question' if follows else 'prompt'} is empty; give at least one token")
    bad = [i for i in ids if not 0 <= i < params.config.vocab_size]
    if bad:
        raise ValueError(f"token id {bad[0]} is outside this model's vocabulary of {params.config.vocab_size}")
    return ids


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:60]}{'…' if len(text) > 60 else ''} ({type(value).__name__})"
