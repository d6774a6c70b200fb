"""`kvjax bench`: benchmark policies on this device."""

import contextlib
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import checks, console
from .options import CompilationCacheOption, DType, MeshOption
from .progress import bar

if TYPE_CHECKING:
    from kvjax.bench.case import Case
    from kvjax.bench.results import Row


def bench(
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Result file, JSON; rows that it already has are not measured again.",
        ),
    ] = Path("bench.json"),
    policies: Annotated[
        str, typer.Option(help="NAME[:BUDGET][,SETTING=VALUE]..., separated by commas.")
    ] = "full,streaming_llm:0.2,treekv:0.2",
    budgets: Annotated[
        str | None,
        typer.Option(
            "--budgets",
            "--budget",
            "-b",
            metavar="N|FRACTION[,…]",
            help="Budgets of policies without one; policies that take none, such as full and kivi, run once.",
            show_default=False,
        ),
    ] = None,
    shape: Annotated[str, typer.Option(help="Model shapes, separated by commas; weights are random.")] = "smollm2-135m",
    context: Annotated[str, typer.Option(help="Prompt tokens, separated by commas.")] = "2048",
    batch: Annotated[
        str, typer.Option(help='Batch sizes, separated by commas; "largest" finds how many sequences fit.')
    ] = "1",
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", "-n", min=1, max=checks.MAX_INT, help="Tokens to decode in each sequence.")
    ] = 320,
    skip_prefill: Annotated[
        bool,
        typer.Option(
            "--skip-prefill", help="Fill caches without prefilling a prompt; there is no time to first token (TTFT)."
        ),
    ] = False,
    dtype: Annotated[DType, typer.Option(help="Type of weights and cache.")] = "bfloat16",
    layers: Annotated[
        int | None,
        typer.Option(min=1, max=checks.MAX_INT, help="Use only this many layers of the model.", show_default=False),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            metavar="KIND[,…]",
            help="float, int8 or int4: kind of all matrices, including embedding and head; mxfp4: experts, beside floats.",
        ),
    ] = "float",
    bandwidth: Annotated[
        float | None,
        typer.Option(
            help="Bytes per second, for the bandwidth bound. [default: the device's data sheet]", show_default=False
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory to use, such as 8GB. [default: the device's]", show_default=False),
    ] = None,
    devices: Annotated[
        int, typer.Option(min=1, help="CUDA devices that share the cases, each with its own process.")
    ] = 1,
    budget_seconds: Annotated[
        float | None,
        typer.Option(
            help="Stop after this many seconds; remaining cases are left for the next run.", show_default=False
        ),
    ] = None,
    case_seconds: Annotated[float, typer.Option(help="Time limit for one case, in seconds.")] = 600,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Draw figures into this folder. Needs matplotlib.", show_default=False),
    ] = None,
    mesh: MeshOption = None,
    compilation_cache: CompilationCacheOption = True,
) -> None:
    """Measure prefill and decoding, and compare them with the bandwidth bound.

    For each policy, context, batch and model shape: time to first token (TTFT), time per output token (TPOT) in the
    compiled loop, latency, throughput, peak memory, cache memory, and compile time. The bandwidth bound is the bytes
    that a step has to read, divided by the memory bandwidth. Rows are written as they come; a failed row gives the
    reason. Over a mesh, bytes and bound are per device.
    """
    from kvjax.bench.runner import run
    from kvjax.runtime.memory import parse_bytes

    for value, option in (
        (bandwidth, "--bandwidth"),
        (budget_seconds, "--budget-seconds"),
        (case_seconds, "--case-seconds"),
    ):
        checks.positive(value, option)
    checks.destination(out)
    checks.destination(plot, folder=True)
    if plot is not None:
        checks.picture(plot / "shape.png")
    cases = read_cases(
        policies, budgets, shape, context, batch, new_tokens, skip_prefill, dtype, layers, weights, mesh or ""
    )
    if mesh and devices > 1:
        raise typer.BadParameter(
            "processes that see one device each have no mesh; omit one of the two", param_hint="--devices"
        )
    options = {
        "bandwidth": bandwidth,
        "memory": None if memory is None else parse_bytes(memory),
        "compilation_cache": compilation_cache,
    }
    command = [sys.executable, "-m", "kvjax.bench.worker", json.dumps(options)]
    done: list[Row] = []
    with bar() as begin:
        report = begin(f"Measuring {len(cases)} cases")

        def said(row: "Row") -> None:
            done.append(row)
            print_row(row)
            report(len(done), len(cases))

        rows = run(
            cases,
            {"kvjax": command},
            out,
            devices=devices,
            budget_seconds=budget_seconds,
            case_seconds=case_seconds,
            said=said,
        )
    if plot is not None:
        draw(rows, plot)


