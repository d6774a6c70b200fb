"""`kvjax draw`: a picture of what policies keep."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from .console import errors, waiting
from .hyperparameters import read_policy
from .options import (
    BudgetOption,
    CompilationCacheOption,
    DTypeOption,
    ModelOption,
    PromptArgument,
    PromptFileOption,
    read_model,
    read_prompt,
)


def draw(
    prompt: PromptArgument = None,
    prompt_file: PromptFileOption = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Picture to write: .png, .svg or .pdf.")] = Path("kept.png"),
    policies: Annotated[
        str, typer.Option(help="Policies to compare, separated by commas.")
    ] = "full,streaming_llm,treekv",
    budget: BudgetOption = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens to write.")] = 64,
    model: ModelOption = None,
    dtype: DTypeOption = None,
    compilation_cache: CompilationCacheOption = True,
) -> None:
    """Draw which tokens policies keep.

    Each policy continues the prompt; the picture shows what its cache holds after every token. Needs the `plot` extra.
    """
    from kvjax.plots import kept_tokens
    from kvjax.policies import policies as registered

    chosen = []
    for name in (name.strip() for name in policies.split(",")):
        cls = registered().get(name)
        takes_budget = cls is not None and any(field.name == "budget" for field in dataclasses.fields(cls))
        chosen.append(read_policy(name, budget if takes_budget else None))
    text = read_prompt(prompt, prompt_file)
    params = read_model(model, dtype, compilation_cache)
    with waiting("Running " + ", ".join(policy.name for policy in chosen)):
        figure = kept_tokens(params, text, chosen, max_new_tokens)
    figure.savefig(out, dpi=150)
    if errors().is_terminal:
        errors().print(f"wrote {out}", soft_wrap=True)
