"""`kvjax plan`: whether a model, a policy and a context fit some devices, and how fast they may be."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax._util.settings import parse_value

from . import checks, console
from .hyperparameters import read_policy
from .options import DType, EmbeddingOption, JsonOption, ModelOption, PolicyOption, spelt
from .progress import unwatched

if TYPE_CHECKING:
    from kvjax.planning import Plan


def plan(
    device: Annotated[
        str,
        typer.Option("--device", help="t4, l4, a100-40, a100-80, h100, h200, v5e, v5p, v6e, or cpu with --memory."),
    ],
    model: ModelOption = None,
    count: Annotated[int, typer.Option(min=1, max=4096, help="Devices, alike and of one host.")] = 1,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXES",
            help="How they share the work, such as data=2,model=4. [default: every way, along sequence where KV heads cannot be dealt to "
            "more devices]",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=checks.MAX_INT,
            help="Tokens of prompt in each row. [default: the trained window]",
            show_default=False,
        ),
    ] = None,
    new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, max=checks.MAX_INT, help="Tokens to write.")
    ] = 128,
    batch: Annotated[int, typer.Option(min=1, max=checks.MAX_INT, help="Rows, over all devices.")] = 1,
    policy: PolicyOption = "full",
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            "-b",
            metavar="N|FRACTION",
            help="Cache slots per head, of a policy that is given without. [default: the policy's own]",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[,…]",
            help="float, int8, int4, or as-stored of a checkpoint. [default: float,int8,int4]",
            show_default=False,
        ),
    ] = None,
    embedding: EmbeddingOption = None,
    dtype: Annotated[DType, typer.Option(help="Type of floats, and of the cache.")] = "bfloat16",
    prefill_block: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=checks.MAX_INT,
            help="Tokens of the prompt to read at a time. [default: 4096 where the policy can]",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of each device, such as 14GB. [default: what JAX takes: 3/4 of a GPU's or XLA_PYTHON_CLIENT_MEM_FRACTION of it, 15/16 of a TPU's]",
            show_default=False,
        ),
    ] = None,
    compile: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Ask the compiler what the best way holds, where it is here: libtpu for TPUs, XLA for cpu. Takes minutes.",
        ),
    ] = False,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="Propose what loses least and fits: with the widest weights, else the largest budget.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Tell what fits some devices, and how fast it may be; neither they nor weights are needed.

    A row for each way to share the model among the devices and each kind of weights: what each device holds, the largest batch, and the
    milliseconds per token that its memory's bandwidth allows. `--model` is whatever `kvjax inspect` takes, a `config.json`, a
    hub id without its weights, or a shape such as llama-3.1-70b, which needs no connection.
    """
    from kvjax.conversion.checkpoint import KINDS
    from kvjax.planning import plan as planned
    from kvjax.runtime.memory import parse_bytes

    from .interruption import start_jax

    kinds: Any = None if weights is None else [spelt(kind) for kind in checks.listed(weights, "--weights")]
    for kind in kinds or ():
        if kind not in KINDS:
            raise typer.BadParameter(f"{kind!r}: give {', '.join(KINDS)}", param_hint="--weights")
    # Shares of kinds of heads are no hyperparameters.
    shares = "share_" in policy
    chosen: Any = policy if shares else read_policy(policy, budget)
    available = None if memory is None else parse_bytes(memory)
    start_jax(devices=True)
    with unwatched("Planning"):
        ways = planned(
            model,
            device=device,
            count=count,
            mesh=mesh,
            context=context,
            new_tokens=new_tokens,
            batch=batch,
            policy=chosen,
            budget=_budget(budget) if shares else None,
            weights=kinds,
            embedding=spelt(embedding),  # pyright: ignore[reportArgumentType]
            dtype=dtype,
            prefill_block=prefill_block,
            memory=available,
            compile=compile,
            fit=fit,
        )
    if as_json:
        console.print_json([_entry(way) for way in ways])
    elif ways:
        _print(ways)
    else:
        print("Nothing fits; give more devices, a shorter context, or another policy.")


def _budget(text: str | None) -> int | float | None:
    try:
        return None if text is None else parse_value(text, int | float)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}; {error}", param_hint="--budget") from None


def _entry(way: "Plan") -> dict[str, Any]:
    return dataclasses.asdict(way) | {"peak_bytes": way.peak_bytes, "fits": way.fits, "ms": way.ms}


def _print(ways: "tuple[Plan, ...]") -> None:
    first = ways[0]
    read = f"{first.block} at a time" if first.block else "whole"
    facts = {
        "Devices": f"{first.count} x {first.device}, {console.size(first.memory)} each",
        "Policy": first.policy,
        "Sequence": f"{first.context} + {first.new_tokens} tokens, the prompt read {read}",
        "Memory": "workspace by the compiler in the first row, else by formula"
        if first.memory_by == "compiler"
        else "by formula",
        "Time": "what a step reads over the bandwidth of the data sheet" + _sums(ways),
    }
    console.print_table(["", ""], list(facts.items()), headers=False)
    print()
    columns = [
        "Mesh",
        "Weights in",
        "Rows",
        "Weights",
        "Cache",
        "Workspace",
        "Peak",
        "Fits",
        "Largest batch",
        "ms/token",
    ]
    rows = [_row(way) for way in ways if way.refused is None]
    if rows:
        console.print_table(columns, rows, right=columns[2:7] + columns[8:])
    for note in dict.fromkeys(note for way in ways for note in way.notes):
        print(note)
    for way in ways:
        if way.refused is not None:
            print(f"{way.mesh}, {way.weights}: {way.refused}")


def _sums(ways: "tuple[Plan, ...]") -> str:
    if not any(way.sums for way in ways):
        return ""
    measured = any(way.sums and way.sums_ms is not None for way in ways)
    return ", and sums over devices as measured on two" if measured else "; sums over devices are not in it, unmeasured"


def _row(way: "Plan") -> list[str]:
    sizes = [way.weight_bytes, way.cache_bytes, way.workspace_bytes, way.peak_bytes]
    fits = "yes" if way.fits else f"{console.size(way.peak_bytes - way.memory)} too much"
    time = "unknown" if way.ms is None else f"{way.ms:.2f}"
    return [way.mesh, way.weights, str(way.batch), *map(console.size, sizes), fits, str(way.largest_batch), time]
