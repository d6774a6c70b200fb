"""`ModelConfig` as JSON, for checkpoints of our own: explicit, versioned, and strict about what it reads."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.models.rope import Linear, Llama3, LongRope, RopeConfig, Yarn

from .errors import CheckpointError, listed

_SCALINGS = {kind.__name__: kind for kind in (Linear, Llama3, Yarn, LongRope)}


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Plain dictionaries and lists; a rope scaling carries its class name as ``type``."""
    fields = dataclasses.asdict(config)
    if config.rope.scaling is not None:
        fields["rope"]["scaling"] = {"type": type(config.rope.scaling).__name__} | fields["rope"]["scaling"]
    return fields


def config_from_json(fields: Mapping[str, Any], source: str) -> ModelConfig:
    """The inverse of `config_to_json`.

    Raises:
        CheckpointError: a field is missing, unknown or impossible.
    """
    fields = dict(fields)
    rope = dict(fields.pop("rope", {}))
    scaling = rope.pop("scaling", None)
    if scaling is not None:
        scaling = dict(scaling)
        kind = scaling.pop("type", None)
        if kind not in _SCALINGS:
            raise CheckpointError(f"{source}: unknown rope scaling {kind!r}; known are {', '.join(_SCALINGS)}")
        scaling = _build(_SCALINGS[kind], scaling, source)
    return _build(ModelConfig, fields | {"rope": _build(RopeConfig, rope | {"scaling": scaling}, source)}, source)


def _build(kind: type, fields: Mapping[str, Any], source: str) -> Any:
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := fields.keys() - known:
        raise CheckpointError(
            f"{source}: unknown fields {listed(unknown)} of {kind.__name__}; a newer kvjax may have written them"
        )
    if missing := known - fields.keys():
        raise CheckpointError(f"{source}: fields {listed(missing)} of {kind.__name__} are missing")
    try:
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{source}: {error}") from error
