"""`kvjax inspect`: describe a model and the memory of its cache."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import checks, console
from .options import DType, EmbeddingOption, JsonOption, WeightsOption, spelt
from .progress import bar

if TYPE_CHECKING:
    from kvjax.config import MLPConfig, ModelConfig, MoEConfig
    from kvjax.conversion import Description


def inspect(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SRC",
            help="Hugging Face directory or hub id, GGUF file, or Orbax checkpoint. [default: SmolLM2-135M-Instruct]",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory to fit weights and cache in, such as 8GB.", show_default=False),
    ] = None,
    dtype: Annotated[
        DType | None,
        typer.Option(
            help="Type of weights and cache. [default: the checkpoint's own, bfloat16 if quantised]", show_default=False
        ),
    ] = None,
    weights: WeightsOption = None,
    embedding: EmbeddingOption = None,
    prompt_len: Annotated[
        int | None,
        typer.Option(
            min=0, max=checks.MAX_INT, help="Prompt tokens. [default: the trained window]", show_default=False
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=0, max=checks.MAX_INT, help="Tokens to write.")
    ] = 128,
    as_json: JsonOption = False,
) -> None:
    """Describe a model, and the memory of its cache.

    Shows architecture, parameters, and the memory that each policy needs for one sequence. Only headers are read.
    `--memory` counts the weights and the cache of one sequence; activations of a prompt come in addition.
    """
    from kvjax.conversion import describe
    from kvjax.runtime.memory import parse_bytes

    available = None if memory is None else parse_bytes(memory)
    found = describe(source, dtype=dtype, weights=spelt(weights), embedding=spelt(embedding))
    with bar() as begin:
        report = _report(found, prompt_len, max_new_tokens, available, begin("Sizing caches"))
    if as_json:
        console.print_json(report)
    else:
        _print(report, found.config)


def _report(
    model: "Description",
    prompt_len: int | None,
    max_new_tokens: int,
    memory: int | None,
    progress: Callable[[int, int], Any],
) -> dict[str, Any]:
    import jax.numpy as jnp

    from kvjax.conversion.config_json import config_to_json
    from kvjax.policies import PolicyError, policies
    from kvjax.runtime.memory import largest_cache

    config = model.config
    dtype, weights = model.dtype, model.weight_bytes
    itemsize = jnp.dtype(dtype).itemsize
    prompt_len = max(config.context_length - max_new_tokens, 0) if prompt_len is None else prompt_len
    per_token = config.cache_bytes_per_token(itemsize)
    caches = []
    for done, cls in enumerate(policies().values()):
        progress(done, len(policies()))
        policy = cls()
        entry: dict[str, Any] = {"policy": cls.about.name, **dataclasses.asdict(policy)}
        caches.append(entry)
        try:
            policy = policy.for_model(config)
        except PolicyError as error:  # it needs a profile of this model's heads, which is missing
            entry |= {"cache_bytes": None, "fits": None, "refused": str(error)}
            continue
        entry["cache_bytes"] = policy.nbytes(config, 1, prompt_len, max_new_tokens, dtype)
        if memory is not None:
            entry["fits"] = largest_cache(cls(), config, max(memory - weights, 0), dtype)
    return {
        "source": str(model.source),
        "format": model.format,
        "config": config_to_json(config),
        "context_length": config.context_length,
        "parameters": model.parameters,
        "stored_bytes": model.nbytes,
        "stored_types": dict(model.dtypes),
        "tokenizer": model.tokenizer is not None,
        "chat_template": model.tokenizer is not None and model.tokenizer.chat_template is not None,
        "dtype": dtype,
        "weight_bytes": weights,
        "weight_types": [dtype, *model.quantised],
        "cache_bytes_per_token": per_token,
        "full_cache_bytes_at_window": config.cache_bytes(config.context_length, itemsize),
        "prompt_len": prompt_len,
        "max_new_tokens": max_new_tokens,
        "memory": memory,
        "caches": caches,
    }


def _print(report: dict[str, Any], config: "ModelConfig") -> None:
    dtype = report["dtype"]
    windows = sorted({window for window in config.windows if window is not None})
    widths = " and ".join(dict.fromkeys(_width(kind.mlp) for kind in config.kinds))
    sliding = f", sliding window {', '.join(map(str, windows))}" if windows else ""
    stored = ", ".join(f"{name} {console.size(count)}" for name, count in report["stored_types"].items())
    tokenizer = "with" if report["tokenizer"] else "without"
    chat = "with" if report["chat_template"] else "without"
    facts = {
        "Source": f"{report['source']} ({report['format']})",
        "Architecture": f"{config.family}: {config.num_layers} layers of width {config.hidden_size}, MLP {widths}, vocabulary {config.vocab_size}",
        "Attention": f"{config.heads_text}{sliding}",
        "Trained window": f"{report['context_length']} tokens",
        "Text": f"{tokenizer} tokenizer, {chat} chat template",
        "Parameters": f"{report['parameters']:,}",
        "Stored": f"{console.size(report['stored_bytes'])} ({stored})",
        "Weights": f"{console.size(report['weight_bytes'])} as {' and '.join(report['weight_types'])}",
        "Full cache": f"{console.size(report['cache_bytes_per_token'])} per token as {dtype}, "
        f"{console.size(report['full_cache_bytes_at_window'])} at the trained window",
    }
    console.print_table(["", ""], list(facts.items()), headers=False)
    print()
    columns = ["Policy", f"Cache at {report['prompt_len']} + {report['max_new_tokens']} tokens"]
    caches = [entry for entry in report["caches"] if "refused" not in entry]
    rows = [[_named(entry), console.size(entry["cache_bytes"])] for entry in caches]
    if report["memory"] is not None:
        columns.append(f"Fits in {console.size(report['memory'])}")
        for row, entry in zip(rows, caches, strict=True):
            row.append(_fits(entry))
    console.print_table(columns, rows, right=columns[1:])
    for entry in report["caches"]:
        if "refused" in entry:
            print(entry["refused"])


def _width(mlp: "MLPConfig | MoEConfig") -> str:
    experts = getattr(mlp, "experts", None)
    return str(mlp.width) if experts is None else f"of {experts} experts of {mlp.width}"


def _named(entry: dict[str, Any]) -> str:
    return f"{entry['policy']} (budget {entry['budget']})" if "budget" in entry else entry["policy"]


def _fits(entry: dict[str, Any]) -> str:
    if not entry["fits"]:
        return "nothing"
    return f"budget {entry['fits']}" if "budget" in entry else f"{entry['fits']} tokens in all"
