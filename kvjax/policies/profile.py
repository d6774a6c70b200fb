"""Profiles: what calibration has found out about one model, as a small JSON file. Of its KV heads, a `HeadProfile`."""

import base64
import dataclasses
import hashlib
import json
import zlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from jaxtyping import Float

from kvjax._util import files, user_files
from kvjax.config import ModelConfig

from .info import PolicyError

VERSION = 1
"""Of the file's layout; files of another version are refused."""

MOST_BYTES = 1 << 25
"""Of a profile's file: several times those of the largest models."""

MOST_UNPACKED = 1 << 28
"""Bytes of all layers' packed numbers together, as `unpack` reads them."""

Labels = tuple[tuple[str, ...], ...]
"""The label of every KV head: [layer][head]."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """Base of all profiles: of which model, and how it was made. Hashable, so that it can be a policy's hyperparameter.

    Class attributes:
        noun: what people call it.
        tables: fields with what was found out, sequences of layers; each has one line per layer in the file.

    Attributes:
        method: the method that it was made for ("catekv", "chelsea").
        model: `fingerprint` of the model that it was made with.
        data: the text that it was made from.
        settings: how it was made, as pairs of name and value.
        version: of the layout.
    """

    noun: ClassVar[str] = "profile"
    tables: ClassVar[tuple[str, ...]] = ()

    method: str
    model: str
    data: str
    settings: tuple[tuple[str, Any], ...]
    version: int = dataclasses.field(default=VERSION, kw_only=True)

    @classmethod
    def of(cls, found: Any, **about: Any) -> Self:
        """A profile of what a calibration has found.

        Args:
            about: all other fields.
        """
        raise NotImplementedError

    @classmethod
    def read_tables(cls, found: dict[str, Any]) -> dict[str, Any]:
        """The tables of a file as fields.

        Raises:
            ValueError: they are not such as they should be, which the message describes.
        """
        raise NotImplementedError

    def require(self, methods: Sequence[str], config: ModelConfig) -> None:
        """Raise `PolicyError` unless this profile is for one of these methods, of which the first asks, and for this model."""
        if self.method not in methods:
            raise PolicyError(f"{methods[0]}: the profile is for {self.method!r}; {_remedy(methods[0])}")
        if self.model != fingerprint(config):
            raise PolicyError(
                f"{methods[0]}: the profile was made for the model {self.model}, but this one is {fingerprint(config)}; "
                + _remedy(self.method)
            )

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, one layer a line."""
        head = {
            "version": self.version,
            "method": self.method,
            "model": self.model,
            "data": self.data,
            "settings": dict(self.settings),
        }
        lines = [f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in head.items()]
        for name in self.tables:
            rows = ",\n".join(f"    {json.dumps(row)}" for row in getattr(self, name))
            lines.append(f'  "{name}": [\n{rows}\n  ]')
        files.write(path, "{\n" + ",\n".join(lines) + "\n}\n")


@dataclasses.dataclass(frozen=True)
class HeadProfile(Profile):
    """Scores and labels of a model's KV heads.

    Attributes:
        scores: [L][K], what the labels were decided by; the method says what it means.
        labels: [L][K], which kind of head each is.
    """

    noun: ClassVar[str] = "head profile"
    tables: ClassVar[tuple[str, ...]] = ("scores", "labels")

    scores: tuple[tuple[float, ...], ...]
    labels: Labels

    @classmethod
    def of(cls, found: tuple[Float[np.ndarray, "L K"], Labels], **about: Any) -> Self:
        scores, labels = found
        return cls(scores=rows(np.round(scores.astype(float), 4).tolist()), labels=labels, **about)

    @classmethod
    def read_tables(cls, found: dict[str, Any]) -> dict[str, Any]:
        kinds = (("scores", (int, float)), ("labels", str))
        right = all(_is_table(found[field], kind) for field, kind in kinds)
        if not right or [len(row) for row in found["scores"]] != [len(row) for row in found["labels"]]:
            raise ValueError("scores and labels should be [layer][head], numbers and texts")
        return {field: rows(found[field]) for field, _ in kinds}

    def heads(self, label: str) -> list[tuple[int, int]]:
        """The (layer, head) pairs that have this label, in order."""
        return [(i, j) for i, layer in enumerate(self.labels) for j, other in enumerate(layer) if other == label]


P = TypeVar("P", bound=Profile)


def load(path: str | Path, kind: type[P] = HeadProfile) -> P:
    """Read a profile.

    Raises:
        OSError: the file cannot be read, or is not a regular one.
        PolicyError: it is not a profile of this kind, or one of another version.
    """
    try:
        text = user_files.read_text(path, MOST_BYTES)
    except ValueError as error:
        raise PolicyError(f"{error}; give a {kind.noun}") from None
    return _parse(text, str(path), kind)


