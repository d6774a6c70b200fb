"""`describe`: what a checkpoint is, from its headers."""

import dataclasses
from pathlib import Path

from kvjax.models.config import ModelConfig
from kvjax.models.params import abstract, count

from .loading import open_checkpoint
from .tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Description:
    """A checkpoint in brief.

    Attributes:
        source: file or directory.
        format: "safetensors", "gguf" or "orbax".
        config: the model.
        parameters: how many numbers the model has.
        dtypes: stored types and quantisations with the bytes that each takes, largest first.
        own_dtype: the floating-point type that most of the weights have; bfloat16 for quantised ones.
        nbytes: bytes of all tensors in the files.
        tokenizer: None where the checkpoint has none.
    """

    source: Path
    format: str
    config: ModelConfig
    parameters: int
    dtypes: tuple[tuple[str, int], ...]
    own_dtype: str
    nbytes: int
    tokenizer: Tokenizer | None


def describe(
    source: str | Path | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    progress: bool | None = None,
) -> Description:
    """Describe a checkpoint without loading its weights; of a hub id only headers are downloaded.

    Args:
        source: as for `kvjax.conversion.load`.
        revision: see there.
        token: see there.
        progress: see there.

    Raises:
        CheckpointError: as `load`; missing, unexpected and wrongly shaped tensors are found too.
    """
    checkpoint = open_checkpoint(source, progress, headers_only=True, revision=revision, token=token)
    checkpoint.check()
    return Description(
        source=checkpoint.source,
        format=checkpoint.format,
        config=checkpoint.config,
        parameters=count(abstract(checkpoint.config)),
        dtypes=tuple(checkpoint.dtypes.items()),
        own_dtype=checkpoint.own_dtype,
        nbytes=sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        tokenizer=checkpoint.tokenizer(),
    )
