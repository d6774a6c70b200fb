"""Queries and keys as complex numbers, one for each pair of channels that is rotated together; and a model's mean queries as such."""

import base64
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.models.config import ModelConfig
from kvjax.models.rope import Rope

from ..info import PolicyError
from ..profile import Profile

_DTYPE = np.dtype("<f4")


def pairs(rope: Rope, x: Float[Array, "*S H"]) -> tuple[Float[Array, "*S F"], Float[Array, "*S F"]]:
    """Real and imaginary parts of F = H / 2 pairs, in float32: those that are rotated, then those that pass through, as halves."""
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
    """Of each of `pairs`, the angle per position in radians, and the factor that rotation comes with."""
    turned, passed = len(rope.inv_freq), head_dim // 2 - len(rope.inv_freq)
    return (
        np.asarray([*rope.inv_freq, *[0.0] * passed], np.float32),
        np.asarray([rope.amplitude] * turned + [1.0] * passed, np.float32),
    )


@dataclasses.dataclass(frozen=True)
class MeanQueries(Profile):
    """What TriAttention knows of a model's query heads: of unrotated queries as complex numbers the mean, and the mean size.

    Attributes:
        queries: [L], of each layer Re μ, Im μ and ρ of every query head and pair [N, 3, F] in float32, as base85 text.
    """

    noun: ClassVar[str] = "profile of mean queries"
    tables: ClassVar[tuple[str, ...]] = ("queries",)

    queries: tuple[str, ...] = dataclasses.field(repr=False)

    @classmethod
    def of(cls, found: Float[np.ndarray, "L N 3 F"], **about: Any) -> Self:
        return cls(queries=tuple(base64.b85encode(layer.astype(_DTYPE).tobytes()).decode() for layer in found), **about)

    @classmethod
    def read_tables(cls, found: dict[str, Any]) -> dict[str, Any]:
        queries = found["queries"]
        try:
            texts = isinstance(queries, list) and all(base64.b85decode(text) for text in queries)
        except (TypeError, ValueError):
            texts = False
        if not texts:
            raise ValueError("queries should be one base85 text per layer")
        return {"queries": tuple(queries)}

    def require(self, methods: Sequence[str], config: ModelConfig) -> None:
        super().require(methods, config)
        sizes = {len(base64.b85decode(text)) for text in self.queries}
        expected = config.num_heads * 3 * (config.head_dim // 2) * _DTYPE.itemsize
        if len(self.queries) != config.num_layers or sizes != {expected}:
            raise PolicyError(
                f"{methods[0]}: the profile has {len(self.queries)} layers of {sorted(sizes)} bytes, but should have "
                f"{config.num_layers} of {expected}; was its file cut short?"
            )
        for i in range(config.num_layers):
            found = self.layer(i, config.head_dim)
            if not (np.isfinite(found).all() and (found[:, 2] >= 0).all()):
                raise PolicyError(
                    f"{methods[0]}: the profile's layer {i} has statistics that no queries can have; make it anew"
                )

    def layer(self, layer: int, head_dim: int) -> Float[np.ndarray, "N 3 F"]:
        """Of one layer: Re μ, Im μ and ρ of every query head."""
        return np.frombuffer(base64.b85decode(self.queries[layer]), _DTYPE).reshape(-1, 3, head_dim // 2)
