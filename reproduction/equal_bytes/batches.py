"""Run batches of one task's prompts in programs that are compiled ahead, for a limited time."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax

from kvjax import Engine, Generation
from kvjax.evals.runner import described
from kvjax.models import Params
from kvjax.policies import Policy
from kvjax.runtime.generation import Run
from kvjax.runtime.request import check_request
from kvjax.runtime.row import Row

from .cells import Cell, profiles_of
from .suite import Suite

K = TypeVar("K")


class Roomy(Engine):
    """An engine of a suite's sizes, for prompts and questions of any length in the suite."""

    def __init__(
        self,
        params: Params,
        policy: str | Policy,
        suite: Suite,
        batch: int,
        seen: bool = False,
        block: int | None = None,
    ) -> None:
        new = suite.new(seen)
        super().__init__(params, policy, batch=batch, prompt_len=suite.prompt, max_new_tokens=new, block=block)
        self.given = None if seen else suite.question

    def compile_all(self) -> None:
        """Compile all programs that answers need."""
        self.executables(given=self.given)

    def answering(self, *args: Any, **options: Any) -> Callable[[], Any]:
        return super().answering(*args, **options | {"size": self.given})


class _FixedRun(Run):
    """A call of `generate` that runs in an existing engine."""

    engine: Engine

    def engine_for(self, rows: Sequence[Row]) -> Engine:
        return self.engine

    def most_tokens(self, row: Row) -> int:
        return row.request.max_new_tokens  # the engine has one rotation

    def runs_continuously(self) -> bool:
        return False


def answered(
    params: Params,
    engine: Engine,
    prompts: Sequence[list[int]],
    questions: Sequence[list[int]] | None,
    max_new_tokens: int,
    stop: Sequence[str] = (),
) -> list[Generation]:
    """As `kvjax.generate`, in the compiled programs of an engine. There are as many prompts as the engine has rows, or fewer.

    `CompiledGenerator` takes no questions after the compressed prompts, so this uses parts of kvjax that are not public.
    """
    run = _FixedRun(params, prompts, engine.policy, None, check_request(params, max_new_tokens, stop=stop), questions)
    run.engine = engine
    answers = run.finish()
    assert isinstance(answers, list)
    return answers


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Some samples of one task for one cell.

    Attributes:
        first, count: which samples.
    """

    cell: Cell
    task: str
    first: int
    count: int

    @property
    def key(self) -> dict[str, Any]:
        """What identifies the batch in result files."""
        return {**self.cell.key, "task": self.task, "first": self.first}


def batches(cells: Sequence[Cell], samples: int, size: int) -> Iterator[Batch]:
    """All batches in rounds: `size` samples of every task for each cell, then the next samples. An interrupted run has asked all
    cells equally, except in its last round.
    """
    for first in range(0, samples, size):
        for cell in cells:
            for name, asked in cell.suite.asked.items():
                if first < len(asked.examples):
                    yield Batch(cell, name, first, min(size, samples - first, len(asked.examples) - first))


def run(params: Params, engine: Engine, batch: Batch, size: int) -> dict[str, Any]:
    """Answer and score a batch: a row of the result file. A batch of fewer than `size` prompts repeats its last prompt."""
    cell, asked = batch.cell, batch.cell.suite.asked[batch.task]
    chosen = range(batch.first, batch.first + batch.count)
    padded = [*chosen, *[chosen[-1]] * (size - batch.count)]
    examples, pairs = [asked.examples[i] for i in chosen], [asked.pairs[i] for i in padded]
    prompts = [context + question for context, question in pairs] if cell.seen else [context for context, _ in pairs]
    questions = None if cell.seen else [question for _, question in pairs]
    answers = answered(params, engine, prompts, questions, examples[0].max_new_tokens, examples[0].stop)
    opening = cell.suite.form.opening
    texts = [opening(each) + (answer.text or "") for answer, each in zip(answers, examples, strict=False)]
    return {
        **batch.key,
        "settings": _settings(engine.policy if cell.fitted is None else cell.fitted),
        "held": cell.held,
        "full": cell.full,
        "scores": [round(asked.task.score(text, each), 6) for text, each in zip(texts, examples, strict=True)],
        "answers": texts,
        "references": [list(each.answers) for each in examples],
        "prompt_tokens": [sum(map(len, asked.pairs[i])) for i in chosen],
        "prefill_seconds": round(answers[0].stats.prefill_seconds, 3),
        "decode_seconds": round(answers[0].stats.decode_seconds, 3),
    }


def _settings(policy: Policy) -> dict[str, Any]:
    """The fields of a policy; profiles by name and hash, without the folder, so that parts of several machines have the same."""
    profiles = profiles_of(policy)
    return described(_without_folder(policy)) | ({"profiles": profiles} if profiles else {})


def _without_folder(policy: Policy) -> Policy:
    changed: dict[str, Any] = {}
    if isinstance(inner := getattr(policy, "policy", None), Policy):
        changed["policy"] = _without_folder(inner)
    if isinstance(file := getattr(policy, "profile", None), str):
        changed["profile"] = Path(file).name
    return dataclasses.replace(policy, **changed)


class Clock:
    """Whether there is time for another task of a kind, which may take as long as the longest so far.

    Args:
        seconds: in all, from now on; None for no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._longest: dict[str, float] = {}

    def allows(self, *kinds: str) -> bool:
        """Whether there is time for one of each kind."""
        return self._end is None or time.monotonic() + sum(self._longest.get(kind, 0.0) for kind in kinds) < self._end

    def took(self, kind: str, seconds: float) -> None:
        """That one of a kind took so long."""
        self._longest[kind] = max(self._longest.get(kind, 0.0), seconds)


def ahead_of_turn(asked: int | None) -> int:
    """How many programs are compiled at a time while others run; `asked`, or by default 4, and 0 on GPUs.

    JAX 0.11 captures a stream to make CUDA graphs with cuDNN. On an H200 that failed ("capturing stream has unjoined work") or never ended
    while another thread compiled or loaded a program.
    """
    return asked if asked is not None else 0 if jax.default_backend() == "gpu" else 4


class Compiled(Generic[K]):
    """Engines that are compiled in threads before their turn; each turn begins to compile the next ones.

    Args:
        order: what the engines are for, in the order of the turns.
        make: makes an engine and compiles it.
        ahead: engines that are compiled at a time while others run; 0 to compile each in its turn.
    """

    def __init__(self, order: Sequence[K], make: Callable[[K], Engine], ahead: int, clock: Clock) -> None:
        self._order, self._make, self._ahead, self._clock = list(order), make, ahead, clock
        self._pool = ThreadPoolExecutor(max(ahead, 1), thread_name_prefix="compile")
        self._begun: dict[K, Future[Engine]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._begun

    def get(self, key: K) -> Engine:
        """The engine, once it is compiled."""
        at = self._order.index(key)
        for each in self._order[at : at + self._ahead + 1]:
            if each not in self._begun and (each is key or self._clock.allows("compile")):
                self._begun[each] = self._pool.submit(self._timed, each)
        return self._begun[key].result()

    def close(self) -> None:
        """Begin no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _timed(self, key: K) -> Engine:
        start = time.monotonic()
        engine = self._make(key)
        self._clock.took("compile", time.monotonic() - start)
        return engine
