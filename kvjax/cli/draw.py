"""`kvjax draw`: draw which tokens policies keep."""

from pathlib import Path
from typing import Annotated

import typer

from . import checks
from .console import errors
from .hyperparameters import read_policies
from .options import (
    BudgetOption,
    ModelOptions,
    PromptArgument,
    PromptFileOption,
    SetOption,
    read_prompt,
)
from .progress import waiting


def draw(
    prompt: PromptArgument = None,
    prompt_file: PromptFileOption = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Picture to write: .png, .svg or .pdf.")] = Path("kept.png"),
    policies: Annotated[
        str, typer.Option(help="Policies to compare, separated by commas.")
    ] = "full,streaming_llm,treekv",
    budget: BudgetOption = None,
    settings: SetOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, max=checks.MAX_INT, help="Tokens to write.")
    ] = 64,
    *,
    source: ModelOptions,
) -> None:
    """Draw which tokens policies keep.

    Each policy continues the prompt. The picture shows the contents of its cache after every token. Needs matplotlib.
    """
    from kvjax._util.arguments import amount
    from kvjax.plots import kept_tokens, save

    chosen = read_policies(policies, budget, settings or (), "--policies")
    checks.picture(out)
    amount("max_new_tokens", max_new_tokens)
    text = read_prompt(prompt, prompt_file)
    params = source.load()
    with waiting("Running " + ", ".join(policy.info.name for policy in chosen)):
        figure = kept_tokens(params, text, chosen, max_new_tokens)
    save(figure, out)
    if errors().is_terminal:
        errors().print(f"wrote {out}", soft_wrap=True)
