"""`kvjax chat`: a conversation in a terminal."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from . import checks, console
from .hyperparameters import read_policy
from .options import (
    BudgetOption,
    MeshModelOptions,
    PolicyOption,
    PrefillBlockOption,
    SetOption,
    read_standard_input,
)

if TYPE_CHECKING:
    from kvjax.models import Params
    from kvjax.runtime.session import Session


def chat(
    *,
    source: MeshModelOptions,
    policy: PolicyOption = "full",
    budget: BudgetOption = None,
    settings: SetOption = None,
    room: Annotated[
        int,
        typer.Option("--room", min=1, max=checks.MAX_INT, help="Tokens of the conversation after its first message."),
    ] = 4096,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, max=checks.MAX_INT, help="Tokens of an answer, at most.")
    ] = 1024,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the smallest set of most probable tokens with this total probability.", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Sampling seed.")] = 0,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    prefill_block: PrefillBlockOption = None,
) -> None:
    """Talk with a model.

    The conversation's KV cache stays within the policy's budget. Each line is a message. Ctrl-C ends an answer, Ctrl-D
    the conversation.
    """
    from kvjax.policies.unbound import check_unbound
    from kvjax.runtime.sampling import make_sampler

    chosen = read_policy(policy, budget, settings)
    checks.check_temperature(temperature)
    make_sampler(temperature, None, top_p)
    check_unbound(chosen, prefill_block, over_mesh=source.mesh is not None)
    params = source.load()
    from kvjax.runtime.session import Session

    options: dict[str, Any] = {"temperature": temperature, "top_p": top_p}
    session: Session | None = None
    for turn, message in enumerate(_messages()):
        if session is None:
            given = [] if system is None else [{"role": "system", "content": system}]
            given.append({"role": "user", "content": message})
            session = Session(params, given, chosen, max_new_tokens=room, prefill_block=prefill_block)
            pieces = session.stream(None, max_new_tokens, seed=seed, **options)
        else:
            pieces = session.stream(message, max_new_tokens, seed=(seed + turn) % 2**32, **options)
        _answer(pieces, session, params)
        if not session.remaining:
            console.say("warning", f"the room of {room} tokens is used up; begin again with a larger --room")
            return


def _messages() -> Iterator[str]:
    """Lines of standard input that are not empty."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = read_standard_input("give it messages, one per line", line=True)
        if not line:
            return
        if line.strip():
            yield line.strip()


def _answer(pieces: Iterator[str], session: "Session", params: "Params") -> None:
    """Print an answer as it is generated. Ctrl-C ends it."""
    before, begun = len(session.tokens), time.perf_counter()
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    print(flush=True)
    errors = console.errors()
    if errors.is_terminal:
        seconds, count = time.perf_counter() - begun, len(session.tokens)
        full = params.config.cache_bytes_per_token(params.dtype.itemsize) * count
        speed = (count - before) / max(seconds, 1e-9)
        held = f"cache {console.size(session.cache_bytes)}, full {console.size(full)}"
        errors.print(Text(f"{held} · {count} tokens · {speed:.1f} tokens/s", "dim"), soft_wrap=True)