def shipped(method: str, config: ModelConfig, kind: type[P] = HeadProfile) -> P | None:
    """The profile that comes with the library for this method and model, if there is one."""
    file = resources.files("kvjax.policies") / "profiles" / f"{method}-{fingerprint(config)}.json"
    return _parse(file.read_text(encoding="utf-8"), file.name, kind) if file.is_file() else None


def find(
    method: str, config: ModelConfig, profile: P | str | None, kind: type[P] = HeadProfile, others: Sequence[str] = ()
) -> P | None:
    """The profile that a policy's hyperparameter stands for: itself, a file, or (None) the shipped one if there is one.

    Args:
        others: methods whose profiles serve as well.

    Raises:
        PolicyError: it was made for another method or model, or the file is not a profile of this kind.
    """
    found = load(profile, kind) if isinstance(profile, str) else profile
    if found is None:
        return shipped(method, config, kind)
    found.require((method, *others), config)
    return found


def missing(method: str, config: ModelConfig) -> PolicyError:
    """The error of a policy that cannot work without a profile, where none is given or shipped."""
    return PolicyError(
        f"{method}: no profile of the heads of {fingerprint(config)} comes with kvjax; {_remedy(method)}"
    )


def fingerprint(config: ModelConfig) -> str:
    """What a profile knows its model by: family, layers × query heads × KV heads × head dim, and a hash of sizes and rope."""
    sizes = config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    shape = repr((config.family, sizes, heads, config.rope, config.qk_norm, config.windows))
    digest = hashlib.sha256(shape.encode()).hexdigest()[:8]
    return f"{config.family}-{config.num_layers}x{'x'.join(map(str, heads))}-{digest}"


def rows(table: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    """A table of any kind of sequences as tuples, the form that profiles have."""
    return tuple(tuple(row) for row in table)


def pack(numbers: bytes) -> str:
    """A layer's numbers as a line of text: compressed, in base85."""
    return base64.b85encode(zlib.compress(numbers, 9)).decode()


def check_packed(texts: Any) -> tuple[str, ...]:
    """The texts that `pack` made, of each layer one, as a file has them.

    Raises:
        ValueError: these are none, or hold more than `MOST_UNPACKED` bytes.
    """
    if not isinstance(texts, list):
        raise ValueError(f"{type(texts).__name__} is no list")
    left = MOST_UNPACKED
    for text in texts:
        numbers = unpack(text, left)
        if not numbers:
            raise ValueError("no numbers")
        left -= len(numbers)
    return tuple(texts)


def unpack(text: Any, most_bytes: int = MOST_UNPACKED) -> bytes:
    """What `pack` made a text of.

    Raises:
        ValueError: it made no such text, or of more bytes.
    """
    if not isinstance(text, str):
        raise ValueError(f"{type(text).__name__} is no text")
    reader = zlib.decompressobj()
    try:
        numbers = reader.decompress(base64.b85decode(text), max(most_bytes, 1))  # 0 would be no limit
    except zlib.error as error:
        raise ValueError(f"not compressed numbers ({error})") from None
    if not reader.eof:
        raise ValueError("cut short, or too long")
    return numbers


def _remedy(method: str) -> str:
    return f"make one with `kvjax calibrate {method}` and give it as profile=FILE"


def _parse(text: str, name: str, kind: type[P]) -> P:
    """A profile from JSON, every field of it checked."""
    try:
        found: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise PolicyError(f"{name} is not a {kind.noun}: not JSON ({error})") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, and nesting without end
        raise PolicyError(f"{name} is not a {kind.noun}: not JSON that can be read ({error})") from None
    fields = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(found, dict) or set(found) != fields:
        got = sorted(found) if isinstance(found, dict) else type(found).__name__
        raise PolicyError(f"{name} is not a {kind.noun}: it has {got}, but should have {sorted(fields)}")
    if found["version"] != kind.version:
        raise PolicyError(
            f"{name} is a {kind.noun} of version {found['version']}, but this kvjax reads {kind.version}; "
            + _remedy(str(found["method"]))
        )
    texts_are_right = all(isinstance(found[field], str) for field in ("method", "model", "data"))
    if not texts_are_right or not isinstance(found["settings"], dict):
        raise PolicyError(f"{name} is not a {kind.noun}: method, model and data should be texts, settings an object")
    found["settings"] = rows(list(found["settings"].items()))
    try:
        found |= kind.read_tables(found)
    except ValueError as error:
        raise PolicyError(f"{name} is not a {kind.noun}: {error}") from None
    return kind(**found)


def _is_table(value: Any, kind: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, list) and all(isinstance(cell, kind) for cell in row) for row in value
    )
