"""`kvjax convert`: convert a checkpoint to another format."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from . import console
from .options import DTypeOption, EmbeddingOption, TokenizerOption, WeightsOption, spelt


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Hugging Face directory or hub id, GGUF file, or Orbax checkpoint.")
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Directory to write.")],
    format: Annotated[
        Literal["orbax", "safetensors"],
        typer.Option(help="orbax loads fastest; transformers can load safetensors, unless they are in 8 or 4 bits."),
    ] = "orbax",
    dtype: DTypeOption = None,
    weights: WeightsOption = None,
    embedding: EmbeddingOption = None,
    tokenizer: TokenizerOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST if it is a model.")] = False,
) -> None:
    """Write a model as Orbax or safetensors.

    DST appears only when it is complete.
    """
    from kvjax.conversion import convert as write

    write(
        source,
        destination,
        format=format,
        dtype=dtype,
        weights=spelt(weights),
        embedding=spelt(embedding),
        tokenizer=tokenizer,
        progress=not console.is_quiet(),
        overwrite=overwrite,
    )
    shown = console.errors()
    if shown.is_terminal:
        shown.print(f"wrote {destination}", soft_wrap=True)
