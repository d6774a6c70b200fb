"""`describe`: summarise a checkpoint from its headers."""

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
    """Summary of a checkpoint.

    Attributes:
        source: file or directory.
        format: "safetensors", "gguf" or "orbax".
        config: the model's configuration.
        parameters: number of parameters.
        dtypes: pairs of stored type or quantisation and its bytes, largest first.
        own_dtype: floating-point type of most weights; bfloat16 for quantised weights.
        nbytes: bytes of all tensors in the files.
        dtype: the requested floating-point type, or `own_dtype`.
        quantised: kinds of quantised matrices that loading with these arguments would give.
        weight_bytes: bytes of all weights after loading with these arguments.
        tokenizer: the tokenizer, or None if the checkpoint has none.
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
    """Describe a checkpoint without loading its weights. For a hub id, only headers are downloaded.

    Args:
        source: as for `kvjax.conversion.load`.
        dtype: as for `kvjax.conversion.load`; None uses the checkpoint's own type.
        weights, embedding: as for `kvjax.conversion.load`.
        revision, token: as for `kvjax.conversion.load`.
        progress: as for `kvjax.conversion.load`.

    Returns:
        The description.

    Raises:
        CheckpointError: as `kvjax.conversion.load`, including missing, unexpected and wrongly shaped tensors.
        ValueError: `dtype`, `weights` or `embedding` is not supported.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = kvjax.conversion.describe(kvjax.save(params, f"{folder}/model"))
        >>> found.config.num_layers, found.own_dtype, found.parameters
        (2, 'float32', 52464)
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
