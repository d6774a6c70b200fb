"""`ModelConfig` as JSON, for kvjax's own checkpoints: explicit, versioned and strictly validated.

Different layers are listed once, under `kinds`. `layers` has one index into this list per layer.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

import pydantic
from pydantic import Field

from kvjax.config import (
    AttentionConfig,
    DeltaNetConfig,
    LayerConfig,
    Linear,
    Llama3,
    LongRope,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    Yarn,
)

from .errors import CheckpointError, listed, shortened
from .schema import Size, Strict, checked

VERSION = 2
"""Version of the description that is written. Version 1, whose layers are equal except for their windows, is read, too."""

_SCALINGS = {kind.__name__: kind for kind in (Linear, Llama3, Yarn, LongRope)}

_MIXERS = {kind.__name__: kind for kind in (AttentionConfig, DeltaNetConfig)}

_MLPS = {kind.__name__: kind for kind in (MLPConfig, MoEConfig)}


class Header(Strict):
    """Fields of the file that describes a kvjax checkpoint."""

    version: int
    config: dict[str, Any]


class _Layers(Strict):
    kinds: list[dict[str, Any]]
    layers: list[Annotated[int, Field(ge=0)]]


class _Layer(Strict):
    """Fields of a layer whose values are objects."""

    mixer: dict[str, Any]
    mlp: dict[str, Any]


class _Rope(Strict):
    rope: dict[str, Any]


class _Scaling(Strict):
    scaling: dict[str, Any] | None = None


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Convert to plain dictionaries and lists. A mixer, an MLP and a rope scaling store their class name as ``type``."""
    kinds = {layer: i for i, layer in enumerate(config.kinds)}
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return fields | {"kinds": [_layer_to_json(kind) for kind in kinds], "layers": [kinds[x] for x in config.layers]}


def _layer_to_json(layer: LayerConfig) -> dict[str, Any]:
    fields = dataclasses.asdict(layer)
    if isinstance(layer.mixer, AttentionConfig) and (scaling := layer.mixer.rope.scaling) is not None:
        rope = fields["mixer"]["rope"]
        rope["scaling"] = {"type": type(scaling).__name__} | rope["scaling"]
    for name, part in (("mixer", layer.mixer), ("mlp", layer.mlp)):
        fields[name] = {"type": type(part).__name__} | fields[name]
    return fields


def config_from_json(fields: Mapping[str, Any], source: str, version: int = VERSION) -> ModelConfig:
    """Read a configuration that `config_to_json` wrote.

    Args:
        fields: the configuration.
        source: file name for messages.
        version: version of the description.

    Raises:
        CheckpointError: a field is missing, unknown, of the wrong type or out of range, or the version is unknown.
    """
    if version == 1:
        return _build(ModelConfig.uniform, fields, source, rope=_rope(fields, source))
    if version != VERSION:
        raise CheckpointError(
            f"{source}: version {version} is not supported; this kvjax reads versions 1 and {VERSION}"
        )
    parts = checked(_Layers, fields, source)
    kinds = [_layer(kind, source) for kind in parts.kinds]
    if (highest := max(parts.layers, default=0)) >= len(kinds):
        raise CheckpointError(f"{source}: layers has index {highest}, but kinds has {len(kinds)} entries")
    rest = {name: value for name, value in fields.items() if name != "kinds"}
    return _build(ModelConfig, rest, source, layers=tuple(kinds[i] for i in parts.layers))


def _layer(fields: Mapping[str, Any], source: str) -> LayerConfig:
    parts = checked(_Layer, fields, source, "kinds.")
    built = {"rope": _rope(parts.mixer, source)} if "rope" in parts.mixer else {}
    mixer = _typed("mixer", _MIXERS, parts.mixer, source, **built)
    return _build(LayerConfig, fields, source, mixer=mixer, mlp=_typed("mlp", _MLPS, parts.mlp, source))


def _rope(fields: Mapping[str, Any], source: str) -> RopeConfig:
    """Read the rotary embedding that `fields` has under ``rope``."""
    rope = checked(_Rope, fields, source).rope
    scaling = checked(_Scaling, rope, source, "rope.").scaling
    if scaling is not None:
        scaling = _typed("rope scaling", _SCALINGS, scaling, source)
    return _build(RopeConfig, rope, source, scaling=scaling)


def _typed(what: str, kinds: Mapping[str, type], fields: Mapping[str, Any], source: str, **built: Any) -> Any:
    """Build the one of several dataclasses that ``type`` names."""
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise CheckpointError(f"{source}: unknown {what} {shortened(kind)}; known are {', '.join(kinds)}")
    return _build(kinds[kind], {key: value for key, value in fields.items() if key != "type"}, source, **built)


def _build(made: Callable[..., Any], fields: Mapping[str, Any], source: str, **built: Any) -> Any:
    """Call a dataclass or a function with `fields`, validated by its annotations, and with the arguments in `built`."""
    name, known = made.__qualname__.partition(".")[0], inspect.signature(made).parameters.keys()
    if unknown := fields.keys() - known:
        raise CheckpointError(
            f"{source}: unknown fields {listed(unknown)} of {name}; a newer kvjax may have written them"
        )
    if missing := known - fields.keys() - built.keys():
        raise CheckpointError(f"{source}: fields {listed(missing)} of {name} are missing")
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    values = checked(_schema(made, frozenset(known - built.keys())), plain, source, f"{name}.")
    try:
        return made(**dict(values), **built)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from error


@functools.cache
def _schema(made: Callable[..., Any], names: frozenset[str]) -> type[Strict]:
    size = int if made is RopeConfig else Size  # `AttentionConfig` checks how many channels rotate, which may be none
    hints = {name: size if hint is int else hint for name, hint in get_type_hints(made).items()}
    fields: Any = {name: (hint, ...) for name, hint in hints.items() if name in names}
    return pydantic.create_model(made.__name__, __base__=Strict, **fields)
