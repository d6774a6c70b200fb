"""Recommend a policy for a text or task of one's own: measure a short list by successive halving within a memory limit."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jax.sharding import Mesh
from pydantic import BaseModel, NonNegativeInt

from kvjax._util import strict_json
from kvjax.models import Params
from kvjax.models.sharding import get_mesh, mesh_of
from kvjax.policies import Full, Policy, PolicyError, get_policy
from kvjax.policies.unbound import check_unbound
from kvjax.runtime.mesh import on_mesh
from kvjax.runtime.processes import is_first

from . import runner
from .budgets import matched
from .following import following
from .halving import Halving, halve, round_sizes
from .intervals import mean_interval
from .plan import Batch, Plan
from .report import ResultFile, header, model_fingerprint, name_part, write
from .runner import described, described_policy, digest
from .task import Task
from .tasks import MEASURES, Inputs, make_task, task_name

AGNOSTIC = ("keydiff", "compactor", "kvzip", "lagkv", "turboquant")
"""Policies that are measured for prompts that are compressed before a question is known: the best of the leaderboard."""

AWARE = ("snapkv", "chunkkv", "adakv", "tova", "turboquant")
"""Policies that are measured for prompts that end with their question."""

DECODING = ("rkv", "tova", "h2o", "treekv", "recompress(snapkv)")
"""Policies that are measured for long answers. They evict generated tokens as well."""

SAMPLES = 32
"""Windows of a text, if it is long enough."""

PROMPT, CONTINUATION = 768, 64
"""Tokens of a text's window that are compressed, and that are predicted afterwards. While decoding it is the reverse."""

SLACK = 0.02
"""Relative number of bytes by which a policy may exceed the limit, as slots are rounded."""

Report = Callable[[str], Callable[[int, int], None] | None]


