"""Compactor: tokens with distinctive keys or attention from their neighbourhood. Question-agnostic."""

import dataclasses
from typing import Any, ClassVar

import einops
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax._util.randomness import normal, random_key
from kvjax.cache import LayerSpec, PromptKV
from kvjax.pallas_kernels.masking import MASKED
from kvjax.pallas_kernels.ties import SHARE

from .families.scoring import PromptScorer, PromptScorerLayer, pool
from .fields import check_fields
from .info import PolicyInfo
from .layer import CacheLayer
from .registry import register

NEIGHBOURS = 3
"""Tokens over which attention is averaged."""

RIDGES = 5
"""Number of ridges to try, each ten times the previous one, until a matrix is positive definite in float32."""


@register
@dataclasses.dataclass(frozen=True)
class Compactor(PromptScorer):
    """Keep distinctive keys and tokens attended to from both sides (Chari and Van Durme 2025, sections 3 and 4).

    The first `sinks` and the last `recent` tokens are kept. The tokens between them get two scores:

    - Leverage: diag(Y (Yᵀ Y + ridge I)⁻¹ Yᵀ). X has a head's unrotated keys minus their mean, and Y = X Φ is a random
      sketch of it in `sketch` dimensions.
    - Attention: within chunks of `chunk` tokens, the attention from all queries of the chunk, later and earlier ones.
      It is averaged over the query group, multiplied by the norm of the token's value, and averaged with two
      neighbours.

    Both are divided by their standard deviations over a layer's tokens. The score is λ · leverage + attention. Only the
    prompt is compressed.

    As in the authors' code in kvpress, λ defaults to the dropped share of the prompt, logits are not scaled by 1/√d,
    standard deviations are over all heads of a layer, and the ridge is 0.01, larger where a matrix is not positive
    definite. Unlike there, all rows of a batch have the same sketch, and each row has its own statistics. Tokens of a last
    chunk that is not full attend to one another alone; there (kvpress 0.5.5), padding takes part, with logits of zero as
    keys and as queries. The paper's calibration of a budget to a text is not implemented.

    Attributes:
        budget: slots for the prompt: a number of tokens, or a fraction of prompt + new tokens. A prompt within it is
            kept whole.
        sinks, recent: first and last tokens, which are kept and not scored.
        chunk: tokens that attend to one another.
        sketch: k, dimensions of the sketch. None uses the keys themselves.
        ridge: added to the diagonal of Yᵀ Y.
        blend: λ, weight of leverage against attention. None uses 1 - budget / tokens of the prompt.
        scaled: whether logits are scaled by 1/√d.
        per_head: whether each head has its own standard deviations.
        seed: of the sketch.

    Example:
        >>> policy = kvjax.Compactor(budget=64)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('compactor:budget=64', 0.43)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="compactor",
        paper="Chari and Van Durme 2025, Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores",
        summary="the prompt's tokens whose keys stand out or that their neighbourhood attends to, its two ends, and all new ones",
        memory="freed",
        stage="prompt",
        budget_excludes_new_tokens=True,
    )

    scores_whole_prompts: ClassVar[bool] = True  # scores need unrotated keys, which caches do not have

    sinks: int = 8
    recent: int = 4
    chunk: int = 256
    sketch: int | None = 48
    ridge: float = 0.01
    blend: float | None = None
    scaled: bool = False
    per_head: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, sinks=0, recent=0, chunk=1, sketch=1, ridge=0, blend=0)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return PromptScorerLayer(self, spec)

    def always_kept(self, budget: Any) -> tuple[Any, Any]:
        return budget * 0 + self.sinks, budget * 0 + self.recent

    def scores(self, spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B K T"]:
        place = jnp.arange(prompt.size, dtype=jnp.int32)
        inside = (place >= self.sinks) & (place < (prompt.lengths - self.recent)[:, None])
        prompt = jax.lax.stop_gradient(prompt)
        standing = leverage(jnp.swapaxes(prompt.k, 1, 2), inside, self.sketch_of(spec), self.ridge)
        attended = self.attention(spec, prompt, inside) * jnp.linalg.norm(
            prompt.v.astype(jnp.float32), axis=-1
        ).swapaxes(1, 2)
        inside = inside[:, None]
        attended = jnp.where(inside, pool(jnp.where(inside, attended, 0.0), NEIGHBOURS, "avg"), 0.0)
        if self.blend is None:
            budget = self.row_budgets(spec, prompt.seen, prompt.total).astype(jnp.float32)
            blend = jnp.maximum(1 - budget / jnp.maximum(prompt.seen, 1).astype(jnp.float32), 0.0)[:, None, None]
        else:
            blend = self.blend
        # Means are not subtracted. They are equal for all competing tokens, and small scores would suffer from rounding.
        return blend * self._in_deviations(spec, standing, inside) + self._in_deviations(spec, attended, inside)

    def sketch_of(self, spec: LayerSpec) -> Float[Array, "K H k"] | None:
        """Φ of each head of a layer: normal numbers of variance 1/k, equal in all rows."""
        if self.sketch is None:
            return None
        key = jax.random.fold_in(random_key(self.seed), spec.layer)
        heads = spec.num_kv_heads * spec.shard.heads
        return (normal(key, (heads, spec.head_dim, self.sketch)) * self.sketch**-0.5)[spec.head_ids]

    def attention(self, spec: LayerSpec, prompt: PromptKV, inside: Bool[Array, "B T"]) -> Float[Array, "B K T"]:
        """Attention of each token from all queries of its chunk, mean over the group. Chunks begin after the sinks."""
        _, size, kv_heads, _ = prompt.k.shape
        chunk = min(self.chunk, max(size - self.sinks, 1))
        padding = -max(size - self.sinks, 0) % chunk

        def chunks(x: Array) -> Array:
            """Reshape [B, T, ...] to [M, B, C, ...]."""
            x = jnp.pad(x[:, self.sinks :], [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
            return einops.rearrange(x, "b (m c) ... -> m b c ...", c=chunk)

        def given(part: tuple[Array, Array, Array]) -> Float[Array, "B K C"]:
            q, k, there = part
            q, k = (jnp.where(there[..., None, None], x, jnp.zeros((), x.dtype)) for x in (q, k))
            q = einops.rearrange(q, "b s (k g) h -> b s k g h", k=kv_heads)
            logits = jnp.einsum("bskgh,btkh->bkgst", q, k.astype(q.dtype), preferred_element_type=jnp.float32)
            seen, asks = there[:, None, None, None], there[:, None, None, :, None]
            shares = jax.nn.softmax(jnp.where(seen, logits * spec.scale if self.scaled else logits, MASKED), axis=-1)
            return jnp.mean(jnp.sum(jnp.where(seen & asks, shares, 0.0), axis=3), axis=2)

        found = jax.lax.map(given, (chunks(prompt.q_rotated), chunks(prompt.k_rotated), chunks(inside)))
        found = einops.rearrange(found, "m b k c -> b k (m c)")
        return jnp.pad(found, ((0, 0), (0, 0), (self.sinks, 0)))[..., :size]

    def _in_deviations(
        self, spec: LayerSpec, x: Float[Array, "B K T"], inside: Bool[Array, "B 1 T"]
    ) -> Float[Array, "B K T"]:
        """Scores divided by the standard deviation of those inside."""

        def total(x: Float[Array, "B K T"]) -> Float[Array, "B #K 1"]:
            if self.per_head:
                return jnp.sum(x, axis=-1, keepdims=True)
            return spec.shard.sum_over_heads(jnp.sum(x, axis=(-2, -1), keepdims=True))

        inside = jnp.broadcast_to(inside, x.shape)
        count = total(inside.astype(jnp.float32))
        mean = total(jnp.where(inside, x, 0.0)) / jnp.maximum(count, 1.0)
        variance = total(jnp.where(inside, (x - mean) ** 2, 0.0))
        return x / jnp.maximum(jnp.sqrt(variance / jnp.maximum(count - 1, 1.0)), 1e-6)


def leverage(
    k: Float[Array, "B K T H"], inside: Bool[Array, "B T"], sketch: Float[Array, "K H k"] | None, ridge: float
) -> Float[Array, "B K T"]:
    """Statistical leverage of the keys `inside`, minus their mean, in a sketch. 0 for all other keys.

    Args:
        k: keys.
        inside: which tokens are scored.
        sketch, ridge: see `Compactor`. Without a sketch, keys are used as they are.
    """
    there = inside[:, None, :, None]
    k = jnp.where(there, k.astype(jnp.float32), 0.0)
    mean = jnp.sum(k, axis=2, keepdims=True) / jnp.maximum(
        jnp.sum(there, axis=2, keepdims=True, dtype=jnp.float32), 1.0
    )
    # Nearly equal keys differ by rounding only. Without this cutoff, the division by a small deviation would amplify it.
    nothing = SHARE * jnp.max(jnp.abs(k), axis=(2, 3), keepdims=True)
    rows = jnp.where(there & (jnp.abs(k - mean) > nothing), k - mean, 0.0)
    if sketch is not None:
        rows = jnp.einsum("bkth,khd->bktd", rows, sketch, precision="highest")
    gram = jnp.einsum("bktd,bkte->bkde", rows, rows, precision="highest")
    first = ridge if ridge > 0 else 0.001  # a ridge of 0 is followed by 0.01
    ridges = jnp.asarray([ridge, *(first * 10**i for i in range(1, RIDGES))], jnp.float32)
    factors = jnp.linalg.cholesky(gram + ridges[:, None, None, None, None] * jnp.eye(gram.shape[-1], dtype=jnp.float32))
    definite = jnp.all(jnp.isfinite(factors), axis=(-2, -1))
    factor = jnp.take_along_axis(factors, jnp.argmax(definite, axis=0)[None, :, :, None, None], axis=0)[0]
    half = jax.scipy.linalg.solve_triangular(factor, jnp.swapaxes(rows, 2, 3), lower=True)
    return jnp.sum(half**2, axis=2)
