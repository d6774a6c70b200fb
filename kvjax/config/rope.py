"""Rotary position embeddings: plain, and the four context extensions that the supported families use.

`RopeConfig` has the values of a checkpoint. `RopeConfig.resolve(length)` returns a `Rope`, which rotates arrays. Both
are frozen and hashable, so they can be static arguments of a compiled function.

Frequencies are computed in float32 with the formulas of the reference implementations. At position 8000, one unit in
the last place of a frequency is already 5e-4 rad.
"""

import dataclasses
import functools
import math
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotates the first `2 * len(inv_freq)` channels of a head. The other channels pass through.

    Attributes:
        inv_freq: angle per position of each channel pair, in radians.
        amplitude: factor on cosine and sine (attention factor of YaRN and LongRoPE).
        interleaved: whether pairs are channels (2i, 2i + 1) as in GLM, instead of (i, i + half) as in Llama.

    Example:
        >>> rope = kvjax.config.RopeConfig(theta=10000.0, dim=4).resolve(64)
        >>> x = jnp.ones((3, 4))  # tokens, channels
        >>> bool((rope.rotate(x, jnp.arange(3))[0] == x[0]).all())  # position 0 is not rotated
        True
    """

    inv_freq: tuple[float, ...]
    amplitude: float = 1.0
    interleaved: bool = False

    def rotates_halves_of(self, dim: int) -> bool:
        """Whether all `dim` channels rotate, and pairs are (i, i + half)."""
        return 2 * len(self.inv_freq) == dim and not self.interleaved

    def cos_sin(self, pos: Int[Array, "*S"]) -> tuple[Float[Array, "*S R"], Float[Array, "*S R"]]:
        """Cosine and sine of every pair's angle at each position, in float32."""
        angle = pos.astype(jnp.float32)[..., None] * jnp.asarray(self.inv_freq, jnp.float32)
        return jnp.cos(angle) * self.amplitude, jnp.sin(angle) * self.amplitude

    def rotate(self, x: Float[Array, "*S H"], pos: Int[Array, "*#S"]) -> Float[Array, "*S H"]:
        """Rotate each head vector of `x` to its position, in float32. The result has the type of `x`."""
        return self.apply(x, *self.cos_sin(pos))

    def rotate_by_table(self, x: Float[Array, "*S H"], pos: Int[Array, "*#S"], size: int) -> Float[Array, "*S H"]:
        """`rotate` for positions below `size` that differ between heads.

        Rows are gathered from one table of `size` rows. A cache of C slots in K heads and L layers then needs C sines
        per step instead of L·K·C, since XLA computes the table once for all layers.
        """
        cos, sin = self.cos_sin(jnp.arange(size, dtype=jnp.int32))
        return self.apply(x, jnp.take(cos, pos, axis=0, mode="clip"), jnp.take(sin, pos, axis=0, mode="clip"))

    def apply(
        self, x: Float[Array, "*S H"], cos: Float[Array, "*#S R"], sin: Float[Array, "*#S R"]
    ) -> Float[Array, "*S H"]:
        """Rotate `x` by angles given as cosine and sine."""
        half = len(self.inv_freq)
        turned, passed = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turned.shape)
        else:
            a, b = turned[..., :half], turned[..., half:]
            turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        return jnp.concatenate([turned.astype(x.dtype), passed], axis=-1)


NO_ROPE = Rope(inv_freq=())
"""Rotates nothing: for layers without rotary embedding, or that rotate on their own."""


def _require_positive(scaling: Any, *names: str) -> None:
    for name in names:
        value = getattr(scaling, name)
        for number in value if isinstance(value, tuple) else (value,):
            # Products of their squares and scores stay within float32.
            if number is not None and not 1e-6 <= number <= 1e10:
                raise ValueError(f"rope scaling's {name}={number} must lie between 1e-6 and 1e10")


class RopeScaling(Protocol):
    """A context extension: changes the frequencies for a sequence of `length` positions."""

    def scale(self, inv_freq: np.ndarray, theta: float, length: int) -> tuple[np.ndarray, float]:
        """Scaled frequencies, and the factor on cosine and sine."""
        ...

    def extended(self, max_position: int) -> int:
        """Window in tokens, for a checkpoint whose `max_position` is given."""
        ...


