"""CateKV's consistent heads: coefficient-of-variation scores, and a vote over reference samples (section 3.2)."""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import LayerSpec
from kvjax.models import Params
from kvjax.pallas_kernels.masking import MASKED
from kvjax.policies.profile import Labels, rows

from .recording import record


@dataclasses.dataclass(frozen=True)
class Settings:
    """How heads are scored and selected.

    Attributes:
        ratio: r, fraction of adaptive heads.
        quantile: k, quantile of all entries of an observation matrix that sets the threshold. Appendix B.1: 0.996 for
            Llama-3, 0.984 for Llama-3.1, 0.99 for others.
        alpha: factor on the threshold; 0.8 for Llama-3.1 and Yi, 1 for others.
        window: L_obs, number of last queries of a sample.
        sinks, recent: L_init and L_rec, tokens excluded at the two ends.
        rule: "paper" for equations 2 to 4, or "code" for the published code. The code has a threshold between the
            quantiles 1 - k and k, counts chunks with any critical token, and uses the sample's standard deviation
            instead of the population's.
        chunk: tokens per chunk, for "code".
    """

    ratio: float = 0.4
    quantile: float = 0.99
    alpha: float = 1.0
    window: int = 64
    sinks: int = 64
    recent: int = 256
    rule: Literal["paper", "code"] = "paper"
    chunk: int = 8

    def __post_init__(self) -> None:
        for field in ("ratio", "quantile"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{field}={getattr(self, field)}; give a fraction, 0 to 1")
        for field in ("window", "chunk"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)}; give 1 or more")
        if self.rule not in ("paper", "code"):
            raise ValueError(f"rule={self.rule!r}; give one of 'paper', 'code'")

    def middle(self, length: int) -> int:
        """Number of tokens between sinks and recent tokens that are scored; for "code", a multiple of `chunk`.

        Raises:
            ValueError: there are no such tokens.
        """
        tokens = length - self.sinks - self.recent
        if tokens < max(2, 2 * self.chunk if self.rule == "code" else 0):
            raise ValueError(
                f"samples of {length} tokens leave {max(tokens, 0)} between {self.sinks} sinks and {self.recent} recent ones; "
                "give longer samples"
            )
        return tokens // self.chunk * self.chunk if self.rule == "code" else tokens


@dataclasses.dataclass(frozen=True)
class Scores:
    """Measures the score of each KV head, in every layer."""

    settings: Settings

    def __call__(self, spec: LayerSpec, q: Array, k: Array, v: Array) -> Float[Array, "B K"]:
        batch, length = q.shape[:2]
        middle = self.settings.middle(length)

        def each(value: int) -> Int[Array, " B"]:
            return jnp.full((batch,), value, jnp.int32)

        observed = observation(
            q,
            k,
            each(length),
            first=each(self.settings.sinks),
            middle=each(middle),
            window=self.settings.window,
            scale=spec.scale,
            sliding_window=spec.window,
        )
        return variation(frequencies(observed[..., :middle], self.settings), self.settings)


def head_scores(
    params: Params,
    samples: Int[np.ndarray, "S T"],
    settings: Settings,
    progress: Callable[[int, int], None] | None = None,
) -> Float[np.ndarray, "S L K"]:
    """Score every KV head on every sample: low where attention moves, high where it stays on few tokens.

    Args:
        params: the model.
        samples: token ids of texts of equal length.
        settings: how heads are scored.
        progress: called with the number of finished samples and of all samples.

    Raises:
        ValueError: the samples are too short.
    """
    scores = []
    for i, sample in enumerate(samples):
        layers = record(params, sample[None], Scores(settings))
        scores.append(np.stack([layer[0] for layer in layers]))
        if progress is not None:
            progress(i + 1, len(samples))
    return np.stack(scores)


