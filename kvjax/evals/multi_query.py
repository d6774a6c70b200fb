"""Many questions of one context, in the style of SCBench (Li et al. 2025, "SCBench: A KV Cache-Centric Analysis of Long-Context Methods")."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import AliasChoices, BaseModel, Field

from kvjax._util import json_lines
from kvjax._util.json_lines import Listed

from .longbench import metrics
from .ruler.scoring import match_all, match_part
from .task import Example, Format, History

ScoreBy = Literal["any", "all", "number", "f1"]


@dataclasses.dataclass(frozen=True)
class MultiQuery:
    """A context is prefilled and compressed once, before its questions are known; then they are asked one after the other.

    Reads SCBench's files of key-value retrieval, variable tracking, passkeys, many-shot learning and English questions. SCBench's own
    runner puts an instruction before each context. SCBench's summaries, multiple choices and code, which have other metrics, are not
    supported.

    Attributes:
        file: JSON lines, or one list, of rows with `context` and `multi_turns`, a list of `input` and `answer` (one, or a list of them).
        history: what a question follows: the previous question with its "reference" answer, SCBench's default, or with the model's "own"; or
            only the context ("none"), which is SCBench's shared context of several requests.
        score_by: "any": whether a reference answer is in the answer, ignoring case; "all": the share of reference answers that are in it;
            "number": whether the answer's first whole number is the reference; "f1": the best F1 of words.
        samples: number of contexts, from the start of the file; None for all.
        turns: number of questions of each; None for all.
        max_new_tokens: of an answer.

    Example:
        >>> import json, pathlib, tempfile
        >>> turns = [{"input": "Who calls?", "answer": "Ishmael"}, {"input": "Whom?", "answer": "me"}]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder, "scbench.jsonl")
        ...     _ = file.write_text(json.dumps({"context": "Call me Ishmael.", "multi_turns": turns}))
        ...     examples = kvjax.evals.MultiQuery(str(file)).examples(kvjax.evals.Format(chat.tokenizer))
        >>> [(example.session, example.answers) for example in examples]  # two questions about one context
        [(0, ('Ishmael',)), (0, ('me',))]
    """

    file: str
    history: History = "reference"
    score_by: ScoreBy = "any"
    samples: int | None = None
    turns: int | None = None
    max_new_tokens: int = 150

    def __post_init__(self) -> None:
        if self.history not in get_args(History) or self.score_by not in get_args(ScoreBy):
            raise ValueError(
                f"history={self.history!r}, score_by={self.score_by!r}; give one of {', '.join(get_args(History))}, and one of "
                f"{', '.join(get_args(ScoreBy))}"
            )
        if any(number is not None and number < 1 for number in (self.samples, self.turns, self.max_new_tokens)):
            raise ValueError(
                f"samples={self.samples}, turns={self.turns}, max_new_tokens={self.max_new_tokens}; give 1 or more (the first two "
                "may be None)"
            )

    def check(self) -> None:
        """Read the file, and raise the errors of `examples`."""
        self._rows()

    @property
    def name(self) -> str:
        """multi-query."""
        return "multi-query"

    def examples(self, form: Format) -> Sequence[Example]:
        """One for each question, context by context.

        Raises:
            ValueError: a row of the file has no context, or no questions with answers.
        """
        return [
            Example(
                context=row.context,
                question=f"\n\n{turn.input}",
                answers=turn.answers(),
                max_new_tokens=self.max_new_tokens,
                labels={"turn": at},
                session=i,
                history=self.history,
            )
            for i, row in enumerate(self._rows())
            for at, turn in enumerate(row.multi_turns[: self.turns])
        ]

    def score(self, answer: str, example: Example) -> float:
        """The score that `score_by` names."""
        if self.score_by == "number":
            found = re.search(r"\d+", answer)
            return float(found is not None and found[0] == example.answers[0])
        if self.score_by == "f1":
            return max(metrics.f1(answer, reference) for reference in example.answers)
        return (match_part if self.score_by == "any" else match_all)(answer, example.answers)

    def _rows(self) -> list["_Row"]:
        return json_lines.read_rows(Path(self.file), _Row, self.samples)


_Answer = Annotated[str, Field(min_length=1)] | int | float  # "" would be found in every answer


class _Turn(BaseModel):
    input: str = Field(min_length=1)
    answer: _Answer | Annotated[Listed[_Answer], Field(min_length=1)]

    def answers(self) -> tuple[str, ...]:
        """All reference answers, as text."""
        return tuple(map(str, self.answer if isinstance(self.answer, list) else [self.answer]))


class _Row(BaseModel):
    context: str = Field(validation_alias=AliasChoices("context", "input"), min_length=1)
    multi_turns: Listed[_Turn] = Field(min_length=1)
