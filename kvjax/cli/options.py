"""Options that several commands share."""

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
        help="Type of the layers' matrices in memory; as-stored keeps GGUF, GPTQ, AWQ and compressed-tensors. [default: float for a GGUF file, "
        "otherwise as-stored]",
        show_default=False,
    ),
]
EmbeddingOption = Annotated[
    Weights | None,
    typer.Option(
        "--embedding",
        help="Type of embedding and head in memory. [default: as-stored if --weights is, otherwise float]",
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
        help="Tokens of a block for chunked prefill; the policy compresses after each block. [default: whole prompts, if they fit in memory]",
        show_default=False,
    ),
]
MeshOption = Annotated[
    str | None,
    typer.Option(
        metavar="AXES",
        help="Devices to run over, such as model=4 or data=2,model=4. Sequences are sharded along data, the model along model, slots of the "
        "cache along sequence.",
        show_default=False,
    ),
]
DistributedOption = Annotated[
    bool,
    typer.Option(
        "--distributed",
        help="Run as one of several processes that share the mesh, started by a launcher that JAX supports (Slurm, MPI, Kubernetes, TPU pods) or "
        "with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. Only the first process prints.",
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


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Which model a command loads."""

    model: ModelOption = None
    tokenizer: TokenizerOption = None
    dtype: DTypeOption = None
    compilation_cache: CompilationCacheOption = True

    def load(self) -> "Params":
        """Load the model. Compiled programs are stored on disk, unless the user has disabled that."""
        return self._load()

    def _load(self, **more: Any) -> "Params":
        from kvjax.conversion import load
        from kvjax.models.sharding import get_mesh
        from kvjax.runtime.disk_cache import VARIABLE, keep_unless_refused

        start_jax(devices=True)
        os.environ[VARIABLE] = str(int(self.compilation_cache))
        keep_unless_refused()
        if more.get("mesh") is not None:
            get_mesh(more["mesh"])  # before anything is downloaded
        with unwatched("Loading the model"):
            show = False if console.is_quiet() else None
            return load(self.model, dtype=self.dtype, tokenizer=self.tokenizer, progress=show, **more)


@dataclasses.dataclass(frozen=True)
class MeshModelOptions(ModelOptions):
    """Which model a command loads, how its weights are stored, and over which devices it runs."""

    weights: WeightsOption = None
    embedding: EmbeddingOption = None
    mesh: MeshOption = None
    distributed: DistributedOption = False

    def load(self) -> "Params":
        """Load the model, on the mesh if there is one."""
        if self.distributed:
            if self.mesh is None:
                raise typer.BadParameter(
                    "processes share a mesh; give one of all their devices, such as --mesh data=2",
                    param_hint="--distributed",
                )
            join_processes()
        return self._load(weights=spelt(self.weights), embedding=spelt(self.embedding), mesh=self.mesh)


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
    return read_standard_input("give the prompt as an argument").removesuffix("\n")


def read_standard_input(instead: str, *, line: bool = False) -> str:
    """Read standard input.

    Args:
        instead: what to do where it is closed, for messages.
        line: whether to read one line, with its end, instead of everything.

    Raises:
        ValueError: it is not text, or has more than `TEXT_BYTES` characters.
        OSError: it cannot be read.
    """
    read = sys.stdin.readline if line else sys.stdin.read
    try:
        text = read(TEXT_BYTES + 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input: not {error.encoding} text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise OSError(error.errno, f"{reason(error)}; {instead}", "standard input") from None
    if len(text) > TEXT_BYTES:
        within = " in a line" if line else ""
        raise ValueError(f"standard input: more than {TEXT_BYTES} characters{within}; give a shorter prompt")
    return text
