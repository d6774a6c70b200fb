"""Evaluation tasks: examples that a model answers, and a score for each answer."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from kvjax.conversion import turns
from kvjax.conversion.tokenizer import Tokenizer

History = Literal["reference", "own", "none"]
"""What precedes a session's question: the previous one with its reference answer or the model's own, or nothing."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A context, a question about it, and reference answers.

    Attributes:
        context: text that the cache policy compresses.
        question: text after the context, not empty.
        answers: reference answers.
        max_new_tokens: maximum tokens of the model's answer.
        prefix: beginning of the answer, given to the model.
        stop: strings that end the answer.
        chat: whether chat models get the example in their chat template. Completions (code, few-shot lists) do without.
        choices: classes of a classification task.
        labels: values by which results are broken down, such as a needle's depth.
        session: number of the session. Examples of a session have one context, which is compressed once, and are asked
            in order. None for a separate example.
        history: what precedes the question in a session.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    max_new_tokens: int
    prefix: str = ""
    stop: tuple[str, ...] = ()
    chat: bool = True
    choices: tuple[str, ...] = ()
    labels: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    session: int | None = None
    history: History = "reference"


@dataclasses.dataclass(frozen=True)
class Format:
    """How examples become tokens.

    Attributes:
        tokenizer: the model's tokenizer.
        chat: whether to put examples that allow it in the model's chat template, as one user message.
    """

    tokenizer: Tokenizer
    chat: bool = False

    def encode(self, example: Example) -> tuple[list[int], list[int]]:
        """Return token ids of the part that is compressed, and of the part after it.

        The two parts are tokenised separately, so question-aware and question-agnostic runs see the same tokens. Text
        of the template after the message, and the answer's prefix, belong to the second part.

        Raises:
            ValueError: the model has no chat template, or its template changes the message.
        """
        if not (self.chat and example.chat):
            following = self.tokenizer.encode(example.question + example.prefix, add_special=False)
            return self.tokenizer.encode(example.context), following
        question = example.question.lstrip()
        before = (example.context + example.question).removesuffix(question)
        message = {"role": "user", "content": example.context + example.question}
        with _without_chat():
            context, following = turns.split(self.tokenizer, [message], 0, before, question)
        following += example.prefix.lstrip()
        return self.tokenizer.encode(context, add_special=False), self.tokenizer.encode(following, add_special=False)

    def encode_next(self, example: Example) -> list[int]:
        """Return token ids of a question after the answer to another one: in a chat, as the user's next message.

        Raises:
            ValueError: the model has no chat template, or its template drops earlier answers.
        """
        if not (self.chat and example.chat):
            return self.tokenizer.encode(example.question + example.prefix, add_special=False)
        question = {"role": "user", "content": example.question.strip()}
        messages = [question, {"role": "assistant", "content": "an answer"}, question]
        with _without_chat():
            text = turns.following(self.tokenizer, messages, 1)
        return self.tokenizer.encode(text + example.prefix.lstrip(), add_special=False)

    def count(self, example: Example) -> int:
        """Number of tokens of prompt, question and the longest answer."""
        context, question = self.encode(example)
        return len(context) + len(question) + example.max_new_tokens


@contextlib.contextmanager
def _without_chat() -> Iterator[None]:
    """Context manager that adds the fix to errors of a chat template."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}. Use chat=False.") from error


class Task(Protocol):
    """Examples and their scores. A task is a frozen dataclass whose fields are settings, which result files record."""

    @property
    def name(self) -> str:
        """Name of the task in results."""
        ...

    def examples(self, form: Format) -> Sequence[Example]:
        """All examples, the same on every call."""
        ...

    def score(self, answer: str, example: Example) -> float:
        """Score of an answer, from 0 (wrong) to 1 (right)."""
        ...
