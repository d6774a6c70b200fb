"""RULER's question answering (Hsieh et al. 2024, section 3.4): documents that answer a question among many that do not."""

import dataclasses
import random
from functools import cache
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, model_validator

from kvjax._util import user_files
from kvjax._util.json_lines import FormError, Listed, validated
from kvjax.evals.lengths import largest
from kvjax.evals.task import Example, Format

from .base import RulerTask
from .scoring import match_part

_ASKED = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


class Question(NamedTuple):
    """A question, its answers, and indices of the documents that answer it and of those of the same article."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    group: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class QuestionAnswering(RulerTask):
    """Questions from a file. Distracting documents, first from the same article, fill the length.

    Attributes:
        file: `dev-v2.0.json` of SQuAD 2 or `hotpot_dev_distractor_v1.json` of HotpotQA, or files in the same format.

    Example:
        >>> import json, pathlib, tempfile
        >>> asked = {"question": "Who calls?", "answers": [{"text": "Ishmael"}], "id": "1"}
        >>> articles = [{"title": "Moby-Dick", "paragraphs": [{"context": "Call me Ishmael. " * 9, "qas": [asked]}]}]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder, "dev-v2.0.json")
        ...     _ = file.write_text(json.dumps({"data": articles}))
        ...     task = kvjax.evals.ruler.QuestionAnswering(length=2048, samples=1, file=str(file))
        ...     (example,) = task.examples(kvjax.evals.Format(chat.tokenizer))
        >>> example.answers
        ('Ishmael',)
    """

    kind: ClassVar[str] = "qa"

    file: str = ""

    @property
    def name(self) -> str:
        """qa_1 for a file in SQuAD's format, qa_2 for HotpotQA's."""
        return read(self.file)[0]

    def examples(self, form: Format) -> list[Example]:
        """The file's first `samples` questions."""
        questions = read(self.file)[1]
        if self.samples > len(questions):
            raise ValueError(f"samples={self.samples}; {self.file} has {len(questions)} questions that have an answer")
        return list(super().examples(form))

    def example(self, form: Format, index: int, seed: int) -> Example:
        """Question `index` of the file, among as many documents as fit."""
        _, questions, documents = read(self.file)
        asked, rng = questions[index], random.Random(seed)
        related = [at for at in asked.group if at not in asked.documents]
        needed = {*asked.documents, *related}
        related = rng.sample(related, len(related))
        others = rng.sample(range(len(documents)), len(documents))
        ranked = [*asked.documents, *related, *(i for i in others if i not in needed)]
        order = rng.getrandbits(64)

        def build(count: int) -> Example:
            chosen = ranked[:count]
            random.Random(order).shuffle(chosen)
            listed = "\n\n".join(f"Document {i}:\n{documents[at]}" for i, at in enumerate(chosen, 1))
            return Example(
                context=f"{_ASKED}\n\nThe following are given documents.\n\n{listed}\n\n",
                question=f"{_ASKED}\n\nQuestion: {asked.text}",
                answers=asked.answers,
                max_new_tokens=32,
                prefix=" Answer:",
            )

        return largest(build, form, self.length, min_units=len(asked.documents), max_units=len(ranked))

    def score(self, answer: str, example: Example) -> float:
        """1 if the answer contains any of the references, else 0."""
        return match_part(answer, example.answers)


@cache
def read(file: str) -> tuple[str, list[Question], list[str]]:
    """RULER's name of the task that a file is for, its questions that have an answer, and all its documents.

    Raises:
        ValueError: no file is given, or its format is neither SQuAD's nor HotpotQA's.
    """
    if not file:
        raise ValueError("RULER's QA tasks need a file of questions: SQuAD 2 or HotpotQA as JSON (--data FILE)")
    content = user_files.read_bytes(file)
    try:
        kind: Any = _Squad if content.lstrip().startswith(b"{") else Listed[_Entry]
        found = validated(content, kind)
    except FormError as error:
        raise ValueError(f"{file}: neither of SQuAD's form nor of HotpotQA's ({error})") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return ("qa_1", *_squad(found)) if kind is _Squad else ("qa_2", *_hotpot(found))


class _Answer(BaseModel):
    text: str


class _Asked(BaseModel):
    question: str
    answers: Listed[_Answer]
    is_impossible: bool = False

    @model_validator(mode="after")
    def _has_an_answer(self) -> Self:
        if not self.is_impossible and not self.answers:
            raise ValueError("has no answer, and does not say is_impossible")
        return self


class _Paragraph(BaseModel):
    context: str
    qas: Listed[_Asked]


class _Article(BaseModel):
    paragraphs: Listed[_Paragraph]


class _Squad(BaseModel):
    data: Listed[_Article]


class _Entry(BaseModel):
    question: str
    answer: str
    context: Listed[tuple[str, Listed[str]]]


def _squad(file: _Squad) -> tuple[list[Question], list[str]]:
    documents = sorted({paragraph.context for article in file.data for paragraph in article.paragraphs})
    at = {document: i for i, document in enumerate(documents)}
    questions = []
    for article in file.data:
        places = [at[paragraph.context] for paragraph in article.paragraphs]
        group = tuple(dict.fromkeys(places))
        for paragraph, place in zip(article.paragraphs, places, strict=True):
            for asked in paragraph.qas:
                if not asked.is_impossible:
                    answers = tuple(answer.text for answer in asked.answers)
                    questions.append(Question(asked.question, answers, (place,), group))
    return questions, documents


def _hotpot(entries: list[_Entry]) -> tuple[list[Question], list[str]]:
    texts = [[f"{title}\n{''.join(lines)}" for title, lines in entry.context] for entry in entries]
    documents = sorted({text for group in texts for text in group})
    at = {document: i for i, document in enumerate(documents)}
    return [
        Question(entry.question, (entry.answer,), tuple(dict.fromkeys(at[text] for text in group)), ())
        for entry, group in zip(entries, texts, strict=True)
    ], documents