@dataclasses.dataclass(frozen=True)
class Contender:
    """A policy that was measured.

    Attributes:
        policy: with its budget in tokens.
        target: share of the full cache's bytes for which the budget was chosen; None for a policy without a budget.
        cache_bytes, full_cache_bytes: bytes per sequence under the policy and in the full cache, on average.
        scores: of the first examples, as many as it was measured on. Higher is better.

    Example:
        >>> from kvjax.evals.recommend import Contender
        >>> contender = Contender(kvjax.SnapKV(budget=64), 0.25, 1e6, 4e6, scores=(1.0, 0.0, 1.0, 1.0))
        >>> contender.score
        0.75
    """

    policy: Policy
    target: float | None
    cache_bytes: float
    full_cache_bytes: float
    scores: tuple[float, ...] = ()

    @property
    def share(self) -> float:
        """The bytes that the policy holds, as a share of the full cache's."""
        return self.cache_bytes / self.full_cache_bytes

    @property
    def score(self) -> float:
        """Mean score."""
        return float(np.mean(self.scores))

    @property
    def interval(self) -> float:
        """Half the width of the 95 % interval of the mean score."""
        return mean_interval(self.scores)[1]

    def above(self, other: "Contender") -> tuple[float, float]:
        """Mean difference of the scores to those of another contender on the same examples, and half its 95 % interval."""
        count = min(len(self.scores), len(other.scores))
        return mean_interval(np.subtract(self.scores[:count], other.scores[:count]))


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """What was measured, and what follows.

    Attributes:
        task: name of the task, or "text".
        metric: what scores are.
        limit: share of the full cache's bytes that a policy may hold.
        contenders: best first. The finalists, which come first, were measured on all examples.
        full: the full cache, on all examples.
        excluded: policies that were not measured, and the reasons.

    Example:
        >>> from kvjax.evals.recommend import Contender, Recommendation
        >>> best = Contender(kvjax.SnapKV(budget=64), 0.25, 1e6, 4e6, scores=(0.5, 0.6, 0.4, 0.5))
        >>> full = Contender(kvjax.Full(), None, 4e6, 4e6, scores=(0.5, 0.5, 0.5, 0.5))
        >>> print(Recommendation("needle", "score", 0.25, (best,), full, {}).verdict())
        Use snapkv:budget=64: 0.500 ± 0.130 with 25.0 % of the full cache's bytes (n = 4).
        No significant difference between snapkv:budget=64 and the full cache (difference +0.000 ± 0.130).
    """

    task: str
    metric: str
    limit: float
    contenders: tuple[Contender, ...]
    full: Contender
    excluded: Mapping[str, str]

    @property
    def best(self) -> Contender:
        """The finalist with the highest mean score."""
        return self.contenders[0]

    @property
    def equals(self) -> tuple[Contender, ...]:
        """Finalists whose scores do not differ significantly from those of the best one, by their paired 95 % interval."""
        finalists = [each for each in self.contenders[1:] if len(each.scores) == len(self.best.scores)]
        return tuple(each for each in finalists if not _is_significant(*self.best.above(each)))

    def verdict(self) -> str:
        """The recommendation in a few sentences."""
        best, count = self.best, len(self.best.scores)
        lines = [f"Use {_described(best)} (n = {count})."]
        if self.equals:
            lines = [
                f"No significant difference between {best.policy} and {other.policy} "
                f"({_difference(*best.above(other))}, n = {count})."
                for other in self.equals
            ]
            lines += [f"{_described(each)}." for each in (best, *self.equals)]
        elif len(self.contenders) > 1 and len(self.contenders[1].scores) == count:
            other = self.contenders[1]
            lines.append(f"It is better than {other.policy} ({_difference(*best.above(other))}).")
        loss = best.above(self.full)
        beside = "A significant" if _is_significant(*loss) else "No significant"
        lines.append(f"{beside} difference between {best.policy} and the full cache ({_difference(*loss)}).")
        return "\n".join(lines)

    def rows(self) -> list[dict[str, Any]]:
        """One row per contender, and the full cache, with the fields that `kvjax.plots.tradeoff` draws."""
        return [
            {
                "task": self.task,
                "policy": each.policy.info.name,
                "settings": described(each.policy),
                "target": each.target,
                "metric": self.metric,
                "value": each.score,
                "interval": each.interval,
                "standard_error": None,
                "higher_is_better": True,
                "count": len(each.scores),
                "cache_bytes": each.cache_bytes,
                "full_cache_bytes": each.full_cache_bytes,
                "tokens_per_second": None,
            }
            for each in (self.full, *self.contenders)
        ]


