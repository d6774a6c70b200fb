"""`kvjax generate`: continue a text."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from . import checks, console
from .hyperparameters import read_policy
from .options import (
    BudgetOption,
    JsonOption,
    MeshModelOptions,
    PolicyOption,
    PrefillBlockOption,
    PromptArgument,
    PromptFileOption,
    SetOption,
    read_prompt,
)
from .progress import bar, waiting

if TYPE_CHECKING:
    from kvjax.models import Params
    from kvjax.policies import Policy
    from kvjax.runtime.generation import Generation


def generate(
    prompt: PromptArgument = None,
    prompt_file: PromptFileOption = None,
    *,
    source: MeshModelOptions,
    policy: PolicyOption = "full",
    budget: BudgetOption = None,
    settings: SetOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", max=checks.MAX_INT, help="Maximum number of tokens to generate.")
    ] = 128,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_k: Annotated[
        int | None,
        typer.Option(max=checks.MAX_INT, help="Sample from this many of the most probable tokens.", show_default=False),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the smallest set of most probable tokens with this total probability.", show_default=False
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from tokens with at least this fraction of the highest probability.", show_default=False
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Sampling seed; the same seed gives the same text.")
    ] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this string; repeatable.", show_default=False)
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a message, in the model's template.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message before it; implies --chat.", show_default=False)
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue past the model's end token.")] = False,
    prefill_block: PrefillBlockOption = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print the summary line even if standard error is not a terminal.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a text.

    A policy keeps the KV cache within a budget. Text is printed to standard output as it is generated.
    """
    from kvjax._util.arguments import amount
    from kvjax.policies.unbound import check_unbound
    from kvjax.runtime.sampling import make_sampler

    chosen = read_policy(policy, budget, settings)  # before the model is loaded, so that errors appear at once
    checks.check_temperature(temperature)
    make_sampler(temperature, top_k, top_p, min_p)
    check_unbound(chosen, prefill_block, over_mesh=source.mesh is not None)
    amount("max_new_tokens", max_new_tokens)
    if not all(stop or ()):
        raise ValueError(f"stop={stop}; give strings that are not empty")
    text = read_prompt(prompt, prompt_file, empty=chat or system is not None)
    params = source.load()
    request: Any = text
    if chat or system is not None:
        request = [{"role": "user", "content": text}]
        if system is not None:
            request.insert(0, {"role": "system", "content": system})
    options: dict[str, Any] = {
        "policy": chosen,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or (),
        "ignore_eos": ignore_eos,
        "prefill_block": prefill_block,
    }
    if as_json:
        _print_result(params, source.model, chosen, request, options)
    else:
        _print_text(params, text, request, options, verbose)


def _print_result(
    params: "Params", source: str | None, policy: "Policy", request: Any, options: dict[str, Any]
) -> None:
    import kvjax

    with waiting("Generating"):
        result: Generation = kvjax.generate(params, request, **options)
    stats = result.stats
    console.print_json(
        {
            "text": result.text,
            "tokens": result.tokens,
            "logprobs": result.logprobs,
            "stop_reason": result.stop_reason,
            "model": {"source": source, "family": params.config.family, "dtype": params.dtype.name},
            "policy": {"name": policy.info.name, **dataclasses.asdict(policy)},
            "stats": dataclasses.asdict(stats)
            | {
                "prefill_tokens_per_second": stats.prefill_tokens_per_second,
                "decode_tokens_per_second": stats.decode_tokens_per_second,
            },
        }
    )


def _print_text(params: "Params", text: str, request: Any, options: dict[str, Any], verbose: bool) -> None:
    import kvjax

    # Both programs are compiled before the second piece. A bar must not be drawn into a line of text.
    with bar() as begin:
        pieces = _Pieces(kvjax.stream(params, request, **options, progress=begin("Compiling and reading")))
        written = iter(pieces)
        opening = list(itertools.islice(written, 2))
    if console.on_terminal():
        console.output().print(
            Text(console.shown(text), "dim"), end="" if isinstance(request, str) else "\n\n", soft_wrap=True
        )
    for piece in itertools.chain(opening, written):
        print(piece, end="", flush=True)
    print(flush=True)
    errors = console.errors()
    if verbose or errors.is_terminal:
        errors.print(Text(_summary(pieces.result), "dim"), soft_wrap=True)


class _Pieces:
    """Iterates over the pieces of `kvjax.stream`. After the last piece, `result` is the `Generation`."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __iter__(self) -> Iterator[str]:
        self.result: Generation = yield from self._source


def _summary(result: "Generation") -> str:
    stats = result.stats
    parts = [f"{stats.prompt_tokens} + {stats.new_tokens} tokens"]
    if stats.prefill_block is not None:
        parts.append(f"prompt prefilled {stats.prefill_block} tokens at a time")
    if stats.decode_seconds > 0:
        parts.append(f"{stats.decode_tokens_per_second:.1f} tokens/s")
    on_host = f" and {console.size(stats.host_cache_bytes)} on the host" if stats.host_cache_bytes else ""
    on_each = f" on each of {stats.devices} devices" if stats.devices > 1 else ""
    parts.append(
        f"cache {console.size(stats.cache_bytes)}{on_host}, full {console.size(stats.full_cache_bytes)}{on_each}"
    )
    if stats.head_copies > 1:
        parts.append(f"replicated on {stats.head_copies} of them")
    if stats.repeated_cache_bytes:
        parts.append(f"{console.size(stats.repeated_cache_bytes)} of it replicated on {stats.slot_devices}")
    parts.append(f"reads {console.size(stats.step_bytes_read)} per step")
    if stats.kept_shares is not None:
        parts.append(f"keeps {100 * stats.kept_shares[0]:.0f} % of tokens")
    if stats.hit_rate is not None:
        parts.append(f"{100 * stats.hit_rate:.0f} % of selected tokens on the device")
    if stats.compile_seconds > 0:
        parts.append(f"compiled in {stats.compile_seconds:.1f} s")
    return " · ".join([*parts, f"ended by {result.stop_reason}"])
