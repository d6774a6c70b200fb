"""`shapes_of`: shapes of a model's parameters, from its configuration or a checkpoint's headers."""

from pathlib import Path
from typing import Any

from kvjax.config import PRESETS, ModelConfig
from kvjax.config.presets import find_preset
from kvjax.models.params import Params, abstract

from . import default_model, hub
from .checkpoint import FLOATS, check_kinds, kinds_of, unflatten
from .errors import CheckpointError
from .hf_config import from_hf
from .loading import float_name, open_checkpoint
from .text_files import present, read_json

_WEIGHTS = "*.safetensors", "*.gguf"


def shapes_of(
    source: str | Path | ModelConfig | None,
    *,
    dtype: Any = "bfloat16",
    weights: str = "float",
    embedding: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    progress: bool | None = None,
) -> Params:
    """Shapes of a model's parameters as `load` would return them, without loading weights.

    Args:
        source: one of these; None is the default model:
            the name of a preset, or its hub id, which needs no connection,
            a `config.json`, or a directory with one,
            another hub id; only its configuration is downloaded,
            anything that `kvjax.conversion.load` accepts; only headers are read,
            or a `ModelConfig`.
        dtype: type of parameters that are not quantised.
        weights, embedding: as for `kvjax.conversion.load`; floats by default. "as stored" needs a checkpoint.
        revision, token, progress: as for `kvjax.conversion.load`.

    Returns:
        Parameters whose leaves are `jax.ShapeDtypeStruct`s.

    Raises:
        CheckpointError: the model does not exist or is damaged, or stored weights are requested but `source` has none.
        ValueError: `dtype`, `weights` or `embedding` is not supported.
    """
    check_kinds(weights, embedding)
    name = float_name(dtype)
    embedding = embedding or ("as stored" if weights == "as stored" else "float")
    if not isinstance(source, ModelConfig):
        known = _without_weights(source, "as stored" in (weights, embedding), revision, token, progress)
        if known is None:
            checkpoint = open_checkpoint(source, progress, headers_only=True, revision=revision, token=token)
            checkpoint.check()
            return unflatten(
                checkpoint.config, checkpoint.shapes(FLOATS[name], kinds_of(checkpoint, weights, embedding))
            )
        source = known
    if "as stored" in (weights, embedding):
        raise CheckpointError(
            "a model's shape alone has no stored weights; give a checkpoint, or weights as float, int8 or int4"
        )
    return abstract(source, name, weights=weights, embedding=embedding)


def _without_weights(
    source: str | Path | None, stored: bool, revision: str | None, token: str | bool | None, progress: bool | None
) -> ModelConfig | None:
    """The configuration, if it can be read without weights; None if a checkpoint has to be opened."""
    text, path = str(default_model.NAME if source is None else source), Path(str(source))
    if not path.exists() and (found := find_preset(text)) is not None and not stored:
        return found
    if path.suffix == ".json" and present(path):
        return from_hf(read_json(path), source=text)
    if path.is_dir():
        bare = present(path / "config.json") and not any(any(path.glob(kind)) for kind in _WEIGHTS)
        return from_hf(read_json(path / "config.json"), source=str(path / "config.json")) if bare else None
    if path.exists() or source is None:
        return None
    if hub.ID.fullmatch(text):
        return None if stored else hub.fetch_config(text, revision=revision, token=token, progress=progress)
    raise CheckpointError(
        f"{text}: no such file or directory, not a hub id, which looks like owner/name, and not a shape of {', '.join(PRESETS)}"
    )
