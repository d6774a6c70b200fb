"""Run a task: answers to all its examples under a policy, in batches, scored, and written down as they come."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt

from kvjax._util import strict_json
from kvjax._util.json_lines import Listed
from kvjax.cache import bucket
from kvjax.models import Params
from kvjax.models.sharding import get_shard
from kvjax.policies import Policy, get_policy
from kvjax.runtime.generation import generate
from kvjax.runtime.mesh import on_mesh

from . import sessions
from .budgets import row_bytes
from .report import ResultFile, header, model_fingerprint
from .task import Example, Format, Task


class Row(BaseModel):
    """What a result file has of one example: its score, answer and labels, and its share of what its batch took."""

    example: NonNegativeInt
    score: float = Field(ge=0, le=1)
    answer: str
    answers: Listed[str]
    labels: dict[str, Any]
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
    """

    header: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def score(self) -> float:
        """Mean over all examples."""
        return float(np.mean([row["score"] for row in self.rows]))

    @property
    def cache_bytes(self) -> float:
        """Bytes held per example, on average, on device and host together."""
        return float(np.mean([row["cache_bytes"] + row["host_cache_bytes"] for row in self.rows]))

    @property
    def full_cache_bytes(self) -> float:
        """Bytes that the full cache would have held."""
        return float(np.mean([row["full_cache_bytes"] for row in self.rows]))

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens read and sampled after the prompts, over the time that took, compilation left out."""
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
    progress: Callable[[int, int], None] | None = None,
    mesh: Mesh | str | None = None,
) -> Evaluation:
    """Have a model answer a task's examples with its cache kept by a policy.

    Args:
        budget: as for `generate`.
        query_aware: whether the policy compresses context and question together, so that the question is what its observation
            window sees. By default the context is compressed before its question is known, as one that many questions are asked
            of has to be; the question is then read token by token. Not for examples of a session.
        chat: put examples in the model's chat template; by default if it has one.
        batch: examples that run together.
        prefill_block: as for `generate`.
        out: a file of JSON lines to write results to, example by example; those it has already are not run again.
        progress: called with examples done and in all.
        mesh: devices to run over, as for `kvjax.Engine`. Of examples that run together those along "data" have as many each, so that `batch` is
            rounded up. Questions of one context are one row, which they all do. Bytes are those of one device whatever the mesh.
            Where several processes share it, all make the same call, and only the first reads and writes `out`.

    Raises:
        ValueError: the model has no tokenizer, or `out` holds results of another run, or rows that are not of this task; or the
            task's questions share contexts, and are to be known.
        PolicyError: the policy is unknown or cannot work with this budget.
    """
    if params.tokenizer is None:
        raise ValueError("this model has no tokenizer, so it cannot be given a task; load one that has")
    if batch < 1:
        raise ValueError(f"batch={batch}; give 1 or more")
    form = Format(params.tokenizer, params.tokenizer.chat_template is not None if chat is None else chat)
    policy = get_policy(policy, budget=budget)
    settings = {
        "task": {"name": task.name, **described(task)},
        "model": model_fingerprint(params),
        "policy": {"name": policy.info.name, **described(policy)},
        "query_aware": query_aware,
        "chat": form.chat,
        "batch": batch,
    } | ({} if prefill_block is None else {"prefill_block": prefill_block})
    examples = task.examples(form)
    if query_aware and any(example.session is not None for example in examples):
        raise ValueError(
            f"query_aware=True, but {task.name} asks many questions of a context that is compressed once; leave it out"
        )
    params, mesh = on_mesh(params, mesh, policy)
    results = ResultFile(out, header(mesh, **settings), Row, _belongs(examples), mesh)
    done = {row["example"] for row in results.rows}
    if progress is not None:
        progress(len(done), len(examples))
    data = get_shard(mesh, params.config).data
    for planned, rows in _batches(form, examples, -(-batch // data) * data, data):
        left = [i for i in planned if i not in done]
        if left and examples[left[0]].session is not None:
            found = _run_session(params, task, policy, form, examples, planned, prefill_block, mesh)
            results.append([row for row in found if row["example"] in left])
        elif left:
            results.append(_run(params, task, policy, form, query_aware, examples, left, rows, prefill_block, mesh))
        if left:
            done |= set(left)
            if progress is not None:
                progress(len(done), len(examples))
    return Evaluation(results.header, sorted(results.rows, key=lambda row: row["example"]))


def _belongs(examples: Sequence[Example]) -> Callable[[dict[str, Any]], str | None]:
    """What says why a row is none of these examples', or is there twice."""
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
    """The fields of a task or policy that make it what it is; of a long text, its beginning and its hash."""
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return {name: _short(value) if isinstance(value, str) else value for name, value in fields.items()}


