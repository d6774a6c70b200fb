"""`ModelConfig` as JSON, for kvjax's own checkpoints: explicit, versioned and strictly validated."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, get_type_hints

import pydantic

from kvjax.config import Linear, Llama3, LongRope, ModelConfig, RopeConfig, Yarn

from .errors import CheckpointError, listed, shortened
from .schema import Size, Strict, checked

_SCALINGS = {kind.__name__: kind for kind in (Linear, Llama3, Yarn, LongRope)}


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Convert to plain dictionaries and lists. A rope scaling stores its class name as ``type``."""
    fields = dataclasses.asdict(config)
    if config.rope.scaling is not None:
        fields["rope"]["scaling"] = {"type": type(config.rope.scaling).__name__} | fields["rope"]["scaling"]
    return fields


class Header(Strict):
    """Fields of the file that describes a kvjax checkpoint."""

    version: int
    config: dict[str, Any]


def config_from_json(fields: Mapping[str, Any], source: str) -> ModelConfig:
    """Read a configuration that `config_to_json` wrote.

    Raises:
        CheckpointError: a field is missing, unknown, of the wrong type or out of range.
    """
    parts = checked(_Parts, fields, source)
    scaling = parts.rope.scaling
    if scaling is not None:
        kind = scaling.get("type")
        if not isinstance(kind, str) or kind not in _SCALINGS:
            raise CheckpointError(f"{source}: unknown rope scaling {shortened(kind)}; known are {', '.join(_SCALINGS)}")
        scaling = _build(_SCALINGS[kind], {key: value for key, value in scaling.items() if key != "type"}, source)
    rope = _build(RopeConfig, fields["rope"], source, scaling=scaling)
    return _build(ModelConfig, fields, source, rope=rope)


class _RopePart(Strict):
    scaling: dict[str, Any] | None = None


class _Parts(Strict):
    """Fields whose values are objects."""

    rope: _RopePart


def _build(kind: type, fields: Mapping[str, Any], source: str, **built: Any) -> Any:
    """Build a dataclass from `fields`, validated by its annotations, and from the fields in `built`."""
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := fields.keys() - known:
        raise CheckpointError(
            f"{source}: unknown fields {listed(unknown)} of {kind.__name__}; a newer kvjax may have written them"
        )
    if missing := known - fields.keys() - built.keys():
        raise CheckpointError(f"{source}: fields {listed(missing)} of {kind.__name__} are missing")
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    values = checked(_schema(kind, frozenset(built)), plain, source, f"{kind.__name__}.")
    try:
        return kind(**dict(values), **built)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from error


@functools.cache
def _schema(kind: type, without: frozenset[str]) -> type[Strict]:
    hints = {name: Size if hint is int else hint for name, hint in get_type_hints(kind).items()}
    fields: Any = {name: (hint, ...) for name, hint in hints.items() if name not in without}
    return pydantic.create_model(kind.__name__, __base__=Strict, **fields)