def read_cases(
    policies: str,
    budgets: str | None,
    shapes: str,
    contexts: str,
    batches: str,
    new_tokens: int,
    skip_prefill: bool,
    dtype: str,
    layers: int | None,
    weights: str = "float",
    mesh: str = "",
) -> "list[Case]":
    """All combinations of the comma-separated lists. Invalid values raise before anything runs."""
    if mesh:
        from kvjax.models.sharding import parse_mesh

        parse_mesh(mesh)
    from kvjax._util.suggestions import hint
    from kvjax.bench.case import KINDS, LARGEST, Case
    from kvjax.config import PRESETS

    numbers: dict[str, list[Any]] = {"context": [], "batch": []}
    for name, text in (("context", contexts), ("batch", batches)):
        for part in checks.listed(text, f"--{name}"):
            if name == "batch" and part == LARGEST:
                numbers[name].append(LARGEST)
            elif part.isdecimal() and 0 < int(part) <= checks.MAX_INT:
                numbers[name].append(int(part))
            else:
                raise typer.BadParameter(f"{part!r}; give whole numbers, 1 to {checks.MAX_INT}", param_hint=f"--{name}")
        checks.once(numbers[name], f"--{name}")
    chosen = _read_policies(policies, budgets)
    kinds = checks.listed(weights, "--weights")
    checks.once(kinds, "--weights")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise typer.BadParameter(
            f"{unknown[0]!r}; give any of {', '.join(KINDS)}.{hint(unknown[0], KINDS)}", param_hint="--weights"
        )
    cases = []
    for shape in checks.listed(shapes, "--shape"):
        if shape not in PRESETS:
            raise typer.BadParameter(
                f"{shape!r}; give any of {', '.join(PRESETS)}.{hint(shape, PRESETS)}", param_hint="--shape"
            )
        for context in numbers["context"]:
            for batch in numbers["batch"]:
                for kind, (policy, settings) in itertools.product(kinds, chosen):
                    case = Case(
                        policy,
                        settings,
                        context,
                        batch,
                        shape,
                        new_tokens,
                        not skip_prefill,
                        dtype,
                        layers,
                        kind,
                        mesh=mesh,
                    )
                    case.bound_policy()
                    cases.append(case)
    return cases


def _read_policies(policies: str, budgets: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Names and settings: each policy at each budget, unless it has its own budget, takes none, or is combined from others."""
    from kvjax.bench.case import read_policy
    from kvjax.policies import policy_class
    from kvjax.policies.text import split_policies

    wanted = None if budgets is None else checks.listed(budgets, "--budgets")
    found = []
    for text in split_policies(policies):
        name, settings = read_policy(text)
        if "(" in name:
            found.append((name, settings))
            continue
        cls = policy_class(name)
        if cls.about.takes_budget and wanted is not None and "budget" not in settings:
            found += [(cls.about.name, {**read_policy(f"{name}:{budget}")[1], **settings}) for budget in wanted]
            continue
        found.append((cls.about.name, settings))
    checks.once(found, "--policies")
    return found


def print_row(row: dict[str, Any]) -> None:
    """Print one result as a line."""
    from kvjax.bench.figures import title

    named = title(row) if row.get("budget_applies", True) else f"{title(row)} (no budget)"
    parts = [row["shape"], named, f"{row['context']} × {row.get('batch_run', row['batch'])}"]
    if "failed" in row:
        print(" · ".join([*parts, f"failed: {row['failed'].splitlines()[0] if row['failed'] else ''}"]), flush=True)
        return
    if row.get("ttft_s") is not None:
        parts.append(f"TTFT {row['ttft_s']:.3f} s")
    parts.append(f"{row['tpot_ms']:.3f} ms per token")
    if row.get("times_floor") is not None:
        parts.append(f"{row['times_floor']:.2f} × bandwidth bound")
    parts.append(f"{row['tokens_per_s']:.1f} tokens/s")
    parts.append(f"cache {console.size(row['cache_bytes'])}, peak {console.size(row['peak_bytes'])}")
    if row.get("compile_s") is not None:
        parts.append(f"compiled in {row['compile_s']:.1f} s")
    print(" · ".join(parts), flush=True)


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write the figures of the results, for each shape those that have data."""
    from kvjax.bench.figures import by_batch, by_context
    from kvjax.plots import save

    folder.mkdir(parents=True, exist_ok=True)
    for shape in dict.fromkeys(row["shape"] for row in rows):
        for name, figure in (("by-context", by_context), ("by-batch", by_batch)):
            with contextlib.suppress(ValueError):
                save(figure([row for row in rows if row["shape"] == shape]), folder / f"{shape}-{name}.png")