def recommend(
    params: Params,
    task: str | Task | None = None,
    inputs: Inputs | None = None,
    *,
    ratio: float | None = None,
    memory: int | None = None,
    policies: Sequence[str | Policy] | None = None,
    decoding: bool = False,
    query_aware: bool = False,
    out: Path | None = None,
    chat: bool | None = None,
    batch: int = 4,
    prefill_block: int | None = None,
    report: Report | None = None,
    mesh: Mesh | str | None = None,
) -> Recommendation:
    """Find the policy that loses least within a memory limit, on a text or task of one's own.

    Each policy of the list gets the budget at which it holds the limit, and the one at which it holds half of it.
    Successive halving measures all of them on a few examples, the better half on twice as many, and the best two on all
    examples. The result compares those two, and the best with the full cache, by paired 95 % intervals.

    Args:
        params: the model, with a tokenizer.
        task: a name of `kvjax.evals.tasks.task_names()`, or a task of your own. None measures `inputs.text`: the mean
            log-probability of a continuation's tokens after a compressed context, in windows of `inputs.lengths`.
        inputs: what a named task is made from, or the text.
        ratio: share of the full cache's bytes that the cache may hold, above 0 and below 1.
        memory: bytes that the cache of one sequence may hold, in place of `ratio`.
        policies: the list. By default `AGNOSTIC`, `AWARE` with `query_aware`, or `DECODING` with `decoding`.
        decoding: whether answers are long, so that generated tokens must be evicted. Prompts contain their question then.
        query_aware: whether the policy sees the question when it compresses.
        out: folder for one result file per policy, from which an interrupted run resumes, and `recommendation.json`.
        chat, batch, prefill_block, mesh: as for `kvjax.evals.evaluate`.
        report: called before each policy with a line that names it; what it returns is called with the progress.

    Raises:
        ValueError: not exactly one of `ratio` and `memory` is given, the limit is not below the full cache, the text is
            too short, or as `kvjax.evals.evaluate`.
        PolicyError: a policy is unknown, or none can hold so little.

    Example:
        >>> from kvjax.evals.recommend import recommend
        >>> task = kvjax.evals.NeedleInAHaystack(lengths=(254,), depths=(0.5,))
        >>> found = recommend(chat, task, ratio=0.5, policies=["streaming_llm"])
        >>> [str(each.policy) for each in found.contenders]  # at half and at a quarter of the bytes
        ['streaming_llm:budget=127', 'streaming_llm:budget=63']
    """
    if (ratio is None) == (memory is None):
        raise ValueError("give the limit as either ratio or memory")
    chosen = [get_policy(each) for each in policies or (DECODING if decoding else AWARE if query_aware else AGNOSTIC)]
    for policy in chosen:
        check_unbound(policy, prefill_block, over_mesh=mesh is not None)
    params, over = on_mesh(params, mesh)
    how: dict[str, Any] = {"chat": chat, "batch": batch, "prefill_block": prefill_block, "mesh": over}
    inputs = Inputs() if inputs is None else inputs
    measure: _Measure
    if task is None:
        if query_aware:
            raise ValueError("query_aware=True needs a task with questions; a text has none")
        measure = _Text.of(params, inputs, decoding, batch, over)
    else:
        measure = _Answers.of(params, task, inputs, query_aware=query_aware or decoding, **how)
    full_bytes = measure.plan.bytes_held(Full())
    limit = memory / full_bytes if ratio is None and memory is not None else ratio or 0.0
    if not 0 < limit < 1:
        raise ValueError(
            f"the limit is {100 * limit:.1f} % of the full cache's {full_bytes:,.0f} bytes per sequence; give one above 0 and "
            "below 100 %. The full cache needs no policy"
        )
    candidates, excluded = shortlist(chosen, measure.plan, full_bytes, limit)
    if not candidates:
        raise PolicyError(
            f"no policy can hold {100 * limit:.1f} % of the full cache's bytes: "
            f"{'; '.join(f'{name} {reason}' for name, reason in excluded.items())}. Raise the limit, or give other policies"
        )

    def scores(policy: Policy, count: int) -> Sequence[float]:
        progress = None if report is None else report(f"{policy} · {count} of {measure.count}")
        return measure.scores(policy, count, None if out is None else out / f"{name_part(str(policy))}.jsonl", progress)

    sizes = round_sizes(len(candidates), measure.count, least=batch)
    halving: Halving[Policy] = halve([each.policy for each in candidates], scores, sizes)
    by_policy = {each.policy: each for each in candidates}
    full = Contender(Full(), None, full_bytes, full_bytes, tuple(scores(Full(), measure.count)))
    found = Recommendation(
        task=measure.name,
        metric=measure.metric,
        limit=limit,
        contenders=tuple(
            dataclasses.replace(by_policy[policy], scores=halving.scores[policy]) for policy in halving.order
        ),
        full=full,
        excluded=excluded,
    )
    if out is not None:
        # The fingerprint gathers weights from all processes.
        content = {"header": header(over, model=model_fingerprint(params), limit=limit), "rows": found.rows()}
        if is_first(over):
            content |= {"excluded": dict(excluded), "verdict": found.verdict()}
            write(out / "recommendation.json", strict_json.dumps(content, indent=1) + "\n")
    return found


