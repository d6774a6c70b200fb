"""Models from the Hugging Face hub: the safetensors weights, the configuration and the tokenizer, and nothing else.

The hub's client is imported when something is asked of it: it takes as long as a third of the rest, and most models lie on the disk.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.config import ModelConfig

from .checkpoint import Checkpoint, StoredTensor
from .errors import CheckpointError
from .huggingface import FLOAT_OF, INDEX, INT_OF, checkpoint_of, open_directory, read_config, shard_names
from .progress import watched

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""What a model's id looks like."""

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
"""Weight files that are fetched; pickles never are."""

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
"""Files of a tokenizer."""

COMPANIONS = ("config.json", "generation_config.json", *TOKENIZER)
"""Small files that are fetched."""

_ELSEWHERE = ("*/*", "consolidated*")
"""Copies of the weights in other layouts, which some repositories carry too."""


def fetch(
    repo_id: str, *, revision: str | None = None, token: str | bool | None = None, progress: bool | None = None
) -> Path:
    """Download a model, or find it in the hub client's own cache; ``HF_HUB_OFFLINE`` and ``HF_ENDPOINT`` hold.

    Args:
        repo_id: ``owner/name``.
        revision: branch, tag or commit; None is the main branch.
        token: see `kvjax.conversion.load`.
        progress: see `kvjax.conversion.load`.

    Raises:
        CheckpointError: no such model, no access, no connection, or no safetensors weights.
    """
    path = _download(repo_id, [*COMPANIONS, *WEIGHTS], revision, token, progress)
    if not any(path.glob("*.safetensors")):
        raise CheckpointError(_no_weights(repo_id))
    return path


def open_headers(
    repo_id: str, *, revision: str | None = None, token: str | bool | None = None, progress: bool | None = None
) -> Checkpoint:
    """Describe a model on the hub by the headers of its weight files, of which only the first kilobytes are fetched.

    Args:
        repo_id: ``owner/name``.
        revision: branch, tag or commit; None is the main branch.
        token: see `kvjax.conversion.load`.
        progress: see `kvjax.conversion.load`.

    Raises:
        CheckpointError: as `fetch`, or a damaged header.
    """
    import huggingface_hub
    import huggingface_hub.errors

    path = _download(repo_id, [*COMPANIONS, INDEX], revision, token, progress)
    names = ["model.safetensors"]
    if (path / INDEX).exists():
        names = shard_names(path / INDEX)
    if all((path / name).exists() for name in names):
        return open_directory(path)
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        try:
            header = huggingface_hub.parse_safetensors_file_metadata(repo_id, name, revision=revision, token=token)
        except huggingface_hub.errors.EntryNotFoundError as error:
            raise CheckpointError(_no_weights(repo_id)) from error
        except Exception as error:  # the client and the libraries under it share no base class
            raise CheckpointError(f"{repo_id}: header of {name} cannot be read ({_first_line(error)})") from error
        for tensor, info in header.tensors.items():
            begin, end = info.data_offsets
            tensors[tensor] = StoredTensor(
                tuple(info.shape),
                {**FLOAT_OF, **INT_OF}.get(info.dtype, info.dtype),
                end - begin,
                path / name,
                _not_fetched,
            )
    return checkpoint_of(path, tensors, read_config(path), headers_only=True)


def fetch_config(
    repo_id: str, *, revision: str | None = None, token: str | bool | None = None, progress: bool | None = None
) -> ModelConfig:
    """The shape of a model on the hub, of which nothing but the configuration is fetched.

    Args:
        repo_id: ``owner/name``.
        revision: branch, tag or commit; None is the main branch.
        token: see `kvjax.conversion.load`.
        progress: see `kvjax.conversion.load`.

    Raises:
        CheckpointError: no such model, no access, no connection, or an unknown architecture.
    """
    return read_config(_download(repo_id, ["config.json", "generation_config.json"], revision, token, progress))


def fetch_tokenizer(repo_id: str, *, token: str | bool | None = None, progress: bool | None = None) -> Path:
    """Download a tokenizer alone.

    Args:
        repo_id: ``owner/name``.
        token: see `kvjax.conversion.load`.
        progress: see `kvjax.conversion.load`.

    Raises:
        CheckpointError: no such repository, no access or no connection.
    """
    return _download(repo_id, list(TOKENIZER), None, token, progress)


def _download(
    repo_id: str, patterns: list[str], revision: str | None, token: str | bool | None, progress: bool | None
) -> Path:
    import huggingface_hub
    from huggingface_hub.utils import tqdm as hub_bar

    class Silent(hub_bar):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))

    try:
        path = huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            token=token,
            allow_patterns=patterns,
            ignore_patterns=list(_ELSEWHERE),
            etag_timeout=5,
            tqdm_class=hub_bar if watched(progress) else Silent,
        )
    except Exception as error:  # the client and the libraries under it share no base class
        raise CheckpointError(f"{repo_id}: not available from the Hugging Face hub ({_first_line(error)})") from error
    return Path(path)


def _not_fetched(start: int, out: np.ndarray) -> None:
    raise CheckpointError("only the headers of this model were fetched; load it to have its weights")


def _no_weights(repo_id: str) -> str:
    return f"{repo_id}: the repository has no safetensors weights; pickled ones are not downloaded"


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
