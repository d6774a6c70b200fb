"""One number for one task and policy, with the bytes and the time it took: what comparisons are made of."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jax.sharding import Mesh
from pydantic import BeforeValidator, TypeAdapter

from kvjax.cache import bucket
from kvjax.models import Params
from kvjax.policies import Full, Policy
from kvjax.policies.unbound import check_unbound
from kvjax.runtime.mesh import on_mesh
from kvjax.runtime.processes import from_first

from . import fidelity, sessions
from .perplexity import Perplexity, stream, streaming, windowed
from .report import ResultFile, header, model_fingerprint
from .runner import described, evaluate
from .task import Example, Format
from .tasks import MEASURES, Inputs, make_task, task_name

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a policy reached on a task.

    Attributes:
        task, policy: their names.
        metric: what `value` is: "score" (0 to 1), "perplexity", or "output error" of attention.
        value: as measured; in files, where there is no NaN, that is null.
        higher_is_better: whether more of it is better.
        cache_bytes, full_cache_bytes: bytes held per row under the policy and by the full cache, on average.
        tokens_per_second: decoded, without compilation; None where nothing was timed.
        query_aware: whether the policy knew the question when it compressed; None where there is no question.
        count: examples, or predicted tokens.
        budget_applies: whether the policy has a budget; of `full` or `kivi`, say, any that was given had no effect.
        settings: all hyperparameters of the policy.
        details: more measures, by name.
    """

    task: str
    policy: str
    metric: str
    value: Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
    higher_is_better: bool
    cache_bytes: float
    full_cache_bytes: float
    tokens_per_second: float | None
    query_aware: bool | None
    count: int
    settings: dict[str, Any]
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    budget_applies: bool = True


def measure(
    params: Params,
    name: str,
    inputs: Inputs,
    policy: Policy,
    *,
    query_aware: bool = False,
    chat: bool | None = None,
    batch: int = 4,
    prefill_block: int | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
    mesh: Mesh | str | None = None,
) -> Outcome:
    """Run a task by name under a policy.

    Args:
        name: of `task_names()`.
        out: a file of JSON lines that holds the results, and that an interrupted run goes on with.
        query_aware, chat, batch, prefill_block: as for `evaluate`.
        progress: called with what is done and in all: examples or tokens.
        mesh: devices to run over, as for `evaluate`; windows of a text are dealt along "data", too, and of one that is streamed, or whose attention is
            looked at, those devices all do the same.

    Raises:
        ValueError: the task is unknown or lacks something, has no prompt to read in blocks, or `out` is of another run.
        PolicyError: the policy cannot work with this budget.
    """
    if params.tokenizer is None:
        raise ValueError("this model has no tokenizer, so it cannot be given a task; load one that has")
    name = task_name(name)
    if name in MEASURES:
        _check_no_blocks(name, prefill_block)
        return _on_text(params, name, inputs, policy, out, progress, mesh)
    task = make_task(name, inputs, params.config.context_length)
    found = evaluate(
        params,
        task,
        policy,
        query_aware=query_aware,
        chat=chat,
        batch=batch,
        prefill_block=prefill_block,
        out=out,
        progress=progress,
        mesh=mesh,
    )
    labels = {label for row in found.rows for label in row["labels"]}
    return Outcome(
        task=name,
        policy=policy.info.name,
        metric="score",
        value=found.score,
        higher_is_better=True,
        cache_bytes=found.cache_bytes,
        full_cache_bytes=found.full_cache_bytes,
        tokens_per_second=found.decode_tokens_per_second,
        query_aware=query_aware,
        count=len(found.rows),
        settings=described(policy),
        budget_applies=policy.info.takes_budget,
        details={label: found.by(label) for label in sorted(labels)},
    )


def check(
    name: str,
    inputs: Inputs,
    policies: Sequence[Policy] = (),
    prefill_block: int | None = None,
    *,
    over_mesh: bool = False,
) -> None:
    """Raise what `measure` would raise of its arguments, as far as that can be told before a model is loaded.

    Raises:
        ValueError: the task is unknown, or something that it needs is missing, damaged or out of range.
        PolicyError: a policy cannot work with its budget, or not in a text of the length that is asked for, in blocks or over a mesh.
        ImportError: a package that the task needs is not installed.
        OSError: a file cannot be read.
    """
    name = task_name(name)
    for policy in policies:
        policy.validate(max(inputs.lengths or (1 << 30,)))  # a budget too small for any text, or for this one
        check_unbound(policy, prefill_block, over_mesh=over_mesh)
    if name not in MEASURES:
        make_task(name, inputs, window=1 << 30).check()
        return
    _check_no_blocks(name, prefill_block)
    if inputs.read_text() is None:
        raise ValueError(_NO_TEXT)
    length = inputs.length(1 << 30)
    if name == "fidelity" and length <= inputs.queries:
        raise ValueError(
            f"length={length}; fidelity compares the last {inputs.queries} tokens, and needs some before them"
        )
    if length < 2:
        raise ValueError(f"length={length}: a text of so few tokens has nothing to predict; give 2 or more")
    if name == "perplexity" and inputs.window is not None:
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
        raise ValueError(f"prefill_block={prefill_block}, but {name} reads no prompt by itself; leave it out")


_NO_TEXT = "no text to read; give it as --text FILE"


def _check_windows(policy: Policy) -> None:
    if policy != Full():
        raise ValueError(
            f"windows are read with the full cache, not {policy.info.name}; leave out the window to stream"
        )


