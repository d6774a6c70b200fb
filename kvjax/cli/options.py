"""Options that several commands share."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvjax._util.standard_streams import reason
from kvjax._util.texts import read_text
from kvjax._util.user_files import TEXT_BYTES

from . import checks, console
from .interruption import start_jax
from .processes import join_processes
from .progress import unwatched

if TYPE_CHECKING:
    from kvjax.models import Params

DType = Literal["float32", "bfloat16", "float16"]
Weights = Literal["float", "int8", "int4", "as-stored"]

PromptArgument = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="Text to continue; - or nothing reads standard input.", show_default=False),
]
PromptFileOption = Annotated[
    Path | None, typer.Option("--prompt-file", "-f", help="Read the prompt from a file.", show_default=False)
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="SRC",
        help="Hugging Face directory or hub id, GGUF file, or Orbax checkpoint. [default: SmolLM2-135M-Instruct]",
        show_default=False,
    ),
]
PolicyOption = Annotated[
    str, typer.Option("--policy", "-p", help="How the KV cache is compressed; see `kvjax policies`.")
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        "-b",
        metavar="N|FRACTION",
        help="Cache slots per head: tokens (256), or a fraction of prompt + new tokens (0.2). [default: the policy's own]",
        show_default=False,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Set a hyperparameter of the policy; repeatable.", show_default=False
    ),
]
DTypeOption = Annotated[
    DType | None,
    typer.Option(
        "--dtype", help="Type of the weights. [default: float32 on CPU, else the checkpoint's own]", show_default=False
    ),
]
WeightsOption = Annotated[
    Weights | None,
    typer.Option(
        "--weights",
        help="Kind of the layers' matrices in memory; as-stored keeps GGUF, GPTQ, AWQ and compressed-tensors. [default: floats from a GGUF file, "
        "else as stored]",
        show_default=False,
    ),
]
EmbeddingOption = Annotated[
    Weights | None,
    typer.Option(
        "--embedding",
        help="Kind of embedding and head. [default: as stored if weights are, else float]",
        show_default=False,
    ),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="SRC",
        help="Tokenizer that replaces the model's: a directory with tokenizer.json, a GGUF file, or a hub id.",
        show_default=False,
    ),
]
PrefillBlockOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=checks.MAX_INT,
        help="Chunked prefill: tokens per block. [default: whole prompts, if they fit]",
        show_default=False,
    ),
]
MeshOption = Annotated[
    str | None,
    typer.Option(
        metavar="AXES",
        help="Mesh of devices, such as model=4 or data=2,model=4: data shards the batch, model the model, and sequence the cache's slots.",
        show_default=False,
    ),
]
DistributedOption = Annotated[
    bool,
    typer.Option(
        "--distributed",
        help="This is one of several processes that share the mesh, started by a launcher that JAX knows (Slurm, MPI, Kubernetes, TPU pods) or "
        "with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. Only the first prints.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")]
CompilationCacheOption = Annotated[
    bool,
    typer.Option(
        "--compilation-cache/--no-compilation-cache",
        envvar="KVJAX_COMPILATION_CACHE",
        help="Keep compiled programs on disk, so that the next run starts faster.",
    ),
]


def read_model(
    source: str | None,
    dtype: str | None,
    compilation_cache: bool,
    weights: str | None = None,
    embedding: str | None = None,
    mesh: str | None = None,
    distributed: bool = False,
    tokenizer: str | None = None,
) -> "Params":
    """Load the model of a command. Compiled programs are kept on disk unless the user disables it."""
    from kvjax.conversion import load
    from kvjax.models.sharding import get_mesh
    from kvjax.runtime.compilation_cache import VARIABLE, keep_unless_refused

    if distributed:
        if mesh is None:
            raise typer.BadParameter(
                "processes share a mesh; give one of all their devices, such as --mesh data=2",
                param_hint="--distributed",
            )
        join_processes()
    start_jax(devices=True)
    os.environ[VARIABLE] = str(int(compilation_cache))
    keep_unless_refused()
    if mesh is not None:
        get_mesh(mesh)  # validated before anything is downloaded
    with unwatched("Loading the model"):
        matrices, ends = spelt(weights), spelt(embedding)
        show = False if console.is_quiet() else None
        return load(
            source, dtype=dtype, weights=matrices, embedding=ends, tokenizer=tokenizer, mesh=mesh, progress=show
        )


def spelt(weights: str | None) -> str | None:
    """Kind of weights, spelled as in Python."""
    return None if weights is None else weights.replace("-", " ")


def read_prompt(prompt: str | None, file: Path | None, *, empty: bool = False) -> str:
    """Read the prompt. One newline at the end of a file or stream is dropped, as editors and `echo` add it.

    Args:
        prompt: the prompt as an argument; None or "-" reads standard input.
        file: file with the prompt.
        empty: whether the prompt may be empty, as chat messages may.

    Raises:
        ValueError: the prompt is empty, or not text.
        OSError: the file cannot be read.
    """
    text = _read_prompt(prompt, file)
    if not text and not empty:
        raise ValueError("the prompt is empty; give a text to continue")
    return text


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if file is not None:
        if prompt is not None:
            raise typer.BadParameter(
                "give the prompt as an argument or as a file, not both", param_hint="--prompt-file"
            )
        return read_text(file).removesuffix("\n")
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("give a text to continue, --prompt-file, or standard input", param_hint="PROMPT")
    try:
        text = sys.stdin.read(TEXT_BYTES + 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input: not {error.encoding} text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise OSError(error.errno, f"{reason(error)}; give the prompt as an argument", "standard input") from None
    if len(text) > TEXT_BYTES:
        raise ValueError(f"standard input: more than {TEXT_BYTES} characters; give a shorter prompt")
    return text.removesuffix("\n")
