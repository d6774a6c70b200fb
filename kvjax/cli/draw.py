"""`kvjax draw`: a picture of what policies keep."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import errors, waiting
from .hyperparameters import read_policy, setting_name
from .options import (
    BudgetOption,
    CompilationCacheOption,
    DTypeOption,
    ModelOption,
    PromptArgument,
    PromptFileOption,
    SetOption,
    read_model,
    read_prompt,
)

if TYPE_CHECKING:
    from kvjax.policies import Policy


def draw(
    prompt: PromptArgument = None,
    prompt_file: PromptFileOption = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Picture to write: .png, .svg or .pdf.")] = Path("kept.png"),
    policies: Annotated[
        str, typer.Option(help="Policies to compare, separated by commas.")
    ] = "full,streaming_llm,treekv",
    budget: BudgetOption = None,
    settings: SetOption = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens to write.")] = 64,
    model: ModelOption = None,
    dtype: DTypeOption = None,
    compilation_cache: CompilationCacheOption = True,
) -> None:
    """Draw which tokens policies keep.

    Each policy continues the prompt; the picture shows what its cache holds after every token. Needs the `plot` extra.
    """
    from kvjax.plots import kept_tokens

    chosen = _read_policies(policies, budget, settings or ())
    text = read_prompt(prompt, prompt_file)
    params = read_model(model, dtype, compilation_cache)
    with waiting("Running " + ", ".join(policy.name for policy in chosen)):
        figure = kept_tokens(params, text, chosen, max_new_tokens)
    figure.savefig(out, dpi=150)
    if errors().is_terminal:
        errors().print(f"wrote {out}", soft_wrap=True)


def _read_policies(names: str, budget: str | None, settings: Sequence[str]) -> "list[Policy]":
    """The policies to draw. Budget and settings go to those that have them; one of them at least must."""
    from kvjax.policies import PolicyError, policy_class

    given = [*([] if budget is None else [f"budget={budget}"]), *settings]
    wanted: dict[str, list[str]] = {}
    for name in map(str.strip, names.split(",")):
        cls = policy_class(name)
        fields = {field.name for field in dataclasses.fields(cls)}
        wanted[name] = [setting for setting in given if setting_name(setting) in fields]
    chosen = [read_policy(name, None, taken) for name, taken in wanted.items()]
    for setting in given:
        if not any(setting in taken for taken in wanted.values()):
            raise PolicyError(f"{setting}: none of {', '.join(wanted)} has this hyperparameter")
    return chosen
