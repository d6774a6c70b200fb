"""The command line, with one command per file.

Nothing here imports JAX until a command needs it, so that help and argument errors appear at once.
"""

import sys
from typing import Annotated

import typer

from kvjax._version import __version__

from .bench import bench
from .calibrate import calibrate
from .chat import chat
from .command import Command
from .compare import compare
from .convert import convert
from .draw import draw
from .evaluate import evaluate
from .generate import generate
from .inspect import inspect
from .plan import plan
from .policies import policies
from .recommend import recommend
from .serve import serve
from .signature import command

app = typer.Typer(
    name="kvjax",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Boxes and colours on a terminal; plain paragraphs in a pipe.
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for function in (generate, chat, convert, policies, inspect, plan, draw, calibrate, compare, recommend, bench, serve):
    app.command(cls=Command)(command(function))
app.command("eval", cls=Command)(command(evaluate))


def _version(asked: bool) -> bool:
    if asked:
        typer.echo(f"kvjax {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="KVJAX_DEBUG", help="Show Python's traceback when a command fails.")
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", envvar="KVJAX_QUIET", help="Show no progress; also after the command."),
    ] = False,
) -> None:
    """Language models with their KV cache kept within a budget."""
