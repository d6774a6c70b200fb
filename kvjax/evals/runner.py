"""Run a task: answer all its examples under a policy, in batches, score the answers, and write them down as they come."""

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt

from kvjax._util import strict_json
from kvjax._util.json_lines import Listed
from kvjax._util.user_files import expanded, opened, size
from kvjax.models import Params
from kvjax.models.sharding import get_mesh, get_shard, mesh_of
from kvjax.policies import Policy, get_policy
from kvjax.runtime.generation import iterate
from kvjax.runtime.mesh import on_mesh

from .plan import Batch, Plan, make_batches
from .report import ResultFile, header, model_fingerprint
from .sessions import Answered, ask
from .task import Example, Format, Task

Progress = Callable[[int, int], None]


class Row(BaseModel):
    """One example in a result file: its score, answer and labels, and its share of the time and bytes of its batch.

    The answer includes the beginning of a thought that the chat template has opened, see `Format.opening`.
    """

    example: NonNegativeInt
    score: float = Field(ge=0, le=1)
    answer: str
    answers: Listed[str]
    labels: dict[str, Any]
    choices: Listed[str] = []
    context_tokens: NonNegativeInt
    question_tokens: NonNegativeInt
    new_tokens: NonNegativeInt
    cache_bytes: NonNegativeFloat
    host_cache_bytes: NonNegativeFloat
    full_cache_bytes: NonNegativeFloat
    prefill_seconds: NonNegativeFloat
    decode_seconds: NonNegativeFloat


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A task's results.

    Attributes:
        header: versions, device, model and all settings of the run.
        rows: one per example, each with the fields of `Row`.

    Example:
        >>> rows = [{"score": 1.0, "labels": {"depth": 0.0}}, {"score": 0.0, "labels": {"depth": 1.0}}]
        >>> kvjax.evals.Evaluation(header={}, rows=rows).score
        0.5
    """

    header: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def score(self) -> float:
        """Mean over all examples."""
        return float(np.mean([row["score"] for row in self.rows]))

    @property
    def standard_error(self) -> float | None:
        """Standard error of `score`, if examples are independent; None for a single example."""
        scores = [row["score"] for row in self.rows]
        return None if len(scores) < 2 else float(np.std(scores, ddof=1) / len(scores) ** 0.5)

    @property
    def cache_bytes(self) -> float:
        """Bytes per example on device and host together, on average."""
        return float(np.mean([row["cache_bytes"] + row["host_cache_bytes"] for row in self.rows]))

    @property
    def full_cache_bytes(self) -> float:
        """Bytes per example that the full cache would hold, on average."""
        return float(np.mean([row["full_cache_bytes"] for row in self.rows]))

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens read and generated after the prompts, per second, without compilation."""
        decoded = sum(row["question_tokens"] + row["new_tokens"] for row in self.rows)
        return decoded / max(sum(row["decode_seconds"] for row in self.rows), 1e-9)

    def by(self, label: str) -> dict[Any, float]:
        """Mean score by the values of a label."""
        groups: dict[Any, list[float]] = {}
        for row in self.rows:
            groups.setdefault(row["labels"].get(label), []).append(row["score"])
        return {value: float(np.mean(scores)) for value, scores in groups.items()}


