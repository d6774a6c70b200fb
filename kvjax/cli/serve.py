"""`kvjax serve`: answer requests over HTTP."""

import dataclasses
import ipaddress
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from . import checks, console
from .hyperparameters import read_policy
from .options import BudgetOption, MeshModelOptions, PolicyOption, PrefillBlockOption, SetOption

SAMPLING = "temperature,top_k,top_p,min_p"
EXTRA = "fastapi", "uvicorn", "prometheus_client", "llguidance"


@dataclasses.dataclass(frozen=True)
class ServedModel(MeshModelOptions):
    """Which model is served."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Hugging Face directory or hub id, GGUF file, or Orbax checkpoint. [default: SmolLM2-135M-Instruct]",
            show_default=False,
        ),
    ] = None


@dataclasses.dataclass(frozen=True)
class Access:
    """Whom a server answers, and at which address."""

    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 8000
    api_keys: Annotated[
        Path | None,
        typer.Option(
            "--api-keys",
            metavar="FILE",
            help="File with API keys, one a line. KVJAX_API_KEY has keys, too.",
            show_default=False,
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="Host name of this server, besides localhost and IP addresses; repeatable. * allows all.",
            show_default=False,
        ),
    ] = None
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origin",
            metavar="ORIGIN",
            help="Origin of a web page that may send requests, such as https://chat.example; repeatable.",
            show_default=False,
        ),
    ] = None
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen on a public address without API keys.")] = False


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on requests."""

    max_queue: Annotated[
        int, typer.Option("--max-queue", min=0, max=checks.MAX_INT, help="Sequences that wait for a row, at most.")
    ] = 64
    max_body: Annotated[
        int, typer.Option("--max-body-bytes", min=1024, max=checks.MAX_INT, help="Bytes of a request, at most.")
    ] = 2 << 20
    first_seconds: Annotated[
        float, typer.Option("--first-seconds", help="Seconds from a request to its first token, at most.")
    ] = 120.0
    request_seconds: Annotated[
        float, typer.Option("--request-seconds", help="Seconds from a request to its end, at most.")
    ] = 1800.0
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", help="Seconds that requests may go on after SIGTERM.")
    ] = 30.0


