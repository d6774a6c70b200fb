"""Measure policies on a task: one number per policy, with the bytes that its cache held and the speed. Tasks may be named or one's own."""

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jax.sharding import Mesh
from pydantic import BeforeValidator, TypeAdapter

from kvjax.models import Params
from kvjax.models.sharding import get_mesh, mesh_of
from kvjax.policies import Full, Policy
from kvjax.policies.unbound import check_unbound
from kvjax.runtime.mesh import on_mesh
from kvjax.runtime.processes import from_first

from . import fidelity, runner
from .budgets import bytes_held
from .perplexity import Perplexity, stream, streaming, windowed
from .plan import Batch, Plan
from .report import ResultFile, header, model_fingerprint
from .runner import Progress, described, described_policy, digest
from .task import Task
from .tasks import MEASURES, Inputs, make_task, task_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a policy on a task.

    Attributes:
        task, policy: their names.
        metric: what `value` is: "score" (0 to 1), "perplexity", or "output error" of attention.
        value: as measured; in files, NaN is null.
        higher_is_better: whether a larger value is better.
        cache_bytes, full_cache_bytes: bytes per sequence under the policy and in the full cache, on average.
        tokens_per_second: decoding speed without compilation; None if nothing was timed.
        query_aware: whether the policy saw the question when it compressed; None for tasks without questions.
        count: examples, or predicted tokens.
        budget_applies: whether the policy has a budget; policies such as `full` and `kivi` ignore any that is given.
        settings: all hyperparameters of the policy.
        details: more measures, by name.
        standard_error: of `value`, if examples are independent; None for a single example or a text.
    """

    task: str
    policy: str
    metric: str
    value: Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
    higher_is_better: bool
    cache_bytes: float
    full_cache_bytes: float
    tokens_per_second: float | None = None
    query_aware: bool | None = None
    count: int
    settings: dict[str, Any]
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    budget_applies: bool = True
    standard_error: float | None = None

    @classmethod
    def of(cls, task: str, policy: Policy, metric: str, **measured: Any) -> "Outcome":
        """A result with the fields that follow from the policy and the metric."""
        return cls(
            task=task,
            policy=policy.info.name,
            metric=metric,
            higher_is_better=metric == "score",
            settings=described(policy),
            budget_applies=policy.info.takes_budget,
            **measured,
        )


def prepare(
    params: Params,
    task: str | Task,
    inputs: Inputs | None = None,
    *,
    query_aware: bool = False,
    chat: bool | None = None,
    batch: int = 4,
    prefill_block: int | None = None,
    mesh: Mesh | str | None = None,
) -> "TaskMeasure | TextMeasure":
    """Make a task ready for one model, once for all policies: `prepare(...).run(policy)` measures one of them.

    Args:
        task: a name of `task_names()`, or a task of your own.
        inputs: what a named task is made from.
        query_aware, chat, batch, prefill_block: as for `evaluate`.
        mesh: devices to run over, as for `evaluate`. Windows of a text are sharded along "data", too. A text that is streamed, or
            whose attention is compared, is one sequence, which devices along "data" repeat.

    Raises:
        ValueError: the task is unknown or lacks an input, or has no prompt to prefill in blocks.
    """
    if params.tokenizer is None:
        raise ValueError("this model has no tokenizer, so it cannot be given a task; load one that has")
    inputs = Inputs() if inputs is None else inputs
    if isinstance(task, str):
        task = task_name(task)
        if task in MEASURES:
            _check_no_blocks(task, prefill_block)
            return TextMeasure.of(params, task, inputs, mesh)
        task = make_task(task, inputs, params.config.context_length)
    how: dict[str, Any] = {"query_aware": query_aware, "chat": chat, "batch": batch, "prefill_block": prefill_block}
    return TaskMeasure(runner.prepare(params, task, **how, mesh=mesh))


@dataclasses.dataclass(frozen=True)
class TaskMeasure:
    """A task of questions and answers, ready to be run under any policy."""

    prepared: runner.Prepared

    @property
    def plan(self) -> Plan:
        """The task's batches and the sizes of their caches."""
        return self.prepared.plan

    def run(self, policy: Policy, out: Path | None = None, progress: Progress | None = None) -> Outcome:
        """Measure a policy; arguments and errors as for `evaluate`."""
        found = self.prepared.run(policy, out, progress)
        labels = {label for row in found.rows for label in row["labels"]}
        return Outcome.of(
            self.prepared.task.name,
            policy,
            metric="score",
            value=found.score,
            cache_bytes=found.cache_bytes,
            full_cache_bytes=found.full_cache_bytes,
            tokens_per_second=found.decode_tokens_per_second,
            query_aware=self.prepared.query_aware,
            count=len(found.rows),
            details={label: found.by(label) for label in sorted(labels)},
            standard_error=found.standard_error,
        )


