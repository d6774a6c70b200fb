"""Skewing matrices: rotations that concentrate a head's queries and keys in few channels."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
from jaxtyping import Float

from kvjax.config import ModelConfig

from ..info import PolicyError
from ..profile import Profile, check_packed, pack, unpack

_SCALE, _STEPS = np.dtype("<f2"), 127
"""Dtype of the scales, and number of quantisation steps of an entry on each side of 0."""


@dataclasses.dataclass(frozen=True)
class SkewProfile(Profile):
    """A model's skewing matrices, as InfiniGen computes them from a sample text (Lee et al. 2024, section 4.2).

    An orthogonal matrix is the product of Householder reflections and a sign for each column. This needs half as many
    numbers, and the result is orthogonal however they are rounded. With eight bits each, 98 to 99 % of the tokens that
    InfiniGen selects (two books, SmolLM2) equal those of exact matrices. Rounding matrices to bfloat16 gives about as
    many. The selected tokens receive the same share of attention to three digits (0.611 and 0.623).

    Attributes:
        matrices: [L], the matrices [K, H, H] of each layer as text (`pack`). Columns are orthogonal unit vectors,
            sorted by the size of the sample's queries along them, largest first.

    Example:
        >>> from kvjax.calibration.make_profile import profile
        >>> skews = profile(params, "infinigen", np.tile([5, 9, 2, 7], (2, 8)), "a repeated phrase")
        >>> isinstance(skews, kvjax.policies.SkewProfile), len(skews.matrices)  # layers
        (True, 2)
    """

    noun: ClassVar[str] = "skew profile"
    tables: ClassVar[tuple[str, ...]] = ("matrices",)

    matrices: tuple[str, ...] = dataclasses.field(repr=False)
    version: int = dataclasses.field(default=3, kw_only=True)

    @classmethod
    def of(cls, found: Float[np.ndarray, "L K H H"], **about: Any) -> Self:
        return cls(matrices=tuple(pack(_packed(layer)) for layer in found), **about)

    @classmethod
    def read_tables(cls, found: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"matrices": check_packed(found["matrices"])}
        except ValueError as error:
            raise ValueError(f"matrices is not one text of packed numbers per layer ({error})") from None

    def require(self, methods: Sequence[str], config: ModelConfig) -> None:
        super().require(methods, config)
        sizes = {len(unpack(text)) for text in self.matrices}
        if len(self.matrices) != config.num_layers or sizes != {config.num_kv_heads * _nbytes(config.head_dim)}:
            shape = config.num_kv_heads, config.head_dim, config.head_dim
            raise PolicyError(
                f"{methods[0]}: the profile has {len(self.matrices)} layers of {sorted(sizes)} bytes. This model needs "
                f"{config.num_layers} of matrices {list(shape)} in {config.num_kv_heads * _nbytes(config.head_dim)} bytes. "
                "Check whether the file was truncated."
            )

    def layer(self, layer: int, head_dim: int) -> Float[np.ndarray, "K H H"]:
        """Return the matrices of one layer, in float32."""
        return _unpacked(unpack(self.matrices[layer]), head_dim)


def _nbytes(head_dim: int) -> int:
    """Bytes of one matrix: a signed scale for each column, and the entries below the diagonal."""
    return head_dim * _SCALE.itemsize + head_dim * (head_dim - 1) // 2


def _packed(matrices: Float[np.ndarray, "K H H"]) -> bytes:
    # [K, column, row]: reflections below, ±1 on the diagonal.
    columns, factors = np.linalg.qr(matrices.astype(np.float64), mode="raw")
    signs = np.where(np.diagonal(columns, axis1=1, axis2=2) < 0, -1, 1)
    signs[:, :-1] *= np.where(factors[:, :-1] == 0, -1, 1)  # QR skipped this reflection, but unpacking applies it
    below = np.triu(columns, 1)
    scales = np.abs(below).max(axis=2).clip(np.finfo(_SCALE).tiny).astype(_SCALE)  # never 0, which has no sign
    steps = np.rint(below / scales[..., None].astype(np.float64) * _STEPS).clip(-_STEPS, _STEPS).astype(np.int8)
    places = np.triu_indices(columns.shape[-1], 1)
    heads = zip((signs * scales).astype(_SCALE), steps, strict=True)
    return b"".join(scale.tobytes() + step[places].tobytes() for scale, step in heads)


def _unpacked(packed: bytes, head_dim: int) -> Float[np.ndarray, "K H H"]:
    heads = np.frombuffer(packed, np.uint8).reshape(-1, _nbytes(head_dim))
    scales = heads[:, : head_dim * _SCALE.itemsize].copy().view(_SCALE).astype(np.float64)
    reflections = np.broadcast_to(np.eye(head_dim), (len(heads), head_dim, head_dim)).copy()  # [K, column, row]
    places = np.triu_indices(head_dim, 1)
    steps = heads[:, head_dim * _SCALE.itemsize :].view(np.int8)
    reflections[:, *places] = steps * np.abs(scales)[:, places[0]] / _STEPS
    found = np.broadcast_to(np.eye(head_dim), reflections.shape).copy()
    for i in reversed(range(head_dim - 1)):
        v = reflections[:, i]
        found -= np.einsum(
            "kh,ki->khi", v * 2 / np.sum(v * v, axis=1, keepdims=True), np.einsum("kh,khi->ki", v, found)
        )
    return (found * np.sign(scales)[:, None]).astype(np.float32)
