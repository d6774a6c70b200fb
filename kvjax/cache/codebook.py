"""Low-bit codes of rotated vectors, whose nearly Gaussian coordinates are rounded to an optimal codebook.

This is TurboQuant's scheme (Zandieh et al. 2025) without its residual sketch. A vector is normed and rotated:
y = Π x / |x| with an orthogonal Π. Each coordinate of √d y has the code of the nearest entry of the Lloyd-Max quantiser
of N(0, 1). A factor restores the vector's norm.
"""

import functools
import itertools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from .packing import Bits, join_codes, part_of_codes, run_slots, set_codes, set_codes_run, split_codes


@flax.struct.dataclass
class Coded:
    """Rotated keys or values in low-bit codes.

    B rows, K KV heads, C slots, H head dim, CN = C × bits / 8 bytes for each coordinate.

    Attributes:
        codes: codes of neighbouring slots in shared bytes for each coordinate, as in `packing.Packed`.
        factor: factor of each slot's codebook entries, 0 for the vector 0.
    """

    codes: UInt8[Array, "B K CN H"]
    factor: Float[Array, "B K C"]

    @property
    def slot_axes(self) -> Any:
        """Slot axis of each array."""
        return jax.tree.map(lambda _: 2, self)

    def part(self, start: Any, size: int, bits: Bits) -> "Coded":
        """Return `size` slots from `start` on. Both are whole runs, see `packing.run_slots`."""
        codes = part_of_codes(self.codes, start, size, bits)
        return Coded(codes, jax.lax.dynamic_slice_in_dim(self.factor, start, size, axis=2))


@functools.cache
def levels(bits: int) -> np.ndarray:
    """The codebook: 2^bits entries with minimum squared error for N(0, 1), ascending (Lloyd 1982; Max 1960)."""

    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def below(x: float) -> float:
        return (1 + math.erf(x / math.sqrt(2))) / 2

    found = np.linspace(-2, 2, 2**bits)
    while True:
        edges = [-math.inf, *((found[:-1] + found[1:]) / 2).tolist(), math.inf]
        means = [(density(a) - density(b)) / (below(b) - below(a)) for a, b in itertools.pairwise(edges)]
        moved, found = float(np.abs(means - found).max()), np.asarray(means)
        if moved < 1e-12:
            return (found - found[::-1]) / 2  # exactly symmetric


@functools.cache
def rotation(dim: int, signs: int | None = None) -> np.ndarray:
    """Sylvester's Hadamard matrix over √dim, [H, H]. `dim` is a power of two.

    Args:
        dim: H.
        signs: seed of random sign changes of coordinates before the rotation. None for none.
    """
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    if signs is not None:
        matrix = matrix * np.random.default_rng(signs).choice([-1.0, 1.0], size=dim)
    return (matrix / math.sqrt(dim)).astype(np.float32)


def rotate(x: Float[Array, "*B H"], matrix: np.ndarray) -> Float[Array, "*B H"]:
    """Π x, in float32."""
    return jnp.einsum("...h,gh->...g", x.astype(jnp.float32), matrix, precision="highest")


def rotate_back(x: Float[Array, "*B H"], matrix: np.ndarray) -> Float[Array, "*B H"]:
    """Πᵀ x, in float32."""
    return jnp.einsum("...g,gh->...h", x.astype(jnp.float32), matrix, precision="highest")


def quantise(
    x: Float[Array, "*B H"], bits: Bits, matrix: np.ndarray, dtype: Any
) -> tuple[UInt8[Array, "*B H"], Float[Array, "*B"]]:
    """Return codes, one byte each, and factors that restore the vectors' norms ("norm correction").

    Args:
        x: vectors.
        bits: bits per code.
        matrix: Π.
        dtype: dtype of the factors.
    """
    found = jnp.asarray(levels(bits), jnp.float32)
    length = jnp.linalg.norm(x.astype(jnp.float32), axis=-1)
    unit = rotate(x, matrix) / jnp.maximum(length, jnp.finfo(jnp.float32).tiny)[..., None]
    codes = jnp.searchsorted((found[1:] + found[:-1]) / 2, unit * math.sqrt(x.shape[-1])).astype(jnp.uint8)
    return codes, (length / jnp.linalg.norm(found[codes], axis=-1)).astype(dtype)


def encode(x: Float[Array, "B K C H"], bits: Bits, matrix: np.ndarray, dtype: Any) -> Coded:
    """Code keys or values. C is whole runs."""
    codes, factor = quantise(x, bits, matrix, dtype)
    return Coded(join_codes(codes, bits), factor)


def decode(coded: Coded, bits: Bits) -> Float[Array, "B K C H"]:
    """Decode to vectors that are still rotated, in float32."""
    found = jnp.asarray(levels(bits), jnp.float32)
    return found[split_codes(coded.codes, bits)] * coded.factor.astype(jnp.float32)[..., None]


def put(coded: Coded, x: Float[Array, "B K H"], slot: Int[Array, "B K"], bits: Bits, matrix: np.ndarray) -> Coded:
    """Set one slot of each head. Slots out of bounds are dropped."""
    codes, factor = quantise(x, bits, matrix, coded.factor.dtype)
    rows, heads = (jnp.arange(n, dtype=jnp.int32) for n in slot.shape)
    at = rows[:, None], heads[None, :], slot
    return Coded(set_codes(coded.codes, codes, slot, bits), coded.factor.at[at].set(factor, mode="drop"))


def put_run(
    coded: Coded,
    x: Float[Array, "B K W H"],
    start: Int[Array, "B K"],
    stop: Int[Array, "B K"],
    bits: Bits,
    matrix: np.ndarray,
) -> Coded:
    """Set slots `start` to `stop` of each head.

    Args:
        coded: the codes.
        x: vectors from the first slot in the run of `start` on (`packing.run_slots`). W is whole runs.
        start, stop: first slot, and the slot after the last.
        bits: bits per code.
        matrix: Π.
    """
    count, size = run_slots(bits), coded.factor.shape[2]
    codes, factor = quantise(x, bits, matrix, coded.factor.dtype)
    slot = (start // count * count)[..., None] + jnp.arange(x.shape[2], dtype=jnp.int32)
    mine = (slot >= start[..., None]) & (slot < stop[..., None])
    rows, heads = (jnp.arange(n, dtype=jnp.int32) for n in start.shape)
    at = rows[:, None, None], heads[None, :, None], jnp.where(mine, slot, size)
    return Coded(set_codes_run(coded.codes, codes, slot, mine, bits), coded.factor.at[at].set(factor, mode="drop"))
