"""Downloads models from the Hugging Face hub: safetensors weights, configuration and tokenizer only.

The hub's client is imported when it is first used. Its import takes a third as long as the rest of kvjax, and most
models are local.
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
"""Pattern of a model's id."""

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
"""Weight files that are downloaded. Pickles never are."""

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
"""Files of a tokenizer."""

COMPANIONS = ("config.json", "generation_config.json", *TOKENIZER)
"""Small files that are downloaded."""

_ELSEWHERE = ("*/*", "consolidated*")
"""Copies of the weights in other layouts, which some repositories also contain."""


def fetch(
    repo_id: str, *, revision: str | None = None, token: str | bool | None = None, progress: bool | None = None
) -> Path:
    """Download a model, or find it in the hub client's own cache.

    The client's variables ``HF_HUB_OFFLINE`` and ``HF_ENDPOINT`` apply.

    Args:
        repo_id: ``owner/name``.
        revision: branch, tag or commit; None is the main branch.
        token: see `kvjax.conversion.load`.
        progress: see `kvjax.conversion.load`.

    Returns:
        The local directory.

    Raises:
        CheckpointError: the model does not exist, is not accessible, has no safetensors weights, or there is no
            connection.
    """
    path = _download(repo_id, [*COMPANIONS, *WEIGHTS], revision, token, progress)
    if not any(path.glob("*.safetensors")):
        raise CheckpointError(_no_weights(repo_id))
    return path


def open_headers(
    repo_id: str, *, revision: str | None = None, token: str | bool | None = None, progress: bool | None = None
) -> Checkpoint:
    """Open a model on the hub from the headers of its weight files. Only the first kilobytes of each file are
    downloaded.

    Args:
        repo_id: ``owner/name``.
        revision: branch, tag or commit; None is the main branch.
        token: see `kvjax.conversion.load`.
        progress: see `kvjax.conversion.load`.

    Raises:
        CheckpointError: as `fetch`, or a header is damaged.
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
        except Exception as error:  # the client and its libraries share no base class
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
    """Download the configuration of a model on the hub, and nothing else.

    Args:
        repo_id: ``owner/name``.
        revision: branch, tag or commit; None is the main branch.
        token: see `kvjax.conversion.load`.
        progress: see `kvjax.conversion.load`.

    Raises:
        CheckpointError: the model does not exist, is not accessible, has an unknown architecture, or there is no
            connection.
    """
    return read_config(_download(repo_id, ["config.json", "generation_config.json"], revision, token, progress))


def fetch_tokenizer(repo_id: str, *, token: str | bool | None = None, progress: bool | None = None) -> Path:
    """Download only the tokenizer of a repository.

    Args:
        repo_id: ``owner/name``.
        token: see `kvjax.conversion.load`.
        progress: see `kvjax.conversion.load`.

    Returns:
        The local directory.

    Raises:
        CheckpointError: the repository does not exist or is not accessible, or there is no connection.
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
    except Exception as error:  # the client and its libraries share no base class
        raise CheckpointError(f"{repo_id}: not available from the Hugging Face hub ({_first_line(error)})") from error
    return Path(path)


def _not_fetched(start: int, out: np.ndarray) -> None:
    raise CheckpointError("only the headers of this model were downloaded; load it to have its weights")


def _no_weights(repo_id: str) -> str:
    return f"{repo_id}: the repository has no safetensors weights; pickled ones are not downloaded"


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
