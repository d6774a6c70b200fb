"""R-KV: attended and non-redundant tokens, selected repeatedly while a model reasons."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.cache import LayerSpec, PromptKV
from kvjax.pallas_kernels import index_sums, newest_duplicate
from kvjax.pallas_kernels.masking import MASKED
from kvjax.pallas_kernels.window_scores.types import Observers

from .families.rounds import RoundsLayer
from .families.scoring import PromptScorer, PromptScorerLayer, pool
from .fields import check_fields
from .info import PolicyError, PolicyInfo
from .layer import CacheLayer
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class RKV(PromptScorer):
    """Keep what the latest tokens attend to and what repeats no other token (Cai et al. 2025, section 3).

    The last `window` tokens are kept and observe. A token j before them scores λ I_j - (1 - λ) R_j:

    - I, importance: each observer takes the largest logit of the query group, then the softmax. I is the mean over
      observers, followed by the maximum over neighbours.
    - R, redundancy: a softmax over the mean cosines of j's rotated key with all keys. Among the tokens that a key
      nearly duplicates, with a cosine above `threshold`, the newest is not charged, so older ones are dropped first.

    A prompt of `every` tokens or more is compressed to the budget. Otherwise, and from then on, a row is compressed
    whenever `every` tokens have come since its last round. Between rounds, a head has up to `every` tokens more. In
    chunked prefill, a row is compressed after the block that completes a round.

    Differences of the published code: it counts rounds by all tokens of a sequence modulo 128, with a flag that
    outlives a sample. Its defaults are λ = 0.07 and a budget of 128. It reads duplicates of the first row only. For
    keys without a duplicate, it leaves the first slot uncharged, as `spare_first` does.

    Attributes:
        budget: slots that a round leaves: a number of tokens, or a fraction of prompt + new tokens.
        every: tokens from round to round.
        window: α, last tokens, which observe and are kept.
        kernel: tokens over which attention is pooled, odd.
        weight: λ, weight of attention against redundancy, 0 to 1.
        threshold: cosine above which two keys are near-duplicates.
        spare_first: whether a key without a near-duplicate spares the first cached token, as in the published code.

    Example:
        >>> policy = kvjax.RKV(budget=64, every=32)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('rkv:budget=64,every=32', 0.46)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="rkv",
        paper="Cai et al. 2025, R-KV: Redundancy-aware KV Cache Compression for Reasoning Models",
        summary="the latest tokens, and those that they attend to and whose keys repeat no other, chosen again as a model reasons",
        memory="freed",
        stage="both",
    )

    every: int = 128
    window: int = 8
    kernel: int = 7
    weight: float = 0.1
    threshold: float = 0.5
    spare_first: bool = False

    def __post_init__(self) -> None:
        check_fields(self, every=1, window=1, kernel=1, weight=0, threshold=-1)
        if self.kernel % 2 == 0:
            raise PolicyError(f"{self.info.name}: kernel={self.kernel} is even. Give an odd width, such as 7.")
        if self.weight > 1:
            raise PolicyError(f"{self.info.name}: weight={self.weight} is out of range. Give 0 to 1.")

    @property
    def query_window(self) -> int:
        return self.window

    def always_kept(self, budget: Any) -> tuple[Any, Any]:
        return budget * 0, budget * 0 + self.window

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return RoundsLayer(self, spec, scorer=PromptScorerLayer(self, spec), every=self.every)

    def scores(self, spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B K T"]:
        live = jnp.broadcast_to(prompt.live, (*prompt.live.shape[:1], spec.num_kv_heads, prompt.size))
        k = jnp.swapaxes(jax.lax.stop_gradient(prompt.k_rotated), 1, 2)
        k = jnp.where(live[..., None], k, jnp.zeros((), k.dtype))
        before = jnp.arange(prompt.size, dtype=jnp.int32) < (prompt.lengths - self.window)[:, None, None]
        observed = pool(self.attention(spec, prompt, k, live & before), self.kernel, "max")
        charged = redundancy(k, live, threshold=self.threshold, spare_first=self.spare_first)
        return self.weight * observed - (1 - self.weight) * charged

    def attention(
        self, spec: LayerSpec, prompt: PromptKV, k: Float[Array, "B K T H"], scored: Bool[Array, "B K T"]
    ) -> Float[Array, "B K T"]:
        """Attention from the last queries to `scored` tokens: group maximum of logits, softmax, mean over queries."""
        q = jax.lax.stop_gradient(prompt.q_rotated)
        observers = Observers.of(q, prompt.lengths, self.window, spec.num_kv_heads, prompt.places)
        logits = jnp.einsum("bkwgh,bkth->bkwgt", observers.q.astype(k.dtype), k, preferred_element_type=jnp.float32)
        logits = jnp.max(logits * spec.scale, axis=3)
        there = (observers.pos >= 0)[:, None, :, None]
        visible = scored[:, :, None] & there
        if spec.window is not None:
            visible &= observers.pos[:, None, :, None] - prompt.pos[:, :, None] < spec.window
        shares = jax.nn.softmax(jnp.where(visible, logits, MASKED), axis=-1)
        count = jnp.maximum(jnp.sum(there, axis=2, dtype=jnp.float32), 1.0)
        return jnp.sum(jnp.where(visible, shares, 0.0), axis=2) / count


def redundancy(
    k: Float[Array, "B K T H"], live: Bool[Array, "B K T"], *, threshold: float = 0.5, spare_first: bool = False
) -> Float[Array, "B K T"]:
    """How much each key repeats the others: a softmax over its mean cosine with all keys. 0 where there is no key.

    Each key compares itself with all others, and does not charge the latest of its near-duplicates.

    Args:
        k: keys, in order, 0 where there is none.
        live: where there are keys.
        threshold, spare_first: see `RKV`.
    """
    newest = newest_duplicate(k, live, threshold)
    if spare_first:
        newest = jnp.where(newest < 0, jnp.argmax(live, axis=-1)[..., None].astype(jnp.int32), newest)
    norm = jnp.linalg.norm(k.astype(jnp.float32), axis=-1)
    inverse = jnp.where(norm > 0, 1 / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny), 0.0)
    unit = k.astype(jnp.float32) * inverse[..., None]
    at = jnp.maximum(newest, 0)
    other = jnp.take_along_axis(k, at[..., None], axis=2)
    spared = jnp.sum(k.astype(jnp.float32) * other.astype(jnp.float32), axis=-1)
    spared *= inverse * jnp.take_along_axis(inverse, at, axis=2)
    place = jnp.arange(k.shape[2], dtype=jnp.int32)
    spared = jnp.where((newest >= 0) & (newest != place), spared, 0.0)
    # The sum of a key's cosines is its product with the sum of all unit keys, minus the product with itself.
    total = jnp.sum(unit * (jnp.sum(unit, axis=2, keepdims=True) - unit), axis=-1)
    total -= index_sums(newest, spared)
    count = jnp.maximum(jnp.sum(live, axis=-1, keepdims=True, dtype=jnp.float32), 1.0)
    shares = jax.nn.softmax(jnp.where(live, total / count, MASKED), axis=-1)
    return jnp.where(live, shares, 0.0)
