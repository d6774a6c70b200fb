"""`kvjax calibrate`: collect the statistics of a model's heads that a policy needs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvjax._util.texts import read_text

from . import checks
from .console import errors
from .hyperparameters import read_settings
from .options import ModelOptions
from .progress import bar


def calibrate(
    method: Annotated[
        Literal["catekv", "chelsea", "duoattention", "infinigen", "razorattention", "triattention"],
        typer.Argument(help="The policy to calibrate; razorattention is another way to calibrate duoattention."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Profile to write, as JSON.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            "-d",
            metavar="FILE",
            help="Plain text to use; repeatable. razorattention uses random tokens instead.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also draw the heads' scores, if there are any: .png, .svg or .pdf. Needs matplotlib.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=checks.MAX_INT,
            help="Number of samples: of text, spread evenly over the files (default 16), or of random tokens (default 1).",
            show_default=False,
        ),
    ] = None,
    length: Annotated[int, typer.Option(min=1, max=checks.MAX_INT, help="Tokens in each sample.")] = 2048,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Set an option of the method; repeatable.", show_default=False
        ),
    ] = None,
    *,
    source: ModelOptions,
) -> None:
    """Calibrate a policy: collect statistics of a model's attention heads once, for policies that treat heads differently.

    The profile contains a score and a label for every KV head. For infinigen it contains the directions in which
    queries are largest, and for triattention the means of unrotated queries. Pass it to the policy with `--set
    profile=FILE`. The default model needs no calibration: its profiles come with kvjax.
    """
    from kvjax.calibration.make_profile import METHODS, make_profile
    from kvjax.policies import HeadProfile

    # Before the model is loaded, so that errors appear at once.
    chosen, files = read_settings(METHODS[method].settings, settings or ()), data or []
    if METHODS[method].reads_text != bool(files):
        need = "give text to read" if METHODS[method].reads_text else "random tokens are used; omit it"
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