def shortlist(
    policies: Sequence[Policy], plan: Plan, full_bytes: float, limit: float
) -> tuple[list[Contender], dict[str, str]]:
    """Policies at budgets at which they hold the limit, and half of it, without scores; and those that cannot, with the reasons.

    Example:
        >>> from kvjax.evals.plan import Batch, Plan
        >>> from kvjax.evals.recommend import shortlist
        >>> plan = Plan(params, (Batch(prompt=192, new_tokens=32),))
        >>> full_bytes = plan.bytes_held(kvjax.Full())
        >>> found, excluded = shortlist([kvjax.StreamingLLM(), kvjax.Quest()], plan, full_bytes, limit=0.5)
        >>> [str(each.policy) for each in found], list(excluded)
        (['streaming_llm:budget=95', 'streaming_llm:budget=31'], ['quest'])
    """
    found: dict[Policy, Contender] = {}
    excluded: dict[str, str] = {}
    for policy in policies:
        for target in (limit, limit / 2):
            try:
                fitted = matched(policy, target * full_bytes, plan)
                held = plan.bytes_held(fitted)
            except PolicyError as error:
                excluded[str(policy)] = f"cannot run: {error}"
                break
            is_fitting = held <= target * full_bytes * (1 + SLACK)
            if not hasattr(policy, "budget"):
                if held <= limit * full_bytes * (1 + SLACK):
                    found.setdefault(fitted, Contender(fitted, None, held, full_bytes))
                else:
                    excluded[str(policy)] = f"holds {100 * held / full_bytes:.1f} %"
                break
            if is_fitting:
                found.setdefault(fitted, Contender(fitted, target, held, full_bytes))
            elif target == limit:
                excluded[str(policy)] = f"needs at least {100 * held / full_bytes:.1f} %"
                break
    return list(found.values()), excluded


class _Measure(Protocol):
    """Scores of examples under any policy, in an order that does not depend on it."""

    @property
    def name(self) -> str: ...

    @property
    def metric(self) -> str: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def count(self) -> int: ...

    def scores(
        self, policy: Policy, count: int, out: Path | None, progress: Callable[[int, int], None] | None
    ) -> list[float]: ...


@dataclasses.dataclass(frozen=True)
class _Answers:
    """Answers to the examples of a task. The questions of a session have one score, their mean."""

    prepared: runner.Prepared
    units: tuple[tuple[int, ...], ...]

    metric = "score"

    @classmethod
    def of(cls, params: Params, task: str | Task, inputs: Inputs, **how: Any) -> "_Answers":
        if isinstance(task, str):
            name = task_name(task)
            if name in MEASURES:
                raise ValueError(f"{name} has no examples to compare; leave the task out to measure a text")
            task = make_task(name, inputs, params.config.context_length)
        prepared = runner.prepare(params, task, **how)
        sessions: dict[Any, list[int]] = {}
        for i, example in enumerate(prepared.examples):
            sessions.setdefault(("alone", i) if example.session is None else example.session, []).append(i)
        units = [tuple(group) for group in sessions.values()]
        order = np.random.default_rng(inputs.seed).permutation(
            len(units)
        )  # tasks sort their examples, such as by depth
        return cls(prepared, tuple(units[i] for i in order))

    @property
    def name(self) -> str:
        return self.prepared.task.name

    @property
    def plan(self) -> Plan:
        return self.prepared.plan

    @property
    def count(self) -> int:
        return len(self.units)

    def scores(
        self, policy: Policy, count: int, out: Path | None, progress: Callable[[int, int], None] | None
    ) -> list[float]:
        units = self.units[:count]
        found = self.prepared.run(policy, out, progress, only=[i for unit in units for i in unit])
        by_example = {row["example"]: row["score"] for row in found.rows}
        return [float(np.mean([by_example[i] for i in unit])) for unit in units]


class _Row(BaseModel):
    """A window of a text in a result file."""

    example: NonNegativeInt
    score: float