def observation(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    lengths: Int[Array, " B"],
    *,
    first: Int[Array, " B"],
    middle: Int[Array, " B"],
    window: int,
    scale: float,
    sliding_window: int | None = None,
) -> Float[Array, "B K w T"]:
    """Observation matrix A (equation 1): attention of the last queries to the middle of the prompt.

    Softmax over the middle only, causal, averaged over the query group.

    Args:
        q, k: rotated queries and keys of right-padded prompts.
        lengths: number of tokens in each row.
        first, middle: start and number of tokens of the middle, in each row.
        window: L_obs, number of last queries; zeros for queries that a row does not have.
        scale: factor on the logits.
        sliding_window: attention window of the layer in tokens, if it has one.

    Returns:
        Column j is token j of the middle, at position first + j; zeros from `middle` on.
    """
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    columns = jnp.arange(length, dtype=jnp.int32)
    k_pos = first[:, None] + columns  # [B, T]
    q_pos = lengths[:, None] - window + jnp.arange(window, dtype=jnp.int32)  # [B, w]
    keys = jnp.take_along_axis(k, jnp.minimum(k_pos, length - 1)[:, :, None, None], axis=1)
    rows = jnp.take_along_axis(q, jnp.maximum(q_pos, 0)[:, :, None, None], axis=1)
    rows = rows.reshape(batch, window, kv_heads, heads // kv_heads, dim)

    distance = q_pos[:, :, None] - k_pos[:, None]
    visible = (distance >= 0) & (q_pos >= 0)[:, :, None] & (columns < middle[:, None])[:, None]  # [B, w, T]
    if sliding_window is not None:
        visible &= distance < sliding_window
    logits = jnp.einsum("bwkgh,btkh->bkgwt", rows, keys, preferred_element_type=jnp.float32) * scale
    logits = jnp.where(visible[:, None, None], logits, MASKED)
    weights = jnp.where(visible[:, None, None], jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.mean(weights / jnp.maximum(total, jnp.finfo(jnp.float32).tiny), axis=2)


def critical(observed: Float[Array, "*H w M"], settings: Settings) -> Bool[Array, "*H w M"]:
    """Binarised observation matrix (equation 2): which entries are above the head's threshold."""
    entries = observed.reshape(*observed.shape[:-2], -1)
    high = jnp.quantile(entries, settings.quantile, axis=-1)[..., None, None]
    if settings.rule == "paper":
        return observed >= settings.alpha * high
    low = jnp.quantile(entries, 1 - settings.quantile, axis=-1)[..., None, None]
    return observed > jnp.maximum(low + (high - low) * settings.alpha, 1e-9)


def frequencies(observed: Float[Array, "*H w M"], settings: Settings) -> Int[Array, "*H C"]:
    """Number of queries that find each token critical (equation 3); for "code", each chunk."""
    hits = critical(observed, settings)
    if settings.rule == "code":
        hits = jnp.any(hits.reshape(*hits.shape[:-1], -1, settings.chunk), axis=-1)
    return jnp.sum(hits, axis=-2, dtype=jnp.int32)


def variation(counts: Int[Array, "*H C"], settings: Settings) -> Float[Array, "*H"]:
    """Coefficient of variation of the counts (equation 4): standard deviation over mean."""
    values = counts.astype(jnp.float32)
    if settings.rule == "paper":
        return jnp.std(values, axis=-1) / jnp.mean(values, axis=-1)
    mean = jnp.mean(values, axis=-1)
    return jnp.std(values, axis=-1, ddof=1) / jnp.where(mean == 0, 1e-10, mean)


def adaptive_by_sample(scores: Float[np.ndarray, "S L K"], ratio: float) -> Bool[np.ndarray, "S L K"]:
    """Adaptive heads on each sample (equation 5): those whose score is within the sample's r-quantile."""
    return scores <= np.quantile(scores, ratio, axis=(1, 2), keepdims=True)


def vote(adaptive: Bool[np.ndarray, "S L K"], ratio: float) -> Labels:
    """Head types of the model: the ⌈r·L·K⌉ heads that are most often adaptive. Ties go to the first layer and head."""
    votes = adaptive.sum(axis=0)
    order = np.argsort(-votes.reshape(-1), kind="stable")
    count = math.ceil(Fraction(ratio).limit_denominator(10_000) * votes.size)
    labels = np.full(votes.size, "consistent", object)
    labels[order[:count]] = "adaptive"
    return rows(labels.reshape(votes.shape).tolist())


def scores_and_labels(
    params: Params,
    samples: Int[np.ndarray, "S T"],
    settings: Settings = Settings(),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Float[np.ndarray, "L K"], Labels]:
    """Contents of a profile for the `catekv` policy: mean scores, and labels by vote. Arguments as for `head_scores`."""
    scores = head_scores(params, samples, settings, progress)
    return scores.mean(axis=0), vote(adaptive_by_sample(scores, settings.ratio), settings.ratio)