@dataclasses.dataclass(frozen=True)
class Linear:
    """Position interpolation (Chen et al. 2023): divides every position by `factor`.

    Example:
        >>> from kvjax.config import Linear, RopeConfig
        >>> plain, scaled = (RopeConfig(1e4, dim=4, scaling=each).resolve(64) for each in (None, Linear(factor=2.0)))
        >>> plain.inv_freq[0] / scaled.inv_freq[0]
        2.0
    """

    factor: float

    def __post_init__(self) -> None:
        _require_positive(self, "factor")

    def scale(self, inv_freq: np.ndarray, theta: float, length: int) -> tuple[np.ndarray, float]:
        return inv_freq / np.float32(self.factor), 1.0

    def extended(self, max_position: int) -> int:
        """`max_position` of a checkpoint is the window before scaling."""
        return round(max_position * self.factor)


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Llama 3.1: divides long wavelengths by `factor`, keeps short ones, and interpolates in between.

    Example:
        >>> from kvjax.config import Llama3, RopeConfig
        >>> scaling = Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
        >>> plain, scaled = (RopeConfig(5e5, dim=128, scaling=each).resolve(64) for each in (None, scaling))
        >>> plain.inv_freq[0] == scaled.inv_freq[0], round(plain.inv_freq[-1] / scaled.inv_freq[-1], 3)
        (True, 8.0)
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        _require_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_position")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be below high_freq_factor={self.high_freq_factor}"
            )

    def scale(self, inv_freq: np.ndarray, theta: float, length: int) -> tuple[np.ndarray, float]:
        wavelength = 2 * math.pi / inv_freq
        smooth = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        smooth = np.clip(smooth, 0, 1).astype(np.float32)
        return (1 - smooth) * inv_freq / np.float32(self.factor) + smooth * inv_freq, 1.0

    def extended(self, max_position: int) -> int:
        """`max_position` of a checkpoint is the window after scaling."""
        return max_position


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023): NTK-by-parts interpolation with an attention factor.

    Example:
        >>> yarn = kvjax.config.Yarn(factor=4.0, original_max_position=4096)
        >>> round(kvjax.config.RopeConfig(theta=10000.0, dim=16, scaling=yarn).resolve(8192).amplitude, 3)
        1.139
    """

    factor: float
    original_max_position: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _require_positive(self, "factor", "original_max_position", "attention_factor", "beta_fast", "beta_slow")

    def scale(self, inv_freq: np.ndarray, theta: float, length: int) -> tuple[np.ndarray, float]:
        half = len(inv_freq)

        def channel(rotations: float) -> float:
            """The (fractional) channel that rotates this often within the original window."""
            return half * math.log(self.original_max_position / (rotations * 2 * math.pi)) / math.log(theta)

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        if low == high:
            high += 0.001
        interpolated = np.clip((np.arange(half, dtype=np.float32) - low) / (high - low), 0, 1).astype(np.float32)
        factor = self.attention_factor
        if factor is None:
            factor = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return inv_freq / np.float32(self.factor) * interpolated + inv_freq * (1 - interpolated), factor

    def extended(self, max_position: int) -> int:
        """`max_position` may be the window before or after scaling, so it is not used."""
        return round(self.original_max_position * self.factor)


@dataclasses.dataclass(frozen=True)
class LongRope:
    """LongRoPE (Ding et al. 2024), as in Phi-3: one factor per channel, with another set beyond the original window.

    Example:
        >>> from kvjax.config import LongRope, RopeConfig
        >>> scaling = LongRope((1.0, 1.0), (1.0, 8.0), original_max_position=4096, factor=32.0)
        >>> config = RopeConfig(1e4, dim=4, scaling=scaling)
        >>> round(config.resolve(4096).inv_freq[1] / config.resolve(8192).inv_freq[1], 3)  # the other set of factors
        8.0
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position: int
    factor: float
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "short_factor", "long_factor", "factor", "attention_factor")
        if self.original_max_position < 2:
            raise ValueError(f"original_max_position={self.original_max_position} must be at least 2")

    def scale(self, inv_freq: np.ndarray, theta: float, length: int) -> tuple[np.ndarray, float]:
        extension = self.long_factor if length > self.original_max_position else self.short_factor
        factor = self.attention_factor
        if factor is None:
            factor = (
                math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position)) if self.factor > 1 else 1.0
            )
        return inv_freq / np.asarray(extension, np.float32), factor

    def extended(self, max_position: int) -> int:
        """`max_position` of a checkpoint is the window after scaling."""
        return max_position


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of a checkpoint.

    Attributes:
        theta: base of the wavelengths.
        dim: number of rotated channels of a head: all, or the first ones.
        interleaved: see `Rope`.
        scaling: context extension, if any.

    Example:
        >>> from kvjax.config import RopeConfig, Yarn
        >>> config = RopeConfig(theta=10000.0, dim=16, scaling=Yarn(factor=4.0, original_max_position=4096))
        >>> rope = config.resolve(8192)
        >>> len(rope.inv_freq), round(rope.amplitude, 3)
        (8, 1.139)
    """

    theta: float
    dim: int
    interleaved: bool = False
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if not 1 < self.theta < 1e30:
            raise ValueError(f"rope theta={self.theta} must lie between 1 and 1e30")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self.scaling, name, None)
            if factors is not None and len(factors) != self.dim // 2:
                raise ValueError(
                    f"{name} has {len(factors)} numbers; give one for each of {self.dim // 2} rotated pairs"
                )

    @property
    def changes_after(self) -> int | None:
        """Sequence length in tokens beyond which the rotation changes; None if it never does."""
        scaling = self.scaling
        if not isinstance(scaling, LongRope) or scaling.short_factor == scaling.long_factor:
            return None
        return int(scaling.original_max_position)

    @functools.lru_cache(maxsize=256)  # noqa: B019, configurations are small and few
    def resolve(self, length: int) -> Rope:
        """Rotation for a sequence of `length` positions.

        Only LongRoPE depends on `length`. All keys of a cache have the same rotation. `generate` selects it by the
        current number of tokens, and prefills again when they outgrow the original window, as Hugging Face transformers
        does. `Engine`, `aot_compile` and `Session` select it by their maximum length, as vLLM and llama.cpp do.
        """
        exponent = np.arange(0, self.dim, 2).astype(np.float32) / np.float32(self.dim)
        # Power in float64, rounded once: numpy's float32 power differs by up to two units in the last place from
        # torch's nearly exact one.
        inv_freq = np.float32(1) / np.power(self.theta, exponent.astype(np.float64)).astype(np.float32)
        amplitude = 1.0
        if self.scaling is not None:
            inv_freq, amplitude = self.scaling.scale(inv_freq, self.theta, length)
        return Rope(tuple(float(f) for f in inv_freq.astype(np.float32)), amplitude, self.interleaved)
