"""Models from the Hugging Face hub: the safetensors weights, the configuration and the tokenizer, and nothing else."""

from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.utils import tqdm as hub_bar

from .errors import CheckpointError
from .progress import watched

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
"""Weight files that are fetched; pickles never are."""

COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Small files that are fetched."""

_ELSEWHERE = ("*/*", "consolidated*")
"""Copies of the weights in other layouts, which some repositories carry too."""


class _Silent(hub_bar):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **(options | {"disable": True}))


def fetch(repo_id: str, *, progress: bool | None = None) -> Path:
    """Download a model, or find it in the hub client's own cache; ``HF_HUB_OFFLINE`` and ``HF_ENDPOINT`` hold.

    Args:
        repo_id: ``owner/name``.
        progress: see `kvjax.conversion.load`.

    Raises:
        CheckpointError: no such model, no access, no connection, or no safetensors weights.
    """
    try:
        path = Path(
            huggingface_hub.snapshot_download(
                repo_id,
                allow_patterns=[*COMPANIONS, *WEIGHTS],
                ignore_patterns=list(_ELSEWHERE),
                etag_timeout=5,
                tqdm_class=hub_bar if watched(progress) else _Silent,
            )
        )
    except Exception as error:  # the client and the libraries under it share no base class
        raise CheckpointError(f"{repo_id}: not available from the Hugging Face hub ({_first_line(error)})") from error
    if not any(path.glob("*.safetensors")):
        raise CheckpointError(f"{repo_id}: the repository has no safetensors weights; pickled ones are not downloaded")
    return path


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
