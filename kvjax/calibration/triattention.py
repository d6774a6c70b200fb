"""TriAttention's statistics: means of a text's unrotated queries, as complex numbers, and of their magnitudes (Mao et al. 2026)."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache import LayerSpec
from kvjax.models import Params
from kvjax.policies.families.trigonometry import frequencies, pairs

from .recording import record


@dataclasses.dataclass(frozen=True)
class Settings:
    """No settings."""


@dataclasses.dataclass(frozen=True)
class Sums:
    """Measures sums over tokens of the unrotated queries' real parts, imaginary parts and magnitudes, in every layer."""

    def __call__(self, spec: LayerSpec, q: Float[Array, "B T N H"], k: Array, v: Array) -> Float[Array, "N 3 F"]:
        omega, factor = frequencies(spec.rope, spec.head_dim)
        angle = jnp.arange(q.shape[1], dtype=jnp.float32)[:, None, None] * omega
        c, s = jnp.cos(angle) / factor, jnp.sin(angle) / factor
        a, b = pairs(spec.rope, q)
        real, imaginary = a * c + b * s, b * c - a * s  # undo the rotation
        return jnp.stack([jnp.sum(x, axis=(0, 1)) for x in (real, imaginary, jnp.hypot(real, imaginary))], axis=1)


def mean_queries(
    params: Params,
    samples: Int[np.ndarray, "S T"],
    settings: Settings = Settings(),
    progress: Callable[[int, int], None] | None = None,
) -> Float[np.ndarray, "L N 3 F"]:
    """Re μ, Im μ and ρ of every query head and pair of channels, over all tokens of the samples.

    Args:
        params: the model.
        samples: token ids of texts of equal length, processed one by one. (The published script uses one text of up to
            32768 tokens.)
        settings: none are used.
        progress: called with the number of finished samples and of all samples.
    """
    total = 0.0
    for i, sample in enumerate(samples):
        total = total + np.stack(record(params, sample[None], Sums())).astype(np.float64)
        if progress is not None:
            progress(i + 1, len(samples))
    return (np.asarray(total) / samples.size).astype(np.float32)
