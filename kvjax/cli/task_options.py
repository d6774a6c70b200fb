"""The options that `kvjax eval` and `kvjax compare` share, and what both print of a result."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import checks, console
from .options import JsonOption, MeshModelOptions, PrefillBlockOption, SetOption

if TYPE_CHECKING:
    from kvjax.evals.measure import Outcome
    from kvjax.evals.tasks import Inputs


@dataclasses.dataclass(frozen=True)
class EvaluationOptions(MeshModelOptions):
    """A model, what tasks are made from, and how they run."""

    settings: SetOption = None
    query_aware: Annotated[
        bool,
        typer.Option(
            "--query-aware", help="Let the policy see the question when it compresses; by default it does not."
        ),
    ] = False
    length: Annotated[
        str | None,
        typer.Option(
            "--length",
            "-l",
            metavar="N[,N…]",
            help="Tokens of prompt and answer, or of the text. Needle tasks take several. [default: the task's own]",
            show_default=False,
        ),
    ] = None
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=checks.MAX_INT,
            help="Number of examples. [default: 20 for RULER, 1 per length and depth of a needle, otherwise all]",
            show_default=False,
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Random seed of tasks.")] = 0
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="Plain text: a haystack, or the text to read.", show_default=False),
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            "-d",
            metavar="PATH",
            help="LongBench's jsonl file or their folder, problems of GSM8K, MATH-500 or AIME, contexts with many questions, or SQuAD or "
            "HotpotQA for RULER.",
            show_default=False,
        ),
    ] = None
    examples: Annotated[
        Path | None, typer.Option(metavar="FILE", help="GSM8K's solved examples.", show_default=False)
    ] = None
    shots: Annotated[
        int,
        typer.Option(
            min=0,
            max=checks.MAX_INT,
            help="Number of solved examples; many-shot is 50, and 0 asks the model to reason.",
        ),
    ] = 8
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            min=1,
            max=checks.MAX_INT,
            help="Tokens of an answer to gsm8k, math500, aime or multi-query. [default: the task's own]",
            show_default=False,
        ),
    ] = None
    history: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="What a question of multi-query follows: the previous question with its reference answer (reference) or the model's (own), "
            "or only the context (none). [default: reference]",
            show_default=False,
        ),
    ] = None
    score_by: Annotated[
        str | None,
        typer.Option(
            "--score-by",
            metavar="KIND",
            help="Score of multi-query: any or all of the reference answers, the first number, or f1. [default: any]",
            show_default=False,
        ),
    ] = None
    depths: Annotated[
        str | None, typer.Option(metavar="X[,X…]", help="Depths of needles, from 0 to 1.", show_default=False)
    ] = None
    batch: Annotated[int, typer.Option(min=1, max=checks.MAX_INT, help="Examples that run together.")] = 4
    prefill_block: PrefillBlockOption = None
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat", help="Use the chat template. [default: if the model has one]", show_default=False
        ),
    ] = None
    as_json: JsonOption = False

    def inputs(self, **more: Any) -> "Inputs":
        """What tasks are made from; `more` are other fields of `Inputs`.

        Raises:
            FileNotFoundError: one of the files does not exist.
        """
        from kvjax.evals.tasks import Inputs

        given = {name: getattr(self, name) for name in _INPUTS}
        for name in ("text", "data", "examples"):
            if given[name] is not None and not given[name].exists():
                raise FileNotFoundError(f"{given[name]}: no such file")
        most = checks.MAX_INT
        if self.length is not None:
            more["lengths"] = checks.numbers(
                self.length, int, "--length", f"1 to {most}", lambda value: 1 <= value <= most
            )
        if self.depths is not None:
            more["depths"] = checks.numbers(
                self.depths, float, "--depths", "shares from 0 to 1", lambda depth: 0 <= depth <= 1
            )
        return Inputs(**{name: value for name, value in (given | more).items() if value is not None})

    def how(self) -> dict[str, Any]:
        """How tasks run, as `evaluate` takes it."""
        return {name: getattr(self, name) for name in ("query_aware", "chat", "batch", "prefill_block")}


_INPUTS = ("samples", "seed", "text", "data", "examples", "shots", "max_new_tokens", "history", "score_by")


def value(outcome: "Outcome") -> str:
    """A result's value, with its standard error if there is one."""
    error = outcome.standard_error
    return f"{outcome.value:.4f}" + ("" if error is None else f" ± {error:.4f}")


def entries(outcome: "Outcome") -> dict[str, str]:
    """What a table says of a result, by column."""
    return {
        "Policy": outcome.policy,
        "Budget": str(outcome.settings.get("budget", "its own")) if outcome.budget_applies else "does not apply",
        outcome.metric: value(outcome),
        "n": str(outcome.count),
        "Cache": console.size(round(outcome.cache_bytes)),
        "Of full": f"{100 * outcome.cache_bytes / outcome.full_cache_bytes:.1f} %",
        "Tokens/s": "" if outcome.tokens_per_second is None else f"{outcome.tokens_per_second:.1f}",
    }
