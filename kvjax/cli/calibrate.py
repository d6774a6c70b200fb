"""`kvjax calibrate`: find out what a policy wants to know of a model's heads."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvjax.texts import read_text

from . import checks
from .console import errors
from .hyperparameters import read_settings
from .options import ModelOptions
from .progress import bar


def calibrate(
    method: Annotated[
        Literal["catekv", "chelsea", "duoattention", "infinigen", "razorattention", "triattention"],
        typer.Argument(help="The policy to calibrate for; razorattention is another way for duoattention."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Profile to write, as JSON.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            "-d",
            metavar="FILE",
            help="Plain text to read; repeatable. razorattention reads random tokens instead.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the scores of heads too, where there are any: .png, .svg or .pdf. Needs matplotlib.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=checks.MAX_INT,
            help="Pieces of text, spread evenly over the files: by default 16; or of random tokens, 1.",
            show_default=False,
        ),
    ] = None,
    length: Annotated[int, typer.Option(min=1, max=checks.MAX_INT, help="Tokens in each piece.")] = 2048,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Set something of the method; repeatable.", show_default=False
        ),
    ] = None,
    *,
    source: ModelOptions,
) -> None:
    """Look at a model's attention heads as they read, once, for the policies that treat them differently.

    The profile that is written holds a score and a label for every KV head; for infinigen, the directions in which its queries are
    largest; for triattention, means of what its queries are before rotation. Give it to the policy with `--set profile=FILE`. The default model needs none: its profiles come with kvjax.
    """
    from kvjax.calibration.make_profile import METHODS, make_profile
    from kvjax.policies import HeadProfile

    # Before the model is loaded: mistakes show at once.
    chosen, files = read_settings(METHODS[method].settings, settings or ()), data or []
    if METHODS[method].reads_text != bool(files):
        need = "give text to read" if METHODS[method].reads_text else "random tokens are read; leave it out"
        raise typer.BadParameter(f"{method}: {need}", param_hint="--data")
    if plot is not None and METHODS[method].profile is not HeadProfile:
        raise typer.BadParameter(f"{method}: there are no scores of heads to draw", param_hint="--plot")
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"{file}: no such file")
        read_text(file)
    checks.destination(out)
    checks.picture(plot)
    params = source.load()
    with bar() as begin:
        profile = make_profile(params, method, files, chosen, samples, length, begin(f"Calibrating {method}"))
    profile.save(out)
    if plot is not None and isinstance(profile, HeadProfile):
        from kvjax.plots import head_map, save

        save(head_map(profile), plot)
    if errors().is_terminal:
        errors().print(f"wrote {out}" + ("" if plot is None else f" and {plot}"), soft_wrap=True)
