"""Skewing matrices: directions that turn a head's queries and keys so that few channels tell their products."""

import base64
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
from jaxtyping import Float

from kvjax.models.config import ModelConfig

from .base import PolicyError
from .profile import Profile

_TYPE = np.dtype("<f2")


@dataclasses.dataclass(frozen=True)
class SkewProfile(Profile):
    """A model's skewing matrices, as InfiniGen makes them of a sample text (Lee et al. 2024, section 4.2).

    Attributes:
        matrices: [L], the matrices [K, H, H] of each layer in float16, as base64 text. A matrix has orthogonal unit vectors as
            its columns, those in which the sample's queries are largest first.
    """

    noun: ClassVar[str] = "skew profile"
    tables: ClassVar[tuple[str, ...]] = ("matrices",)

    matrices: tuple[str, ...] = dataclasses.field(repr=False)

    @classmethod
    def of(cls, found: Float[np.ndarray, "L K H H"], **about: Any) -> Self:
        return cls(matrices=tuple(base64.b64encode(layer.astype(_TYPE).tobytes()).decode() for layer in found), **about)

    @classmethod
    def read_tables(cls, found: dict[str, Any]) -> dict[str, Any]:
        matrices = found["matrices"]
        try:
            texts = isinstance(matrices, list) and all(base64.b64decode(text, validate=True) for text in matrices)
        except (TypeError, ValueError):
            texts = False
        if not texts:
            raise ValueError("matrices should be one base64 text a layer")
        return {"matrices": tuple(matrices)}

    def require(self, methods: Sequence[str], config: ModelConfig) -> None:
        super().require(methods, config)
        shape = config.num_kv_heads, config.head_dim, config.head_dim
        sizes = {len(base64.b64decode(text)) for text in self.matrices}
        if len(self.matrices) != config.num_layers or sizes != {int(np.prod(shape)) * _TYPE.itemsize}:
            raise PolicyError(
                f"{methods[0]}: the profile has {len(self.matrices)} layers of {sorted(sizes)} bytes, but should have "
                f"{config.num_layers} of matrices {list(shape)} in float16; was its file cut short?"
            )

    def layer(self, layer: int, head_dim: int) -> Float[np.ndarray, "K H H"]:
        """The matrices of one layer, in float32."""
        flat = np.frombuffer(base64.b64decode(self.matrices[layer]), _TYPE)
        return flat.reshape(-1, head_dim, head_dim).astype(np.float32)
