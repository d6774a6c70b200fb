"""Evaluation tasks: examples that a model answers, and a score for each answer."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from kvjax.conversion import turns
from kvjax.conversion.tokenizer import Tokenizer

History = Literal["reference", "own", "none"]
"""What a question of a session follows: the previous question with its reference answer or the model's own, or only the context."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A context, a question about it, and the correct answers.

    Attributes:
        context: the text that the cache policy compresses.
        question: the text after the context; not empty.
        answers: reference answers.
        max_new_tokens: maximum number of tokens of an answer.
        prefix: the beginning of the answer, which the model is given.
        stop: strings that end the answer.
        chat: whether chat models get this example in their chat template; False for completions, such as code and few-shot lists.
        choices: the classes of a classification task.
        labels: values to break results down by, such as a needle's depth.
        session: examples with the same number share one context, which is prefilled and compressed once; they are asked in order.
            None for an example that is asked alone.
        history: what the question follows in its session.

    Example:
        >>> example = kvjax.evals.Example("The key is 417. ", "Which key?", answers=("417",), max_new_tokens=8)
        >>> example.context, example.answers
        ('The key is 417. ', ('417',))
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

    Example:
        >>> example = kvjax.evals.Example("The key is 417.", " Which?", answers=("417",), max_new_tokens=8)
        >>> context, question = kvjax.evals.Format(chat.tokenizer).encode(example)
        >>> len(context), len(question)  # tokens
        (15, 7)
    """

    tokenizer: Tokenizer
    chat: bool = False

    def encode(self, example: Example) -> tuple[list[int], list[int]]:
        """Token ids of the context, which is compressed, and of the rest.

        The two are tokenised separately, so a run sees the same tokens whether it is question-aware or not. The rest includes the end of
        the chat template and the answer's prefix.

        Raises:
            ValueError: the model has no chat template, or its template modifies the message.
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

    def opening(self, example: Example) -> str:
        """The beginning of a thought with which the chat template ends the prompt, such as "<think>"; empty if there is none.

        The model's answer then lacks this tag, so results and scores have it in front of the answer.
        """
        if not (self.chat and example.chat):
            return ""
        following = self.tokenizer.decode(self.encode(example)[1], skip_special=False)
        opened = following.removesuffix(example.prefix.lstrip()).rpartition("<think>")
        return "".join(opened[1:]) if opened[1] and not opened[2].strip() else ""

    def encode_next(self, example: Example) -> list[int]:
        """Token ids of a question that follows the previous question's answer: in a chat, as the user's next message.

        Raises:
            ValueError: the model has no chat template, or its template omits earlier answers.
        """
        if not (self.chat and example.chat):
            return self.tokenizer.encode(example.question + example.prefix, add_special=False)
        question = {"role": "user", "content": example.question.strip()}
        messages = [question, {"role": "assistant", "content": "an answer"}, question]
        with _without_chat():
            text = turns.following(self.tokenizer, messages, 1)
        return self.tokenizer.encode(text + example.prefix.lstrip(), add_special=False)

    def count(self, example: Example) -> int:
        """Number of tokens of context, question and the longest answer."""
        context, question = self.encode(example)
        return len(context) + len(question) + example.max_new_tokens


@contextlib.contextmanager
def _without_chat() -> Iterator[None]:
    """Add to the errors of a chat template how to do without it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}; use chat=False") from error


class Task(Protocol):
    """Examples and their scores. A task is a frozen dataclass whose fields are its settings, which result files record.

    If a task has a method `check()`, it is called before a model answers. It raises the errors that `examples` or `score`
    would raise later, such as that of a missing package.

    Example:
        >>> task = kvjax.evals.NeedleInAHaystack(lengths=(254,), depths=(0.0, 1.0))
        >>> [example.labels for example in task.examples(kvjax.evals.Format(chat.tokenizer))]
        [{'length': 254, 'depth': 0.0, 'kind': 'number'}, {'length': 254, 'depth': 1.0, 'kind': 'number'}]
    """

    @property
    def name(self) -> str:
        """The name in results."""
        ...

    def examples(self, form: Format) -> Sequence[Example]:
        """All examples; deterministic."""
        ...

    def score(self, answer: str, example: Example) -> float:
        """The score of an answer, from 0 (wrong) to 1 (right)."""
        ...