@dataclasses.dataclass(frozen=True)
class _Text:
    """Continuations of a text's windows, each predicted from what a policy kept of the tokens before it."""

    pairs: tuple[tuple[list[int], list[int]], ...]
    plan: Plan
    batch: int
    settings: Mapping[str, Any]

    name, metric = "text", "log-probability per token"

    @classmethod
    def of(cls, params: Params, inputs: Inputs, decoding: bool, batch: int, mesh: Mesh | None) -> "_Text":
        text = inputs.read_text()
        if params.tokenizer is None or text is None:
            raise ValueError("no task and no text to measure; give a task, or a text and a model with a tokenizer")
        length = inputs.length(PROMPT + CONTINUATION)
        following = PROMPT if decoding else CONTINUATION
        following = following * length // (PROMPT + CONTINUATION)
        tokens = params.tokenizer.encode(text)
        count = min(len(tokens) // length, inputs.samples or SAMPLES)
        if count < 2 or not 0 < following < length:
            raise ValueError(
                f"the text has {len(tokens)} tokens, which is less than two windows of {length}; give a longer text or a "
                "smaller length"
            )
        # Spread over the text, as neighbouring windows are alike.
        starts = np.random.default_rng(inputs.seed).permutation(len(tokens) // length)[:count] * length
        windows = [tokens[start : start + length] for start in starts.tolist()]
        pairs = tuple((window[:-following], window[-following:]) for window in windows)
        # All but the context's last token is prefilled.
        planned = Batch(length - following - 1, following + 1, batch, tuple(range(count)))
        over = mesh_of(params) if mesh is None else get_mesh(mesh)
        # The number of windows is not part of it, so a run with more of them goes on from the same files.
        settings = {"tokens": digest(tokens), "length": length, "following": following, "seed": inputs.seed}
        return cls(pairs, Plan(params, (planned,), mesh=over), batch, settings)

    @property
    def count(self) -> int:
        return len(self.pairs)

    def scores(
        self, policy: Policy, count: int, out: Path | None, progress: Callable[[int, int], None] | None
    ) -> list[float]:
        params, mesh = on_mesh(self.plan.params, self.plan.mesh, policy)
        settings = {
            "policy": described_policy(policy),
            **self.settings,
            "model": model_fingerprint(params),
            "batch": self.batch,
        }
        results = ResultFile(out, header(mesh, **settings), _Row, self._check(), mesh)
        done = len(results.rows)
        if progress is not None:
            progress(min(done, count), count)
        first = count if done >= count else done - done % self.batch
        for at in range(first, count, self.batch):
            # Whole batches, so that all have one compiled program, and a resumed run has the same ones.
            chosen = self.pairs[at : at + self.batch]
            padded = [*chosen, *chosen[-1:] * (self.batch - len(chosen))]
            found = following(params, policy, padded, self.batch, mesh=mesh)[: len(chosen)]
            rows = [
                {"example": at + i, "score": each.logprob / len(continuation)}
                for i, (each, (_, continuation)) in enumerate(zip(found, chosen, strict=True))
            ]
            results.append(rows[max(done - at, 0) :])
            if progress is not None:
                progress(min(at + self.batch, count), count)
        return [row["score"] for row in results.rows[:count]]

    def _check(self) -> Callable[[dict[str, Any]], str | None]:
        """A check of rows: windows are measured in order."""
        expected = itertools.count()

        def wrong(row: dict[str, Any]) -> str | None:
            number = next(expected)
            return None if row["example"] == number else f"window {row['example']} in place of {number}"

        return wrong


def _is_significant(difference: float, interval: float) -> bool:
    return abs(difference) > interval


def _difference(difference: float, interval: float) -> str:
    return f"difference {difference:+.3f} ± {interval:.3f}"


def _described(each: Contender) -> str:
    return (
        f"{each.policy}: {each.score:.3f} ± {each.interval:.3f} with {100 * each.share:.1f} % of the full cache's bytes"
    )
