"""Finds retrieval heads without text: RazorAttention's echo and induction heads (Tang et al. 2024, section 3.2).

The model processes several repetitions of random tokens. At a repeated token, an echo head attends to the token's
earlier occurrence. An induction head attends to the token after that occurrence.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache import LayerSpec
from kvjax.models import Params
from kvjax.pallas_kernels.masking import MASKED
from kvjax.policies.duoattention import RETRIEVAL, STREAMING
from kvjax.policies.profile import Labels

from .recording import record

BLOCK = 256
"""Number of queries whose logits are in memory at a time."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How heads are scored and selected.

    Attributes:
        repeats: number of repetitions of the tokens (the paper uses 2500 tokens, 4 times).
        induction: fraction of KV heads that are selected by their induction score.
        echo: fraction of KV heads that are selected by their echo score.
    """

    repeats: int = 4
    induction: float = 0.14
    echo: float = 0.01

    def __post_init__(self) -> None:
        if self.repeats < 2:
            raise ValueError(f"repeats={self.repeats}; give 2 or more")
        for field in ("induction", "echo"):
            if not 0 < getattr(self, field) <= 1:
                raise ValueError(f"{field}={getattr(self, field)}; give a fraction of all heads, above 0 and up to 1")


@dataclasses.dataclass(frozen=True)
class Matches:
    """Measures the mean attention of repeated tokens' queries to the matching tokens, in every layer.

    Attributes:
        period: number of tokens after which the text repeats.
    """

    period: int

    def __call__(self, spec: LayerSpec, q: Float[Array, "B T N H"], k: Array, v: Array) -> Float[Array, "2 B N"]:
        """Attention to echo tokens and to induction tokens, each summed over all earlier repetitions."""
        batch, length, kv_heads, dim = k.shape
        grouped = q.reshape(batch, length, kv_heads, -1, dim)
        total = log_totals(spec, grouped, k)

        def attention(since: int, ahead: int) -> Float[Array, "B K G"]:
            """Attention of every query past `since` to the token `since` positions before it, or `ahead` after that."""
            if spec.window is not None and since - ahead >= spec.window:
                return jnp.zeros(total.shape[0:1] + total.shape[2:], jnp.float32)
            keys = k[:, ahead : length - since + ahead]
            logits = jnp.einsum("btkgh,btkh->btkg", grouped[:, since:], keys, preferred_element_type=jnp.float32)
            return jnp.sum(jnp.exp(logits * spec.scale - total[:, since:]), axis=1)

        matches = range(self.period, length, self.period)
        sums = jnp.stack([sum(attention(since, ahead) for since in matches) for ahead in (0, 1)])  # pyright: ignore
        return sums.reshape(2, batch, -1) / (length - self.period)


def log_totals(spec: LayerSpec, q: Float[Array, "B T K G H"], k: Float[Array, "B T K H"]) -> Float[Array, "B T K G"]:
    """Log-sum-exp of each query's causal logits."""
    length = k.shape[1]
    blocks = jnp.pad(q, [(0, 0), (0, -length % BLOCK), (0, 0), (0, 0), (0, 0)])
    blocks = jnp.moveaxis(blocks.reshape(q.shape[0], -1, BLOCK, *q.shape[2:]), 1, 0)
    pos = jnp.arange(length, dtype=jnp.int32)

    def one(block: tuple[Array, Array]) -> Array:
        queries, first = block
        logits = jnp.einsum("bqkgh,bskh->bqkgs", queries, k, preferred_element_type=jnp.float32) * spec.scale
        distance = (first + jnp.arange(BLOCK, dtype=jnp.int32))[:, None] - pos
        visible = (distance >= 0) & (distance < (length if spec.window is None else spec.window))
        return jax.nn.logsumexp(jnp.where(visible[:, None, None], logits, MASKED), axis=-1)

    totals = jax.lax.map(one, (blocks, jnp.arange(len(blocks), dtype=jnp.int32) * BLOCK))
    return jnp.moveaxis(totals, 0, 1).reshape(q.shape[0], -1, *q.shape[2:4])[:, :length]


def random_tokens(params: Params, files: Sequence[Path], count: int, length: int) -> tuple[np.ndarray, str]:
    """Samples of random tokens and their description. A sample repeats no token if the vocabulary is large enough.

    Raises:
        ValueError: files are given, which are not used, or samples are too few or too short.
    """
    if files:
        raise ValueError(f"heads are scored on random tokens, but text is given ({files[0]}); omit it")
    if count < 1 or length < 2:
        raise ValueError(f"{count} samples of {length} random tokens; give 1 or more, of 2 or more tokens")
    random, size = np.random.default_rng(0), params.config.vocab_size
    samples = np.stack([random.choice(size, length, replace=length > size) for _ in range(count)])
    return samples.astype(np.int32), f"{count} samples of {length} random tokens, seed 0"


def match_scores(
    params: Params,
    samples: Int[np.ndarray, "S T"],
    settings: Settings = Settings(),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Float[np.ndarray, "L K"], Float[np.ndarray, "L K"]]:
    """Induction and echo score of every KV head: mean attention of its best query head, over all samples.

    The published code averages over pairs of tokens. Its scores are these, divided by half the number of repetitions.

    Args:
        params: the model.
        samples: random tokens, before they are repeated.
        settings: how heads are scored.
        progress: called with the number of finished samples and of all samples.

    Raises:
        ValueError: the model has attention sinks.
    """
    if params.config.has_sinks:
        raise ValueError(
            "razorattention: scores of heads are not implemented for models with attention sinks, such as "
            f"{params.config.family}. Use duoattention."
        )
    found = []
    for i, sample in enumerate(samples):
        layers = record(params, np.tile(sample, settings.repeats)[None], Matches(len(sample)))
        found.append(np.stack(layers)[:, :, 0])
        if progress is not None:
            progress(i + 1, len(samples))
    heads = np.mean(found, axis=0)  # [L, 2, N]
    best = heads.reshape(*heads.shape[:2], params.config.for_policy.num_kv_heads, -1).max(axis=-1)
    return best[:, 1], best[:, 0]


def retrieval_heads(
    induction: Float[np.ndarray, "L K"], echo: Float[np.ndarray, "L K"], settings: Settings = Settings()
) -> tuple[Float[np.ndarray, "L K"], Labels]:
    """Select retrieval heads: those with the highest induction scores, and those with the highest echo scores.

    Each criterion selects its fraction of all heads, rounded, and at least one. Ties go to the first head.

    Returns:
        One score per head, and the labels. The score is the larger of a head's two scores, each divided by the lowest
            selected score, so that other fractions can be selected by it.
    """
    scores, chosen = np.zeros(induction.shape), np.zeros(induction.size, bool)
    for found, share in ((induction, settings.induction), (echo, settings.echo)):
        best = np.argsort(-found.reshape(-1), kind="stable")[: max(1, round(share * found.size))]
        chosen[best] = True
        scores = np.maximum(scores, found / max(found.reshape(-1)[best[-1]], np.finfo(np.float32).tiny))
    labels = [[RETRIEVAL if head else STREAMING for head in row] for row in chosen.reshape(scores.shape)]
    return scores, tuple(map(tuple, labels))


def scores_and_labels(
    params: Params,
    samples: Int[np.ndarray, "S T"],
    settings: Settings = Settings(),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Float[np.ndarray, "L K"], Labels]:
    """Contents of a profile for the `duoattention` policy. Arguments as for `match_scores`."""
    return retrieval_heads(*match_scores(params, samples, settings, progress), settings)
