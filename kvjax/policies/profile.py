"""Profiles: calibration results for one model, stored as a small JSON file. `HeadProfile` is that of KV heads."""

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
from kvjax._util.arguments import short
from kvjax.config import MLPConfig, ModelConfig

from .info import PolicyError

VERSION = 1
"""Version of the file's layout. Other versions are refused."""

MOST_BYTES = 1 << 25
"""Maximum size of a profile's file: several times that of the largest models."""

MOST_UNPACKED = 1 << 28
"""Maximum bytes of all layers' packed numbers, after `unpack`."""

Labels = tuple[tuple[str, ...], ...]
"""The label of every KV head: [layer][head]."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """Base of all profiles. Hashable, so that it can be a policy's hyperparameter.

    Class attributes:
        noun: what messages call it.
        tables: fields with results, sequences over layers. Each has one line per layer in the file.

    Attributes:
        method: the method that the profile was made for ("catekv", "chelsea").
        model: `fingerprint` of the model that it was made with.
        data: the text that it was made from.
        settings: how it was made, as pairs of name and value.
        version: version of the layout.
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
        """Make a profile of a calibration's results.

        Args:
            found: the results.
            about: all other fields.
        """
        raise NotImplementedError

    @classmethod
    def read_tables(cls, found: dict[str, Any]) -> dict[str, Any]:
        """Parse the tables of a file into fields.

        Raises:
            ValueError: the tables are not valid. The message describes why.
        """
        raise NotImplementedError

    def require(self, methods: Sequence[str], config: ModelConfig) -> None:
        """Raise `PolicyError` unless this profile is for this model, and for one of the methods.

        Args:
            methods: accepted methods. The first is the one that needs the profile.
            config: the model.
        """
        if self.method not in methods:
            raise PolicyError(f"{methods[0]}: the profile is for {self.method!r}. {_remedy(methods[0])}")
        if self.model != fingerprint(config):
            raise PolicyError(
                f"{methods[0]}: the profile was made for the model {self.model}, but this one is {fingerprint(config)}. "
                + _remedy(self.method)
            )

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, one line per layer."""
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
        scores: [L][K], scores that decided the labels. Their meaning depends on the method.
        labels: [L][K], kind of each head.

    Example:
        >>> facts = {"method": "chelsea", "model": "tiny", "data": "none", "settings": ()}
        >>> profile = kvjax.policies.HeadProfile(**facts, scores=((0.1, 0.9),), labels=(("other", "outlier"),))
        >>> profile.heads("outlier")  # layer, KV head
        [(0, 1)]
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
            raise ValueError("scores and labels are not [layer][head] of numbers and strings")
        return {field: rows(found[field]) for field, _ in kinds}

    def heads(self, label: str) -> list[tuple[int, int]]:
        """The (layer, head) pairs with this label, in order."""
        return [(i, j) for i, layer in enumerate(self.labels) for j, other in enumerate(layer) if other == label]


def check_head_profile(name: str, profile: Any) -> None:
    """Raise `PolicyError` unless a hyperparameter is a `HeadProfile`, a path, None, or labels as a tuple of tuples of text.

    Args:
        name: the policy, for messages.
        profile: the hyperparameter.
    """
    layers = profile if isinstance(profile, tuple) else ()
    texts = all(isinstance(layer, tuple) and all(isinstance(label, str) for label in layer) for layer in layers)
    if not texts or profile == () or not isinstance(profile, tuple | HeadProfile | str | None):
        raise PolicyError(
            f"{name}: profile={short(profile)} is not valid. Give a HeadProfile, its path, or labels as a tuple of tuples."
        )


P = TypeVar("P", bound=Profile)


def load(path: str | Path, kind: type[P] = HeadProfile) -> P:
    """Read a profile from a file.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        PolicyError: the file is not a profile of this kind, or has another version.
    """
    try:
        text = user_files.read_text(path, MOST_BYTES)
    except ValueError as error:
        raise PolicyError(f"{error}. Give a {kind.noun}.") from None
    return _parse(text, str(path), kind)


def shipped(method: str, config: ModelConfig, kind: type[P] = HeadProfile) -> P | None:
    """Return the profile that comes with kvjax for this method and model, or None."""
    file = resources.files("kvjax.policies") / "profiles" / f"{method}-{fingerprint(config)}.json"
    return _parse(file.read_text(encoding="utf-8"), file.name, kind) if file.is_file() else None


def find(
    method: str, config: ModelConfig, profile: P | str | None, kind: type[P] = HeadProfile, others: Sequence[str] = ()
) -> P | None:
    """Return the profile of a policy's hyperparameter: itself, read from a file, or (None) the shipped one, if any.

    Args:
        method: the method that needs the profile.
        config: the model.
        profile: value of the hyperparameter.
        kind: class of the profile.
        others: other methods whose profiles are accepted.

    Raises:
        PolicyError: the profile was made for another method or model, or the file is not a profile of this kind.
    """
    found = load(profile, kind) if isinstance(profile, str) else profile
    if found is None:
        return shipped(method, config, kind)
    found.require((method, *others), config)
    return found


def missing(method: str, config: ModelConfig) -> PolicyError:
    """Return the error of a policy that needs a profile where none is given or shipped."""
    return PolicyError(
        f"{method}: no profile of the heads of {fingerprint(config)} comes with kvjax. {_remedy(method)}"
    )


def fingerprint(config: ModelConfig) -> str:
    """Identify a model: family, layers × query heads × KV heads × head dim, and a hash of sizes and rope.

    Layers are those that policies compress (`ModelConfig.compressed`).
    """
    config = config.for_policy
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    if config.differ_in_windows_only and isinstance(config.layers[0].mlp, MLPConfig):
        sizes = config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers
        shape = repr((config.family, sizes, heads, config.rope, config.qk_norm, config.windows))
    else:
        shape = repr((config.family, config.vocab_size, config.hidden_size, config.layers))
    digest = hashlib.sha256(shape.encode()).hexdigest()[:8]
    return f"{config.family}-{config.num_layers}x{'x'.join(map(str, heads))}-{digest}"


def rows(table: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    """Convert a table of any sequences to tuples, as profiles store it."""
    return tuple(tuple(row) for row in table)


def pack(numbers: bytes) -> str:
    """Encode a layer's numbers as a line of text: compressed, in base85."""
    return base64.b85encode(zlib.compress(numbers, 9)).decode()