def evaluate(
    params: Params,
    task: Task,
    policy: str | Policy = "full",
    budget: int | float | None = None,
    *,
    query_aware: bool = False,
    chat: bool | None = None,
    batch: int = 4,
    prefill_block: int | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
    mesh: Mesh | str | None = None,
) -> Evaluation:
    """Have a model answer a task's examples with its cache kept by a policy.

    Args:
        budget: as for `generate`.
        query_aware: whether the policy sees the question when it compresses: context and question are then one prompt. By default the
            context is compressed before the question is known, as a context that serves many questions must be, and the question is
            read token by token afterwards. Not supported for examples of a session.
        chat: whether to use the model's chat template; by default if it has one.
        batch: examples that run together.
        prefill_block: as for `generate`.
        out: a file of JSON lines to write results to, example by example. Examples that it contains already are not run again.
        progress: called with the number of examples done and in all.
        mesh: devices to run over, as for `kvjax.Engine`. Examples that run together are sharded evenly along "data", so `batch` is
            rounded up. The questions of a session are one sequence, which devices along "data" repeat. Bytes are those of one device
            whatever the mesh. Of several processes that share it, all make the same call, and only the first reads and writes `out`.

    Raises:
        ValueError: the model has no tokenizer; `out` has results of another run, or rows that are not of this task; or the task has
            sessions and `query_aware` is set.
        ImportError: a package that the task needs is not installed.
        PolicyError: the policy is unknown or cannot work with this budget.

    Example:
        >>> task = kvjax.evals.NeedleInAHaystack(lengths=(254,), depths=(0.0, 1.0))
        >>> result = kvjax.evals.evaluate(chat, task, "streaming_llm", budget=128)
        >>> len(result.rows), 0 <= result.score <= 1
        (2, True)
    """
    policy = get_policy(policy, budget=budget)
    prepared = prepare(
        params, task, query_aware=query_aware, chat=chat, batch=batch, prefill_block=prefill_block, mesh=mesh
    )
    return prepared.run(policy, out, progress)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A task on one model: its examples, and the batches in which they run under any policy.

    Attributes:
        form: how examples become tokens.
        settings: of the run, as result files record them; without the policy's.
    """

    task: Task
    form: Format
    examples: Sequence[Example]
    plan: Plan
    query_aware: bool
    settings: dict[str, Any]

    def run(
        self,
        policy: Policy,
        out: Path | None = None,
        progress: Progress | None = None,
        only: Collection[int] | None = None,
    ) -> Evaluation:
        """Answer and score the examples under a policy; arguments and errors as for `evaluate`.

        Args:
            only: indices of the examples to answer; None for all.
        """
        wanted = frozenset(range(len(self.examples)) if only is None else only)
        params, mesh = on_mesh(self.plan.params, self.plan.mesh, policy)
        settings = {"policy": described_policy(policy), **self.settings}
        results = ResultFile(out, header(mesh, **settings), Row, _check(self.examples), mesh)
        done = {row["example"] for row in results.rows}
        if progress is not None:
            progress(len(done & wanted), len(wanted))
        for batch in self.plan.batches:
            left = [i for i in batch.examples if i in wanted and i not in done]
            if not left:
                continue
            # A session runs whole, since its questions depend on those before.
            chosen = list(batch.examples) if batch.session else left
            held = self.plan.row_bytes(policy, batch)
            for i, answer in self._answers(params, mesh, policy, batch, chosen):
                if i in left:
                    results.append([self._row(i, answer, held)])
                    done.add(i)
                    if progress is not None:
                        progress(len(done & wanted), len(wanted))
        rows = [row for row in results.rows if row["example"] in wanted]
        return Evaluation(results.header, sorted(rows, key=lambda row: row["example"]))

    def _answers(
        self, params: Params, mesh: Mesh | None, policy: Policy, batch: Batch, chosen: list[int]
    ) -> Iterator[tuple[int, Answered]]:
        """Answers to some examples of a batch, as they come."""
        examples, block = [self.examples[i] for i in chosen], self.plan.block(policy, batch)
        if batch.session:
            yield from zip(chosen, ask(params, policy, self.form, examples, block, mesh), strict=True)
            return
        for at, answer in self._generate(params, mesh, policy, examples, batch.rows, block):
            yield chosen[at], answer

    def _row(self, i: int, answer: Answered, held: dict[str, float]) -> dict[str, Any]:
        """The result of an example."""
        example, reply = self.examples[i], answer.reply
        assert reply.text is not None  # `prepare` refuses models without a tokenizer
        text = self.form.opening(example) + reply.text
        return {
            "example": i,
            "score": self.task.score(text, example),
            "answer": text,
            "answers": list(example.answers),
            "labels": dict(example.labels),
            **({"choices": list(example.choices)} if example.choices else {}),
            "context_tokens": answer.context_tokens,
            "question_tokens": answer.question_tokens,
            "new_tokens": len(reply.tokens),
            **held,
            "prefill_seconds": answer.prefill_seconds,
            "decode_seconds": answer.decode_seconds,
        }

    def _generate(
        self,
        params: Params,
        mesh: Mesh | None,
        policy: Policy,
        examples: Sequence[Example],
        rows: int,
        prefill_block: int | None,
    ) -> Iterator[tuple[int, Answered]]:
        """Answers to examples through `rows` rows, as they finish. Times are what passed since the answer before."""
        pairs = [self.form.encode(example) for example in examples]
        before = 0.0, 0.0
        for i, answer in iterate(
            params,
            [context + question if self.query_aware else context for context, question in pairs],
            policy=policy,
            max_new_tokens=examples[0].max_new_tokens,
            stop=examples[0].stop,
            question=None if self.query_aware else [question for _, question in pairs],
            prefill_block=prefill_block,
            mesh=mesh,
            rows=rows,
        ):
            context, question = pairs[i]
            now = answer.stats.prefill_seconds, answer.stats.decode_seconds
            seconds = now[0] - before[0], now[1] - before[1]
            before = now
            yield i, Answered(answer, len(context), 0 if self.query_aware else len(question), *seconds)


def prepare(
    params: Params,
    task: Task,
    *,
    query_aware: bool = False,
    chat: bool | None = None,
    batch: int = 4,
    prefill_block: int | None = None,
    mesh: Mesh | str | None = None,
) -> Prepared:
    """Make a task's examples and plan their batches, once for all policies; arguments and errors as for `evaluate`."""
    if params.tokenizer is None:
        raise ValueError("this model has no tokenizer, so it cannot be given a task; load one that has")
    if batch < 1:
        raise ValueError(f"batch={batch}; give 1 or more")
    if (check := getattr(task, "check", None)) is not None:  # finds what scoring lacks before a model answers
        check()
    form = Format(params.tokenizer, params.tokenizer.chat_template is not None if chat is None else chat)
    examples = task.examples(form)
    if query_aware and any(example.session is not None for example in examples):
        raise ValueError(
            f"query_aware=True, but {task.name} asks many questions of a context that is compressed once; leave it out"
        )
    over = mesh_of(params) if mesh is None else get_mesh(mesh)
    data = get_shard(over, params.config).data
    batches = make_batches(params.config, form, examples, -(-batch // data) * data, query_aware=query_aware, data=data)
    settings = {
        "task": {"name": task.name, **described(task)},
        "examples": digest([dataclasses.asdict(example) for example in examples]),  # what their files contain
        "model": model_fingerprint(params),
        "query_aware": query_aware,
        "chat": form.chat,
        "batch": batch,
        "batching": "continuous",
    } | ({} if prefill_block is None else {"prefill_block": prefill_block})
    return Prepared(task, form, examples, Plan(params, batches, prefill_block, over), query_aware, settings)


def _check(examples: Sequence[Example]) -> Callable[[dict[str, Any]], str | None]:
    """A check of rows: it returns an error for an unknown example, a second row of an example, or other answers or labels."""
    existing: set[int] = set()

    def wrong(row: dict[str, Any]) -> str | None:
        i = row["example"]
        if i >= len(examples):
            return f"example {i}, but there are {len(examples)}, counted from 0"
        if i in existing:
            return f"example {i} is there twice"
        existing.add(i)
        own = {"answers": list(examples[i].answers), "labels": dict(examples[i].labels)}
        for name, value in strict_json.loads(strict_json.dumps(own)).items():
            if row[name] != value:
                return f"{name} of example {i} are {row[name]!r}, but should be {value!r}"
        return None

    return wrong


def described(settings: Any) -> dict[str, Any]:
    """The fields of a task or policy, as result files record them: long texts as their beginning and a hash."""
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return {name: _short(value) if isinstance(value, str) else value for name, value in fields.items()}


def described_policy(policy: Policy) -> dict[str, Any]:
    """The name and fields of a policy, and hashes of the files that they name, such as profiles."""
    files = dict(_files(policy))
    return {"name": policy.info.name, **described(policy)} | ({"files": files} if files else {})


def _files(value: Any) -> Iterator[tuple[str, str]]:
    """Names and hashes of the files in the fields `profile` and `weights` of a policy and the policies within it."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _files(item)
    elif isinstance(value, Policy):
        for field in dataclasses.fields(value):
            each = getattr(value, field.name)
            if field.name in ("profile", "weights") and isinstance(each, str) and expanded(each).is_file():
                file: Any = opened(each, size(each))
                with file:
                    yield each, f"SHA-256 {hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
            else:
                yield from _files(each)


def digest(content: Any) -> str:
    """The length of a list, and a hash of it."""
    return f"{len(content)}, SHA-256 {hashlib.sha256(strict_json.dumps(content).encode()).hexdigest()[:16]}"


def _short(text: str) -> str:
    if len(text) <= 200:
        return text
    return f"{text[:60]}… ({len(text)} characters, SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"