def serve(
    *,
    source: ServedModel,
    policy: PolicyOption = "full",
    budget: BudgetOption = None,
    settings: SetOption = None,
    rows: Annotated[
        str, typer.Option("--rows", metavar="N|auto", help="Sequences that run at a time; auto is as many as fit.")
    ] = "8",
    max_total_tokens: Annotated[
        int,
        typer.Option(
            "--max-total-tokens", min=2, max=checks.MAX_INT, help="Tokens of a sequence with its prompt, at most."
        ),
    ] = 4096,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, max=checks.MAX_INT, help="Tokens to generate, at most.")
    ] = 1024,
    prefill_block: PrefillBlockOption = None,
    prefix_bytes: Annotated[
        str | None,
        typer.Option(
            "--prefix-bytes",
            metavar="SIZE",
            help="Memory for states of prompts' beginnings, with --prefill-block; 0 stores none. [default: that of two rows]",
            show_default=False,
        ),
    ] = None,
    sessions: Annotated[
        Path | None,
        typer.Option(
            "--sessions",
            metavar="DIR",
            help="Save conversations there if requests ask for it, with --prefill-block.",
            show_default=False,
        ),
    ] = None,
    session_bytes: Annotated[
        str,
        typer.Option(
            "--session-bytes",
            metavar="SIZE",
            help="Saved conversations of an API key, at most; the oldest are deleted.",
        ),
    ] = "4GB",
    prefix_host_bytes: Annotated[
        str,
        typer.Option(
            "--prefix-host-bytes",
            metavar="SIZE",
            help="Host memory for such states that the device has no more room for.",
        ),
    ] = "0",
    steps: Annotated[
        int, typer.Option("--steps", min=1, max=256, help="Decode steps between two events of a stream.")
    ] = 8,
    sampling: Annotated[
        str,
        typer.Option("--sampling", metavar="NAMES", help="Sampling options that requests may have; fewer are faster."),
    ] = SAMPLING,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the model for clients. [default: its source]", show_default=False),
    ] = None,
    no_page: Annotated[bool, typer.Option("--no-page", help="Serve no web page at /, nor reports for it.")] = False,
    access: Access,
    limits: Limits,
) -> None:
    """Answer requests over HTTP, with OpenAI's interface.

    Many requests share a running batch. A policy keeps each request's KV cache within a budget.
    """
    from kvjax._util.extras import optional

    for module in EXTRA:
        optional(module, "kvjax serve", "serve")
    from kvjax.conversion.default_model import NAME
    from kvjax.policies.unbound import check_no_host_cache, check_unbound
    from kvjax.runtime.batch import Batch
    from kvjax.runtime.memory import parse_bytes
    from kvjax.serve.run import run
    from kvjax.serve.serving import Server
    from kvjax.serve.sessions import Sessions
    from kvjax.serve.settings import Settings, read_keys
    from kvjax.serve.sizing import make_batch

    count = _rows(rows)
    given = checks.listed(sampling, "--sampling") if sampling else []
    if unknown := [each for each in given if each not in SAMPLING.split(",")]:
        raise typer.BadParameter(f"{unknown[0]!r}: give some of {SAMPLING}", param_hint="--sampling")
    if max_new_tokens >= max_total_tokens:
        raise typer.BadParameter(
            f"{max_new_tokens} is not less than --max-total-tokens {max_total_tokens}; leave room for a prompt",
            param_hint="--max-new-tokens",
        )
    for option in ("first_seconds", "request_seconds", "drain_seconds"):
        checks.positive(getattr(limits, option), f"--{option.replace('_', '-')}")
    chosen = read_policy(policy, budget, settings)
    check_no_host_cache(chosen)
    check_unbound(chosen, prefill_block, over_mesh=source.mesh is not None)
    keys = read_keys(access.api_keys)
    if not (keys or access.insecure or _is_loopback(access.host)):
        raise typer.BadParameter(
            f"{access.host} can be reached from other machines; give --api-keys or set KVJAX_API_KEY, or give --insecure",
            param_hint="--host",
        )
    if source.distributed or "data" in (source.mesh or ""):
        raise typer.BadParameter(
            "a server runs in one process and has no axis data; give axes model and sequence, and start a server for each copy",
            param_hint="--distributed" if source.distributed else "--mesh",
        )
    stored = None if prefix_bytes is None else parse_bytes(prefix_bytes)
    host_bytes, session_limit = parse_bytes(prefix_host_bytes), parse_bytes(session_bytes)
    for size, option in ((stored, "--prefix-bytes"), (host_bytes, "--prefix-host-bytes")):
        if size and prefill_block is None:
            raise typer.BadParameter("states are stored between blocks; give --prefill-block", param_hint=option)
    if host_bytes and stored == 0:
        raise typer.BadParameter(
            "states move from the device to host memory; give --prefix-bytes more than 0",
            param_hint="--prefix-host-bytes",
        )
    if sessions is not None and prefill_block is None:
        raise typer.BadParameter("conversations are continued in blocks; give --prefill-block", param_hint="--sessions")
    params = source.load()
    page = not no_page and params.tokenizer is not None and bool(params.tokenizer.chat_template)
    batch = make_batch(
        count,
        stored,
        lambda rows, prefixes: Batch(
            params,
            chosen,
            rows=rows,
            prompt_len=max_total_tokens - max_new_tokens,
            max_new_tokens=max_new_tokens,
            max_total_tokens=max_total_tokens,
            block=prefill_block,
            anchor="start",
            prefixes=prefixes,
            prefix_host_bytes=host_bytes,
            sampling=given,
            masked=params.tokenizer is not None,
            tops=True,
        ),
        copies=int(sessions is not None or (page and source.mesh is not None)),
    )
    saved = None if sessions is None else Sessions(sessions.expanduser(), session_limit, batch)
    shared = Settings(
        name or source.model or NAME,
        keys,
        frozenset(access.allowed_host or ()) | {access.host},
        frozenset(access.allowed_origin or ()),
        **dataclasses.asdict(limits),
        reports=page,
        page=page,
    )
    console.say(
        "progress",
        f"serving {shared.name} at http://{access.host}:{access.port}/v1, {batch.rows} rows of {console.size(batch.row_bytes)}; "
        "compiling programs",
    )
    if page:
        console.say("progress", f"a web page is at http://{access.host}:{access.port}/")
    begun = time.perf_counter()

    def ready() -> None:
        console.say("progress", f"ready after {time.perf_counter() - begun:.0f} s")

    if not run(Server(params, batch, shared, steps=steps, sessions=saved), access.host, access.port, ready):
        raise typer.Exit(1)


def _rows(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise typer.BadParameter(f"{text!r}: give a number from 1 to 4096, or auto", param_hint="--rows")
    return int(text)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
