"""What an evaluation task is: examples that a model answers, and a score for each answer."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from kvjax.conversion import turns
from kvjax.conversion.tokenizer import Tokenizer

History = Literal["reference", "own", "none"]
"""What a question of a session follows: the one before it and the reference answer to that, or the model's own, or just the context."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A context, a question about it, and what counts as right.

    Attributes:
        context: what the cache policy compresses.
        question: what follows the context; not empty.
        answers: reference answers.
        max_new_tokens: most tokens that the model may answer with.
        prefix: how the answer begins; written for the model.
        stop: strings that end the answer.
        chat: whether a chat model gets this in its chat template; completions (of code, of few-shot lists) go without.
        choices: what there is to choose from, where the task is to classify.
        labels: what results are broken down by, such as a needle's depth.
        session: examples of the same number have one context, which is read and compressed once; then they are asked in their order.
            None for one that is asked by itself.
        history: what it follows there.
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
        tokenizer: the model's own.
        chat: whether examples that allow it are put in the model's chat template, as one user message.
    """

    tokenizer: Tokenizer
    chat: bool = False

    def encode(self, example: Example) -> tuple[list[int], list[int]]:
        """Token ids of what is compressed, and of what follows it.

        The two are tokenised apart, so that a run sees the same tokens whether its policy knows the question or not. What the
        template puts behind the message, and the answer's prefix, belong to what follows.

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
        """Token ids of a question that follows the answer to another one: in a chat, as the user's next message.

        Raises:
            ValueError: the model has no chat template, or its template leaves earlier answers out.
        """
        if not (self.chat and example.chat):
            return self.tokenizer.encode(example.question + example.prefix, add_special=False)
        question = {"role": "user", "content": example.question.strip()}
        messages = [question, {"role": "assistant", "content": "an answer"}, question]
        with _without_chat():
            text = turns.following(self.tokenizer, messages, 1)
        return self.tokenizer.encode(text + example.prefix.lstrip(), add_special=False)

    def count(self, example: Example) -> int:
        """Tokens of the whole: prompt, question and the longest answer."""
        context, question = self.encode(example)
        return len(context) + len(question) + example.max_new_tokens


@contextlib.contextmanager
def _without_chat() -> Iterator[None]:
    """Say how to do without a template that refuses the messages, or leaves one out."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}; use chat=False") from error


class Task(Protocol):
    """Examples and their scores. A task is a frozen dataclass: its fields are its settings, which result files record."""

    @property
    def name(self) -> str:
        """What results call it."""
        ...

    def examples(self, form: Format) -> Sequence[Example]:
        """All examples, the same each time."""
        ...

    def score(self, answer: str, example: Example) -> float:
        """From 0 (wrong) to 1 (right)."""
        ...
