"""`kvjax calibrate`: find out what a policy wants to know of a model's heads."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .console import errors
from .hyperparameters import read_settings
from .options import CompilationCacheOption, DTypeOption, ModelOption, read_model
from .progress import bar


def calibrate(
    method: Annotated[
        Literal["catekv", "chelsea", "duoattention"], typer.Argument(help="The policy to calibrate for.")
    ],
    data: Annotated[list[Path], typer.Option("--data", "-d", metavar="FILE", help="Plain text to read; repeatable.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Profile to write, as JSON.")],
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the scores too: .png, .svg or .pdf. Needs the `plot` extra.", show_default=False
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Pieces of text, spread evenly over the files.")] = 16,
    length: Annotated[int, typer.Option(min=1, help="Tokens in each piece.")] = 2048,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Set something of the method; repeatable.", show_default=False
        ),
    ] = None,
    model: ModelOption = None,
    dtype: DTypeOption = None,
    compilation_cache: CompilationCacheOption = True,
) -> None:
    """Score a model's attention heads on text, once, for the policies that treat them differently.

    The profile that is written holds a score and a label for every KV head; give it to the policy with
    `--set profile=FILE`. The default model needs none: its profiles come with kvjax.
    """
    from kvjax.calibration.making import METHODS, make_profile

    chosen = read_settings(
        METHODS[method].Settings, settings or ()
    )  # before the model is loaded: mistakes show at once
    missing = [file for file in data if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"{missing[0]}: no such file")
    params = read_model(model, dtype, compilation_cache)
    with bar() as begin:
        profile = make_profile(params, method, data, chosen, samples, length, begin(f"Calibrating {method}"))
    profile.save(out)
    if plot is not None:
        from kvjax.plots import head_map

        head_map(profile).savefig(plot, dpi=150)
    if errors().is_terminal:
        errors().print(f"wrote {out}" + ("" if plot is None else f" and {plot}"), soft_wrap=True)