@dataclasses.dataclass(frozen=True)
class TextMeasure:
    """Perplexity or fidelity on a text, ready to be measured under any policy.

    Attributes:
        name: of `MEASURES`.
        tokens: of the text.
    """

    name: str
    inputs: Inputs
    tokens: list[int]
    plan: Plan

    @classmethod
    def of(cls, params: Params, name: str, inputs: Inputs, mesh: Mesh | str | None) -> "TextMeasure":
        """Read the text and plan the caches it takes.

        Raises:
            ValueError: there is no text, or it has fewer tokens than were asked for.
        """
        tokens = _tokens(params, inputs, 1024 if name == "fidelity" else None)
        batch = Batch(0, len(tokens) if inputs.window is None else inputs.window)
        if name == "fidelity":
            batch = Batch(len(tokens) - inputs.queries, inputs.queries)
        return cls(
            name, inputs, tokens, Plan(params, (batch,), mesh=mesh_of(params) if mesh is None else get_mesh(mesh))
        )

    def run(self, policy: Policy, out: Path | None = None, progress: Progress | None = None) -> Outcome:
        """Measure a policy. The result file gets one row once the result is known.

        Raises:
            ValueError: `out` is of another run.
            PolicyError: the policy cannot work with this budget.
        """
        settings = {
            "task": {"name": self.name, **dataclasses.asdict(self.inputs)},
            "tokens": digest(self.tokens),
            "model": model_fingerprint(self.plan.params),
            "policy": described_policy(policy),
        }
        existing: list[dict[str, Any]] = []

        def wrong(row: dict[str, Any]) -> str | None:
            existing.append(row)
            asked = {"task": self.name, "policy": policy.info.name}
            other = [f"{field} {row[field]!r}, not {value!r}" for field, value in asked.items() if row[field] != value]
            return other[0] if other else "the result is there twice" if len(existing) > 1 else None

        params, mesh = on_mesh(self.plan.params, self.plan.mesh)
        results = ResultFile(out, header(mesh, **settings), Outcome, wrong, mesh)
        if not results.rows:
            find = self._perplexity if self.name == "perplexity" else self._fidelity
            results.append([dataclasses.asdict(find(params, mesh, policy, out, progress))])
        return TypeAdapter(Outcome).validate_python(results.rows[0])

    def _perplexity(
        self, params: Params, mesh: Mesh | None, policy: Policy, out: Path | None, progress: Progress | None
    ) -> Outcome:
        tokens, window, start = self.tokens, self.inputs.window, time.perf_counter() - stream.compile_seconds
        if window is not None:
            _check_windows(policy)
            found = windowed(params, tokens, window, progress=progress, stride=self.inputs.stride, mesh=mesh)
            found, seconds = Perplexity(found.logprobs, self._full_bytes), None
        else:
            checkpoint = None if out is None else out.with_suffix(".state.npz")
            resumed = checkpoint is not None and from_first(mesh, checkpoint.exists)
            found = streaming(params, tokens, policy, progress=progress, checkpoint=checkpoint, mesh=mesh)
            seconds = None if resumed else time.perf_counter() - stream.compile_seconds - start
        return Outcome.of(
            "perplexity",
            policy,
            metric="perplexity",
            value=found.perplexity,
            cache_bytes=found.cache_bytes,
            full_cache_bytes=self._full_bytes,
            tokens_per_second=None if seconds is None else len(found.logprobs) / seconds,
            count=len(found.logprobs),
            details={"nll": found.nll},
        )

    def _fidelity(
        self, params: Params, mesh: Mesh | None, policy: Policy, out: Path | None, progress: Progress | None
    ) -> Outcome:
        prompt = len(self.tokens) - self.inputs.queries
        (found,) = fidelity.sweep(params, self.tokens, prompt, [policy], progress=progress, mesh=mesh)
        tables = {
            name: np.asarray(getattr(found, name)).tolist() for name in ("recall", "output_error", "cosine", "jaccard")
        }
        return Outcome.of(
            "fidelity",
            policy,
            metric="output error",
            value=found.means()["output_error"],
            cache_bytes=found.cache_bytes,
            full_cache_bytes=self._full_bytes,
            count=self.inputs.queries,
            details={"means": found.means(), "by_layer": tables},
        )

    @property
    def _full_bytes(self) -> int:
        (batch,), params = self.plan.batches, self.plan.params
        return bytes_held(Full(), params.config, batch.prompt, batch.new_tokens, params.dtype)