def check_packed(texts: Any) -> tuple[str, ...]:
    """Return the texts of a file as a tuple, one per layer, after checking that `pack` made them.

    Raises:
        ValueError: a text is not from `pack`, or all together have more than `MOST_UNPACKED` bytes.
    """
    if not isinstance(texts, list):
        raise ValueError(f"{type(texts).__name__} is not a list")
    left = MOST_UNPACKED
    for text in texts:
        numbers = unpack(text, left)
        if not numbers:
            raise ValueError("no numbers")
        left -= len(numbers)
    return tuple(texts)


def unpack(text: Any, most_bytes: int = MOST_UNPACKED) -> bytes:
    """Decode a text of `pack`.

    Raises:
        ValueError: the text is not from `pack`, or has more than `most_bytes` bytes.
    """
    if not isinstance(text, str):
        raise ValueError(f"{type(text).__name__} is not a string")
    reader = zlib.decompressobj()
    try:
        numbers = reader.decompress(base64.b85decode(text), max(most_bytes, 1))  # 0 would be no limit
    except zlib.error as error:
        raise ValueError(f"not compressed numbers ({error})") from None
    if not reader.eof:
        raise ValueError("truncated, or too long")
    return numbers


def _remedy(method: str) -> str:
    return f"Make one with `kvjax calibrate {method}` and give it as profile=FILE."


def _parse(text: str, name: str, kind: type[P]) -> P:
    """Parse a profile from JSON, and check every field."""
    try:
        found: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise PolicyError(f"{name} is not a {kind.noun}: not JSON ({error})") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, and deep nesting
        raise PolicyError(f"{name} is not a {kind.noun}: not JSON that can be read ({error})") from None
    fields = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(found, dict) or set(found) != fields:
        got = sorted(found) if isinstance(found, dict) else type(found).__name__
        raise PolicyError(f"{name} is not a {kind.noun}: it has {got}, not {sorted(fields)}")
    if found["version"] != kind.version:
        raise PolicyError(
            f"{name} is a {kind.noun} of version {found['version']}, but this kvjax reads {kind.version}. "
            + _remedy(str(found["method"]))
        )
    texts_are_right = all(isinstance(found[field], str) for field in ("method", "model", "data"))
    if not texts_are_right or not isinstance(found["settings"], dict):
        raise PolicyError(f"{name} is not a {kind.noun}: method, model or data is not a string, or settings an object")
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
