"""Channel pairs of queries and keys as complex numbers, and a profile of a model's mean queries."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax._util import torch_files
from kvjax.config import ModelConfig, Rope

from ..info import PolicyError
from ..profile import Profile, check_packed, fingerprint, pack, unpack

_DTYPE = np.dtype("<f2")
"""Dtype of stored statistics."""


def pairs(rope: Rope, x: Float[Array, "*S H"]) -> tuple[Float[Array, "*S F"], Float[Array, "*S F"]]:
    """Return real and imaginary parts of F = H / 2 channel pairs, in float32.

    Rotated pairs come first. Channels that are not rotated follow, paired as two halves.
    """
    turned = 2 * len(rope.inv_freq)
    x = x.astype(jnp.float32)
    first, rest = x[..., :turned], x[..., turned:]
    half, passed = turned // 2, rest.shape[-1] // 2
    rotated = (first[..., 0::2], first[..., 1::2]) if rope.interleaved else (first[..., :half], first[..., half:])
    real, imaginary = (
        jnp.concatenate(part, axis=-1) for part in zip(rotated, (rest[..., :passed], rest[..., passed:]), strict=True)
    )
    return real, imaginary


def frequencies(rope: Rope, head_dim: int) -> tuple[Float[np.ndarray, " F"], Float[np.ndarray, " F"]]:
    """Return the rotation angle per position in radians, and the rotation's amplitude, for each of `pairs`."""
    turned, passed = len(rope.inv_freq), head_dim // 2 - len(rope.inv_freq)
    return (
        np.asarray([*rope.inv_freq, *[0.0] * passed], jnp.float32),
        np.asarray([rope.amplitude] * turned + [1.0] * passed, jnp.float32),
    )


@dataclasses.dataclass(frozen=True)
class MeanQueries(Profile):
    """Query statistics for TriAttention: mean and mean magnitude of unrotated queries as complex numbers.

    Statistics are float16. If TriAttention keeps a quarter of a thousand tokens by SmolLM2's statistics of one text,
    99.98 % of them are the same as with float32 statistics. With another text's statistics, 95 % are the same.

    Attributes:
        queries: [L], for each layer Re μ, Im μ and ρ of every query head and pair, [N, 3, F] in float16, as text
            (`pack`).

    Example:
        >>> from kvjax.calibration.make_profile import profile
        >>> means = profile(params, "triattention", np.tile([5, 9, 2, 7], (2, 8)), "a repeated phrase")
        >>> isinstance(means, kvjax.policies.MeanQueries), len(means.queries)  # layers
        (True, 2)
    """

    noun: ClassVar[str] = "profile of mean queries"
    tables: ClassVar[tuple[str, ...]] = ("queries",)

    queries: tuple[str, ...] = dataclasses.field(repr=False)
    version: int = dataclasses.field(default=2, kw_only=True)

    @classmethod
    def of(cls, found: Float[np.ndarray, "L N 3 F"], **about: Any) -> Self:
        return cls(queries=tuple(pack(layer.astype(_DTYPE).tobytes()) for layer in found), **about)

    @classmethod
    def published(cls, path: str | Path, config: ModelConfig) -> Self:
        """Read statistics in the format of the authors' files (`torch.save` of metadata and statistics of each head).

        Args:
            path: the file. Nothing in it is run.
            config: the model.

        Raises:
            OSError: the file cannot be read.
            PolicyError: the file is not of this kind, or for another model.
        """
        try:
            found = torch_files.read(Path(path))
        except ValueError as error:
            raise PolicyError(f"triattention: {error}") from None
        if not isinstance(found, dict) or not all(isinstance(found.get(key), dict) for key in ("metadata", "stats")):
            raise PolicyError(
                f"triattention: {path} has no 'metadata' and 'stats'. Give a file of TriAttention's authors."
            )
        about, stats = found["metadata"], found["stats"]
        style = "interleaved" if any(mixer.rope.interleaved for mixer in config.attention_kinds) else "half"
        if about.get("rope_style", style) != style:
            raise PolicyError(
                f"triattention: {path} has pairs of rope_style={about['rope_style']!r}, but the model's are {style!r}."
            )
        names, size = ("q_mean_real", "q_mean_imag", "q_abs_mean"), config.head_dim // 2
        keys = [f"layer{i:02d}_head{j:02d}" for i in range(config.num_layers) for j in range(config.num_heads)]
        if set(stats) != set(keys):
            raise PolicyError(
                f"triattention: {path} has statistics of {len(stats)} heads, but the model has {config.num_layers} x "
                f"{config.num_heads}. Give the file of this model."
            )
        arrays = [[stats[key].get(name) if isinstance(stats[key], dict) else None for name in names] for key in keys]
        if any(not isinstance(x, np.ndarray) or x.shape != (size,) for head in arrays for x in head):
            raise PolicyError(
                f"triattention: {path} has a head without {', '.join(names)} of {size} numbers each. Give the file of this model."
            )
        every = np.asarray(arrays, np.float32).reshape(config.num_layers, config.num_heads, 3, size)
        return cls.of(
            every,
            method="triattention",
            model=fingerprint(config),
            data=str(about.get("model_name", "")),
            settings=(),
        )

    @classmethod
    def read_tables(cls, found: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"queries": check_packed(found["queries"])}
        except ValueError as error:
            raise ValueError(f"queries is not one text of packed numbers per layer ({error})") from None

    def require(self, methods: Sequence[str], config: ModelConfig) -> None:
        super().require(methods, config)
        sizes = {len(unpack(text)) for text in self.queries}
        expected = config.num_heads * 3 * (config.head_dim // 2) * _DTYPE.itemsize
        if len(self.queries) != config.num_layers or sizes != {expected}:
            raise PolicyError(
                f"{methods[0]}: the profile has {len(self.queries)} layers of {sorted(sizes)} bytes. This model needs "
                f"{config.num_layers} of {expected}. Check whether the file was truncated."
            )
        for i in range(config.num_layers):
            found = self.layer(i, config.head_dim)
            if not (np.isfinite(found).all() and (found[:, 2] >= 0).all()):
                raise PolicyError(f"{methods[0]}: layer {i} of the profile has impossible statistics. Calibrate again.")

    def layer(self, layer: int, head_dim: int) -> Float[np.ndarray, "N 3 F"]:
        """Return Re μ, Im μ and ρ of every query head of one layer."""
        return np.frombuffer(unpack(self.queries[layer]), _DTYPE).reshape(-1, 3, head_dim // 2).astype(np.float32)
