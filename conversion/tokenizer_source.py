"""Finds a tokenizer that replaces the checkpoint's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from kvjax.config import ModelConfig

from . import hub
from .errors import CheckpointError, shortened
from .gguf_file import open_gguf
from .text_files import present
from .tokenizer import Tokenizer

TokenizerSource: TypeAlias = Tokenizer | str | Path
"""A tokenizer; a directory with a `tokenizer.json`, or that file; a GGUF file; or a hub id."""


def find_tokenizer(
    source: TokenizerSource, *, token: str | bool | None = None, progress: bool | None = None
) -> Callable[[ModelConfig], Tokenizer]:
    """Find a tokenizer, downloading it if necessary.

    Args:
        source: the tokenizer, or where it is.
        token: see `kvjax.conversion.load`.
        progress: see `kvjax.conversion.load`.

    Returns:
        A function that reads the tokenizer for a model, and warns of tokens that the model does not know.

    Raises:
        CheckpointError: no tokenizer is found.
        ValueError: `source` has an unsupported type.
    """
    if isinstance(source, Tokenizer):
        return lambda config: source.within(config.vocab_size, "tokenizer")
    if not isinstance(source, str | Path):
        raise ValueError(f"tokenizer={shortened(source)}; give a path, a hub id or a kvjax.conversion.Tokenizer")
    path = Path(source).expanduser()
    try:
        if not path.exists() and hub.ID.fullmatch(str(source)):
            path = hub.fetch_tokenizer(str(source), token=token, progress=progress)
        if path.name == "tokenizer.json" and present(path):
            path = path.parent
        if path.is_dir():
            ggufs = sorted(path.glob("*.gguf"))
            if len(ggufs) == 1 and not present(path / "tokenizer.json"):
                path = ggufs[0]
        if path.is_dir() and present(path / "tokenizer.json"):
            return lambda config: _known(
                Tokenizer.from_directory(path, eos=config.eos, bos=config.bos, vocab_size=config.vocab_size), path
            )
        if path.suffix == ".gguf" and present(path):
            found = open_gguf(path).tokenizer
            return lambda config: _known(found(), path).within(config.vocab_size, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    raise CheckpointError(
        f"tokenizer={shortened(str(source))}: no tokenizer there; give a directory with a tokenizer.json, a GGUF file, or a hub id, "
        "which looks like owner/name"
    )


def _known(tokenizer: Any, path: Path) -> Tokenizer:
    if tokenizer is None:
        raise CheckpointError(f"{path}: its tokenizer is missing or of an unknown kind")
    return tokenizer
