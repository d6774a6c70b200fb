"""InfiniGen's skewing matrices: singular vectors of a sample text's queries (Lee et al. 2024, section 4.2)."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache import LayerSpec
from kvjax.models import Params

from .recording import record


@dataclasses.dataclass(frozen=True)
class Settings:
    """No settings: all singular vectors are kept, and the policy selects among them for each prompt."""


@dataclasses.dataclass(frozen=True)
class Gram:
    """Measures QᵀQ of the rotated queries of all heads that share keys, in every layer."""

    def __call__(self, spec: LayerSpec, q: Float[Array, "B T N H"], k: Array, v: Array) -> Float[Array, "K H H"]:
        grouped = q.reshape(*q.shape[:2], spec.num_kv_heads, -1, spec.head_dim).astype(jnp.float32)
        return jnp.einsum("btkgh,btkgi->khi", grouped, grouped, precision="highest")


def skewing_matrices(
    params: Params,
    samples: Int[np.ndarray, "S T"],
    settings: Settings = Settings(),
    progress: Callable[[int, int], None] | None = None,
) -> Float[np.ndarray, "L K H H"]:
    """Right singular vectors of each KV head's queries over all samples, as columns, by descending singular value.

    The sign of each vector is chosen so that its largest entry is positive.

    Args:
        params: the model.
        samples: token ids of texts of equal length, processed one by one. (The published code uses 2048 tokens of one
            book.)
        settings: none are used.
        progress: called with the number of finished samples and of all samples.
    """
    total = 0.0
    for i, sample in enumerate(samples):
        total = total + np.stack(record(params, sample[None], Gram())).astype(np.float64)
        if progress is not None:
            progress(i + 1, len(samples))
    vectors = np.linalg.eigh(total)[1][..., ::-1]
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=-2, keepdims=True), axis=-2)
    return vectors * np.sign(largest)