def _short(text: str) -> str:
    if len(text) <= 200:
        return text
    return f"{text[:60]}… ({len(text)} characters, SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _batches(form: Format, examples: Sequence[Example], size: int, data: int) -> list[tuple[list[int], int]]:
    """Examples of like lengths that run together, and the rows of the compiled program that runs them; those of a session by themselves.

    Rows are a multiple of `data`.
    """
    groups: dict[Any, list[int]] = {}
    together: dict[int, list[int]] = {}
    for i, example in enumerate(examples):
        if example.session is not None:
            together.setdefault(example.session, []).append(i)
            continue
        context, question = form.encode(example)
        key = bucket(len(context)), bucket(len(question)), example.max_new_tokens, example.stop
        groups.setdefault(key, []).append(i)
    batches = [
        (group[at : at + size], min(size, -(-len(group) // data) * data))
        for group in groups.values()
        for at in range(0, len(group), size)
    ]
    return batches + [(group, 1) for group in together.values()]


def _run(
    params: Params,
    task: Task,
    policy: Policy,
    form: Format,
    query_aware: bool,
    examples: Sequence[Example],
    batch: Sequence[int],
    size: int,
    prefill_block: int | None,
    mesh: Mesh | None,
) -> list[dict[str, Any]]:
    """Answers of one batch, filled up to `size` rows so that all batches of like lengths share one compiled program."""
    padded = [*batch, *[batch[-1]] * (size - len(batch))]
    pairs = [form.encode(examples[i]) for i in padded]
    first = examples[batch[0]]
    answers = generate(
        params,
        [context + question if query_aware else context for context, question in pairs],
        policy=policy,
        max_new_tokens=first.max_new_tokens,
        stop=first.stop,
        question=None if query_aware else [question for _, question in pairs],
        prefill_block=prefill_block,
        mesh=mesh,
    )
    rows, on_one_device = [], {}
    if mesh is not None:
        sizes = _sizes(pairs, query_aware, first.max_new_tokens)
        on_one_device = row_bytes(policy, params.config, *sizes, params.dtype, answers[0].stats.prefill_block)
    for i, (context, question), answer in zip(batch, pairs, answers, strict=False):
        example, stats = examples[i], answer.stats
        assert answer.text is not None  # tasks are asked of models with tokenizers
        shares = ("cache_bytes", "host_cache_bytes", "full_cache_bytes", "prefill_seconds", "decode_seconds")
        rows.append(
            {
                "example": i,
                "score": task.score(answer.text, example),
                "answer": answer.text,
                "answers": list(example.answers),
                "labels": dict(example.labels),
                "context_tokens": len(context),
                "question_tokens": 0 if query_aware else len(question),
                "new_tokens": len(answer.tokens),
                **{name: getattr(stats, name) / stats.rows for name in shares},
                **on_one_device,
            }
        )
    return rows


def _sizes(pairs: Sequence[tuple[list[int], list[int]]], query_aware: bool, new_tokens: int) -> tuple[int, int]:
    """Tokens of the longest prompt of a batch, and the most that follow one."""
    contexts, questions = ([len(pair[i]) for pair in pairs] for i in range(2))
    if query_aware:
        return max(map(sum, zip(contexts, questions, strict=True))), new_tokens
    return max(contexts), max(questions) + new_tokens


def _run_session(
    params: Params,
    task: Task,
    policy: Policy,
    form: Format,
    examples: Sequence[Example],
    group: Sequence[int],
    prefill_block: int | None,
    mesh: Mesh | None,
) -> list[dict[str, Any]]:
    """Answers to the questions of one context."""
    rows = []
    replies = sessions.ask(params, policy, form, [examples[i] for i in group], prefill_block, mesh)
    for i, asked in zip(group, replies, strict=True):
        example, reply = examples[i], asked.reply
        assert reply.text is not None
        took = {field.name: getattr(asked, field.name) for field in dataclasses.fields(asked) if field.name != "reply"}
        rows.append(
            {
                "example": i,
                "score": task.score(reply.text, example),
                "answer": reply.text,
                "answers": list(example.answers),
                "labels": dict(example.labels),
                "new_tokens": len(reply.tokens),
                **took,
            }
        )
    return rows