def check(
    task: str | Task,
    inputs: Inputs,
    policies: Sequence[Policy] = (),
    prefill_block: int | None = None,
    *,
    over_mesh: bool = False,
) -> None:
    """Raise the errors of `prepare` and `run` that can be found before a model is loaded.

    Raises:
        ValueError: the task is unknown, or an input is missing, damaged or out of range.
        PolicyError: a policy cannot work with its budget, or not at the given lengths, in blocks or over a mesh.
        ImportError: a package that the task needs is not installed.
        OSError: a file cannot be read.
    """
    task = task_name(task) if isinstance(task, str) else task
    for policy in policies:
        policy.validate(max(inputs.lengths or (1 << 30,)))  # a budget too small for any text, or for this one
        check_unbound(policy, prefill_block, over_mesh=over_mesh)
    if not isinstance(task, str):
        return
    if task not in MEASURES:
        make_task(task, inputs, window=1 << 30).check()
        return
    _check_no_blocks(task, prefill_block)
    if inputs.read_text() is None:
        raise ValueError(_NO_TEXT)
    length = inputs.length(1 << 30)
    if task == "fidelity" and length <= inputs.queries:
        raise ValueError(
            f"length={length}; fidelity compares the last {inputs.queries} tokens, and needs some before them"
        )
    if length < 2:
        raise ValueError(f"length={length}: a text of so few tokens has nothing to predict; give 2 or more")
    if task == "perplexity" and inputs.window is not None:
        for policy in policies:
            _check_windows(policy)
        if not (inputs.stride or inputs.window) <= inputs.window <= length:
            raise ValueError(
                f"window={inputs.window}, stride={inputs.stride}, length={length}; give a window of up to the length, and a "
                "stride of up to the window"
            )
    elif inputs.stride is not None:
        raise ValueError(f"stride={inputs.stride} without a window; give both, or neither to stream")


def _check_no_blocks(name: str, prefill_block: int | None) -> None:
    if prefill_block is not None:
        raise ValueError(f"prefill_block={prefill_block}, but {name} has no prompt to prefill in blocks; leave it out")


_NO_TEXT = "no text to read; give it as --text FILE"


def _check_windows(policy: Policy) -> None:
    if policy != Full():
        raise ValueError(
            f"windows are read with the full cache, not {policy.info.name}; leave out the window to stream"
        )


def _tokens(params: Params, inputs: Inputs, default: int | None) -> list[int]:
    text, length = inputs.read_text(), inputs.length(default or 0)
    if text is None:
        raise ValueError(_NO_TEXT)
    tokens = params.tokenizer.encode(text)
    if length > len(tokens):
        raise ValueError(f"{inputs.text} has {len(tokens)} tokens, fewer than the length {length}; give a longer text")
    return tokens[: length or None]
