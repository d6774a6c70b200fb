"""`describe`: what a checkpoint is, from its headers."""

import dataclasses
from pathlib import Path
from typing import Any

from kvjax.config import ModelConfig
from kvjax.models.params import abstract, count
from kvjax.pallas_kernels import QuantizedMatrix

from .checkpoint import FLOATS, check_kinds, kinds_of, nbytes_of
from .loading import float_name, open_checkpoint
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
        dtype: the floating-point type asked for, or `own_dtype`.
        quantised: kinds of matrices in 8 or 4 bits that loading as asked would hold.
        weight_bytes: bytes of all weights then.
        tokenizer: None where the checkpoint has none.
    """

    source: Path
    format: str
    config: ModelConfig
    parameters: int
    dtypes: tuple[tuple[str, int], ...]
    own_dtype: str
    nbytes: int
    dtype: str
    quantised: tuple[str, ...]
    weight_bytes: int
    tokenizer: Tokenizer | None


def describe(
    source: str | Path | None = None,
    *,
    dtype: Any = None,
    weights: str | None = None,
    embedding: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    progress: bool | None = None,
) -> Description:
    """Describe a checkpoint without loading its weights; of a hub id only headers are downloaded.

    Args:
        source: as for `kvjax.conversion.load`.
        dtype: see there; by default the checkpoint's own.
        weights, embedding: see there.
        revision: see there.
        token: see there.
        progress: see there.

    Raises:
        CheckpointError: as `load`; missing, unexpected and wrongly shaped tensors are found too.
        ValueError: a dtype or a kind of weights that parameters cannot have.
    """
    check_kinds(weights, embedding)
    wanted = None if dtype is None else float_name(dtype)
    checkpoint = open_checkpoint(source, progress, headers_only=True, revision=revision, token=token)
    checkpoint.check()
    wanted = wanted or checkpoint.own_dtype
    shapes = checkpoint.shapes(FLOATS[wanted], kinds_of(checkpoint, weights, embedding))
    return Description(
        source=checkpoint.source,
        format=checkpoint.format,
        config=checkpoint.config,
        parameters=count(abstract(checkpoint.config)),
        dtypes=tuple(checkpoint.dtypes.items()),
        own_dtype=checkpoint.own_dtype,
        nbytes=sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        dtype=wanted,
        quantised=tuple(sorted({shape.kind for shape in shapes.values() if isinstance(shape, QuantizedMatrix)})),
        weight_bytes=nbytes_of(shapes),
        tokenizer=checkpoint.tokenizer(),
    )