def sizes(params: Params, name: str, inputs: Inputs, query_aware: bool, chat: bool | None) -> tuple[int, int]:
    """The longest prompt of a task in tokens, and its most new ones: what the bytes of a cache follow from."""
    if name == "perplexity":
        return 0, len(_tokens(params, inputs, None))
    if name == "fidelity":
        total = len(_tokens(params, inputs, 1024))
        return total - inputs.queries, inputs.queries
    assert params.tokenizer is not None
    form = Format(params.tokenizer, params.tokenizer.chat_template is not None if chat is None else chat)
    found = []
    together: dict[int, list[Example]] = {}
    for example in make_task(name, inputs, params.config.context_length).examples(form):
        if example.session is not None:
            together.setdefault(example.session, []).append(example)
            continue
        context, question = (len(part) for part in form.encode(example))
        new_tokens = example.max_new_tokens + (0 if query_aware else bucket(question))
        found.append((context + question if query_aware else context, new_tokens))
    for examples in together.values():
        context, _, new_tokens = sessions.plan(form, examples)
        found.append((len(context), new_tokens))
    prompts, most_new = zip(*found, strict=True)
    return max(prompts), max(most_new)


def _tokens(params: Params, inputs: Inputs, default: int | None) -> list[int]:
    text, length = inputs.read_text(), inputs.length(default or 0)
    if text is None:
        raise ValueError(_NO_TEXT)
    tokens = params.tokenizer.encode(text)
    if length > len(tokens):
        raise ValueError(f"{inputs.text} has {len(tokens)} tokens, fewer than the length {length}; give a longer text")
    return tokens[: length or None]


def _on_text(
    params: Params,
    name: str,
    inputs: Inputs,
    policy: Policy,
    out: Path | None,
    progress: Progress | None,
    mesh: Mesh | str | None,
) -> Outcome:
    """Perplexity or fidelity: one row in the result file, once it is known."""
    settings = {
        "task": {"name": name, **dataclasses.asdict(inputs)},
        "model": model_fingerprint(params),
        "policy": {"name": policy.info.name, **described(policy)},
    }
    existing: list[dict[str, Any]] = []

    def wrong(row: dict[str, Any]) -> str | None:
        existing.append(row)
        asked = {"task": name, "policy": policy.info.name}
        other = [f"{field} {row[field]!r}, not {value!r}" for field, value in asked.items() if row[field] != value]
        return other[0] if other else "the result is there twice" if len(existing) > 1 else None

    params, over = on_mesh(params, mesh)
    results = ResultFile(out, header(over, **settings), Outcome, wrong, over)
    if not results.rows:
        find = _perplexity if name == "perplexity" else _fidelity
        results.append([dataclasses.asdict(find(params, inputs, policy, out, progress, over))])
    return TypeAdapter(Outcome).validate_python(results.rows[0])


def _perplexity(
    params: Params, inputs: Inputs, policy: Policy, out: Path | None, progress: Progress | None, mesh: Mesh | None
) -> Outcome:
    tokens, start = _tokens(params, inputs, None), time.perf_counter() - stream.compile_seconds
    if inputs.window is not None:
        _check_windows(policy)
        found = windowed(params, tokens, inputs.window, progress=progress, stride=inputs.stride, mesh=mesh)
        full_bytes = policy.nbytes(params.config, 1, 0, inputs.window, params.dtype)
        found, seconds = Perplexity(found.logprobs, full_bytes), None
    else:
        checkpoint = None if out is None else out.with_suffix(".state.npz")
        resumed = checkpoint is not None and from_first(mesh, checkpoint.exists)
        full_bytes = Full().nbytes(params.config, 1, 0, len(tokens), params.dtype)
        found = streaming(params, tokens, policy, progress=progress, checkpoint=checkpoint, mesh=mesh)
        seconds = None if resumed else time.perf_counter() - stream.compile_seconds - start
    return Outcome(
        task="perplexity",
        policy=policy.info.name,
        metric="perplexity",
        value=found.perplexity,
        higher_is_better=False,
        cache_bytes=found.cache_bytes,
        full_cache_bytes=full_bytes,
        tokens_per_second=None if seconds is None else len(found.logprobs) / seconds,
        query_aware=None,
        count=len(found.logprobs),
        settings=described(policy),
        budget_applies=policy.info.takes_budget,
        details={"nll": found.nll},
    )


def _fidelity(
    params: Params, inputs: Inputs, policy: Policy, out: Path | None, progress: Progress | None, mesh: Mesh | None
) -> Outcome:
    tokens = _tokens(params, inputs, 1024)
    prompt = len(tokens) - inputs.queries
    (found,) = fidelity.sweep(params, tokens, prompt, [policy], progress=progress, mesh=mesh)
    tables = {
        name: np.asarray(getattr(found, name)).tolist() for name in ("recall", "output_error", "cosine", "jaccard")
    }
    return Outcome(
        task="fidelity",
        policy=policy.info.name,
        metric="output error",
        value=found.means()["output_error"],
        higher_is_better=False,
        cache_bytes=found.cache_bytes,
        full_cache_bytes=Full().nbytes(params.config, 1, prompt, inputs.queries, params.dtype),
        tokens_per_second=None,
        query_aware=None,
        count=inputs.queries,
        settings=described(policy),
        budget_applies=policy.info.takes_budget,
        details={"means": found.means(), "by_layer": tables},
    )
