"""`kvjax plan`: whether a model, a policy and a context fit some devices, and how fast decoding can be."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax._util.settings import parse_value
from kvjax.devices import PRESETS

from . import checks, console
from .hyperparameters import read_policy
from .options import DType, EmbeddingOption, JsonOption, ModelOption, PolicyOption, spelt
from .progress import unwatched

if TYPE_CHECKING:
    from kvjax.planning import Plan


def plan(
    device: Annotated[
        str,
        typer.Option("--device", help=f"{', '.join(PRESETS)}, or cpu with --memory."),
    ],
    model: ModelOption = None,
    count: Annotated[int, typer.Option(min=1, max=4096, help="Number of devices, of the same kind on one host.")] = 1,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXES",
            help="Mesh of the devices, such as data=2,model=4. [default: every mesh, with sequence where KV heads cannot be sharded over "
            "more devices]",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=checks.MAX_INT,
            help="Prompt tokens per sequence. [default: the trained window]",
            show_default=False,
        ),
    ] = None,
    new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, max=checks.MAX_INT, help="Tokens to write.")
    ] = 128,
    batch: Annotated[int, typer.Option(min=1, max=checks.MAX_INT, help="Number of sequences over all devices.")] = 1,
    policy: PolicyOption = "full",
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            "-b",
            metavar="N|FRACTION",
            help="Cache slots per head, for a policy without a budget. [default: the policy's own]",
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
    dtype: Annotated[DType, typer.Option(help="Type of unquantised weights and of the cache.")] = "bfloat16",
    prefill_block: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=checks.MAX_INT,
            help="Chunked prefill: tokens per block. [default: 4096 if the policy supports it]",
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
            help="Compile the best way for XLA's memory analysis, if the compiler is installed: libtpu for TPUs, XLA for cpu. Takes minutes.",
        ),
    ] = False,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="Propose one way that fits, with the least quantisation, or else the largest budget.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Estimate what fits some devices, and how fast decoding can be. Needs neither the devices nor weights.

    There is one row for each mesh and kind of weights: memory on each device, the largest batch, and the milliseconds
    per token that the memory bandwidth allows. `--model` accepts whatever `kvjax inspect` does, a `config.json`, a hub
    id without its weights, or a preset such as llama-3.1-70b, which needs no connection.
    """
    from kvjax.conversion.checkpoint import KINDS
    from kvjax.planning import plan as planned
    from kvjax.runtime.memory import parse_bytes

    from .interruption import start_jax

    kinds: Any = None if weights is None else [spelt(kind) for kind in checks.listed(weights, "--weights")]
    for kind in kinds or ():
        if kind not in KINDS:
            raise typer.BadParameter(f"{kind!r}: give {', '.join(KINDS)}", param_hint="--weights")
    # Fractions of kinds of heads are not hyperparameters.
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
        "Sequence": f"{first.context} + {first.new_tokens} tokens, prompt prefilled {read}",
        "Memory": "workspace by the compiler in the first row, else by formula"
        if first.memory_by == "compiler"
        else "by formula",
        "Time": "bytes that a step reads over the bandwidth of the data sheet" + _sums(ways),
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
    return (
        ", and all-reduces as measured on two"
        if measured
        else "; all-reduces are not included, as they are not measured"
    )


def _row(way: "Plan") -> list[str]:
    sizes = [way.weight_bytes, way.cache_bytes, way.workspace_bytes, way.peak_bytes]
    fits = "yes" if way.fits else f"{console.size(way.peak_bytes - way.memory)} too much"
    time = "unknown" if way.ms is None else f"{way.ms:.2f}"
    return [way.mesh, way.weights, str(way.batch), *map(console.size, sizes), fits, str(way.largest_batch), time]
