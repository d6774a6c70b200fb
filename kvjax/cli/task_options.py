"""Options that say what a task is made from, shared by `kvjax eval` and `kvjax compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import checks

if TYPE_CHECKING:
    from kvjax.evals.tasks import Inputs

LengthOption = Annotated[
    str | None,
    typer.Option(
        "--length",
        "-l",
        metavar="N[,N…]",
        help="Tokens of prompt and answer, or of the text that is read. [default: the task's own]",
        show_default=False,
    ),
]
SamplesOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=checks.MAX_INT,
        help="Examples. [default: 20 of RULER, 1 a needle's length and depth, else all]",
        show_default=False,
    ),
]
SeedOption = Annotated[int, typer.Option(help="Of what is drawn.")]
TextOption = Annotated[
    Path | None,
    typer.Option("--text", metavar="FILE", help="Plain text: a haystack, or what is read.", show_default=False),
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        "-d",
        metavar="PATH",
        help="LongBench's jsonl file or their folder, problems of GSM8K, MATH-500 or AIME, contexts with many questions, or SQuAD or "
        "HotpotQA for RULER.",
        show_default=False,
    ),
]
ExamplesOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="GSM8K's solved examples.", show_default=False)
]
ShotsOption = Annotated[
    int,
    typer.Option(min=0, max=checks.MAX_INT, help="How many of them; many-shot is 50, and 0 asks the model to reason."),
]
NewTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        "-n",
        min=1,
        max=checks.MAX_INT,
        help="Of an answer to gsm8k, math500, aime or multi-query. [default: the task's own]",
        show_default=False,
    ),
]
QueryAwareOption = Annotated[
    bool,
    typer.Option(
        "--query-aware", help="Let the policy see the question when it compresses; by default it does not know it."
    ),
]
ChatOption = Annotated[
    bool | None,
    typer.Option("--chat/--no-chat", help="Use the chat template. [default: if the model has one]", show_default=False),
]
BatchOption = Annotated[int, typer.Option(min=1, max=checks.MAX_INT, help="Examples that run together.")]


def read_inputs(
    length: str | None,
    samples: int | None,
    seed: int,
    text: Path | None,
    data: Path | None,
    examples: Path | None,
    shots: int,
    **more: Any,
) -> "Inputs":
    """What the options say; files that are not there are told before a model is loaded.

    Raises:
        FileNotFoundError: one of the paths does not exist.
    """
    from kvjax.evals.tasks import Inputs

    for path in (text, data, examples):
        if path is not None and not path.exists():
            raise FileNotFoundError(f"{path}: no such file")
    lengths, most = None, checks.MAX_INT
    if length is not None:
        lengths = checks.numbers(length, int, "--length", f"1 to {most}", lambda value: 1 <= value <= most)
    given = {name: value for name, value in more.items() if value is not None}
    return Inputs(
        lengths=lengths,
        samples=samples,
        seed=seed,
        text=text,
        data=data,
        examples=examples,
        shots=shots,
        **given,
    )
