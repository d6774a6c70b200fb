"""Chelsea's outlier heads, whose keys have no similar neighbours (Hu et al. 2025, appendix B)."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache import LayerSpec
from kvjax.models import Params
from kvjax.pallas_kernels import chunk_similarity
from kvjax.policies.chelsea import CLUSTERED, OUTLIER
from kvjax.policies.profile import Labels

from .recording import record


@dataclasses.dataclass(frozen=True)
class Settings:
    """How heads are scored and selected.

    Attributes:
        fraction: fraction of all heads that are outliers (appendix C.2).
        threshold: minimum cosine similarity of a strong edge (appendix B).
        chunk: tokens within which similar tokens are matched.
        sinks: first tokens of a sample, which are excluded, as they are never merged.
        first_layers: number of first layers whose heads are all outliers, counted within the fraction: 1 for Llama-2
            (appendix C.2).
    """

    fraction: float = 0.04
    threshold: float = 0.8
    chunk: int = 256
    sinks: int = 16
    first_layers: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise ValueError(f"fraction={self.fraction}; give a fraction of all heads, between 0 and 1")
        for field, least in (("chunk", 2), ("sinks", 0), ("first_layers", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"{field}={getattr(self, field)}; give {least} or more")


@dataclasses.dataclass(frozen=True)
class Edges:
    """Measures the fraction of A tokens without a strong edge, in every layer."""

    settings: Settings

    def __call__(self, spec: LayerSpec, q: Array, k: Float[Array, "B T K H"], v: Array) -> Float[Array, "B K"]:
        keys = jnp.swapaxes(k[:, self.settings.sinks :], 1, 2).astype(jnp.float32)
        batch, _, length, _ = keys.shape
        count = jnp.full((batch,), length, jnp.int32)
        similarity, _ = chunk_similarity(keys, jnp.zeros_like(count), count, self.settings.chunk)
        exists = jnp.isfinite(similarity)
        weak = exists & (similarity < self.settings.threshold)
        return jnp.sum(weak, axis=(-2, -1)).astype(jnp.float32) / jnp.sum(exists, axis=(-2, -1)).astype(jnp.float32)


def outlier_scores(
    params: Params,
    samples: Int[np.ndarray, "S T"],
    settings: Settings = Settings(),
    progress: Callable[[int, int], None] | None = None,
) -> Float[np.ndarray, "L K"]:
    """Score every KV head by the fraction of A tokens without a strong edge, over all samples.

    A high score means that the head's keys do not resemble their neighbours.

    Args:
        params: the model.
        samples: token ids of texts of equal length, processed one by one.
        settings: how heads are scored.
        progress: called with the number of finished samples and of all samples.

    Raises:
        ValueError: the samples are too short to have edges.
    """
    if samples.shape[1] < settings.sinks + 2:
        raise ValueError(
            f"samples of {samples.shape[1]} tokens have no edges besides {settings.sinks} sinks; "
            f"give at least {settings.sinks + 2} tokens"
        )
    scores = []
    for i, sample in enumerate(samples):
        found = record(params, sample[None], Edges(settings))
        scores.append(np.stack([layer[0] for layer in found]))
        if progress is not None:
            progress(i + 1, len(samples))
    return np.stack(scores).astype(np.float64).mean(axis=0)


def outlier_heads(scores: Float[np.ndarray, "L K"], fraction: float = 0.04, first_layers: int = 0) -> Labels:
    """Label the heads with the highest scores as "outlier", at least one.

    Args:
        scores: score of each head.
        fraction: fraction of heads that are outliers. Ties go to the first head.
        first_layers: number of first layers whose heads are selected first, and are outliers even beyond the fraction.
    """
    ranked = scores.astype(np.float64)
    ranked[:first_layers] = np.inf
    count = max(1, round(fraction * scores.size), ranked[:first_layers].size)
    outliers = np.zeros(scores.size, bool)
    outliers[np.argsort(-ranked.reshape(-1), kind="stable")[:count]] = True
    return tuple(tuple(OUTLIER if head else CLUSTERED for head in row) for row in outliers.reshape(scores.shape))


def scores_and_labels(
    params: Params,
    samples: Int[np.ndarray, "S T"],
    settings: Settings = Settings(),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Float[np.ndarray, "L K"], Labels]:
    """Contents of a profile for the `chelsea` policy. Arguments as for `outlier_scores`."""
    scores = outlier_scores(params, samples, settings, progress)
    return scores, outlier_heads(scores, settings.fraction, settings.first_layers)
