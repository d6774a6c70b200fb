"""VaSE: large values are protected, and other tokens are sampled, repeatedly while a model reasons."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax._util.randomness import normal
from kvjax.cache import LayerSpec, PromptKV
from kvjax.pallas_kernels import top_k
from kvjax.pallas_kernels.masking import MASKED
from kvjax.pallas_kernels.window_scores.types import Observers

from .budget import budget_rows
from .families.noise import round_keys, uniform_in_rounds
from .families.rounds import RoundsLayer
from .families.scoring import PromptScorer, PromptScorerLayer, pool
from .fields import check_fields
from .info import PolicyError, PolicyInfo
from .layer import CacheLayer
from .registry import register

PROTECTED = 1e30
"""Score of tokens with large values."""

LEAST = 2.0**-25
"""Lower bound of random numbers, so that their logarithms are finite."""


@register
@dataclasses.dataclass(frozen=True)
class VaSE(PromptScorer):
    """Protect large values and sample the rest, while decoding (Chang et al. 2026, section 3).

    The last `every` tokens and the first `sinks` are kept. Of the n tokens between them, a round keeps the rest of the
    budget b:

    - `variant="attnv"` (VaSE-AttnV): ⌊`share` · b⌋ tokens, sinks included, with the largest range max(v) - min(v) of
      their values v. The others are sampled without replacement, with probabilities proportional to A. For A, the last
      `every` queries attend to all tokens but the last `every`. The probabilities are averaged over queries, over
      `kernel` neighbouring tokens (zeros beyond the ends count), and over the query group. A sample of m tokens is the m
      highest log A + g, where g is Gumbel noise.
    - `variant="dkv"` (VaSE-DKV): the tokens with the highest ‖G k‖² · ‖G v‖², for rotated keys k and values v. G maps
      them to `sketch` normal random numbers. It is drawn again in each round, and is the same in all heads of a layer.

    A prompt of `every` tokens or more is compressed to the budget. Otherwise, and from then on, a row is compressed
    whenever `every` tokens have come since its last round. In chunked prefill, a row is compressed after the block that
    completes a round.

    Random numbers follow from seed, layer, head, position and the number of tokens that the row has seen. They do not
    depend on the batch. Equal sequences draw equal numbers.

    Differences of the published code: it compresses only while decoding, when the number of cached tokens exceeds the
    budget and is a multiple of `every`. A long prompt therefore stays whole until then. Its budgets are 1024 to 6144,
    and multiples of `every`.

    Attributes:
        budget: slots that a round leaves: a number of tokens, or a fraction of prompt + new tokens.
        every: tokens from round to round. As many last tokens observe and are kept.
        variant: "attnv" or "dkv", see above.
        sinks: first tokens, which are kept.
        share: share of the budget for large values, sinks included ("attnv").
        kernel: tokens over which attention is averaged, odd ("attnv").
        sketch: random numbers per key and value ("dkv").
        seed: of the random numbers.

    Example:
        >>> policy = kvjax.VaSE(budget=64, every=32)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('vase:budget=64,every=32', 0.56)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="vase",
        paper="Chang et al. 2026, Value-Aware Stochastic KV Cache Eviction for Reasoning Models",
        summary="the latest tokens, large values, and a random sample of the others by attention, drawn again as a model reasons",
        memory="freed",
        stage="both",
    )

    every: int = 64
    variant: Literal["attnv", "dkv"] = "attnv"
    sinks: int = 4
    share: float = 0.25
    kernel: int = 5
    sketch: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, every=1, sinks=0, share=0, kernel=1, sketch=1)
        if self.kernel % 2 == 0:
            raise PolicyError(f"{self.info.name}: kernel={self.kernel} is even. Give an odd width, such as 5.")
        if self.share > 1:
            raise PolicyError(f"{self.info.name}: share={self.share} is out of range. Give 0 to 1.")

    @property
    def query_window(self) -> int:
        return self.every if self.variant == "attnv" else 0

    def always_kept(self, budget: Any) -> tuple[Any, Any]:
        return budget * 0 + self.sinks, budget * 0 + self.every

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return RoundsLayer(self, spec, scorer=PromptScorerLayer(self, spec), every=self.every)

    def scores(self, spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B K T"]:
        prompt = jax.lax.stop_gradient(prompt)
        place = jnp.arange(prompt.size, dtype=jnp.int32)
        candidates = prompt.live & (place < (prompt.lengths - self.every)[:, None, None])
        candidates = jnp.broadcast_to(candidates, (candidates.shape[0], spec.num_kv_heads, prompt.size))
        if self.variant == "dkv":
            return self.sketched(spec, prompt, candidates)
        budget = self.row_budgets(spec, prompt.seen, prompt.total)
        large = self.large_values(prompt, candidates & (prompt.pos >= self.sinks), budget)
        pos = jnp.maximum(prompt.pos, 0)
        drawn = jnp.maximum(uniform_in_rounds(spec, self.seed, pos, prompt.seen), LEAST)
        sampled = jnp.log(jnp.maximum(self.attention(spec, prompt, candidates), jnp.finfo(jnp.float32).tiny))
        return jnp.where(large, PROTECTED, sampled - jnp.log(-jnp.log(drawn)))

    def large_values(
        self, prompt: PromptKV, rivals: Bool[Array, "B K T"], budget: Int[Array, " B"]
    ) -> Bool[Array, "B K T"]:
        """Which tokens are protected because their values have a large range. Sinks take a part of the share."""
        v = prompt.v.astype(jnp.float32)
        size = jnp.swapaxes(jnp.max(v, axis=-1) - jnp.min(v, axis=-1), 1, 2)
        most = budget - self.sinks - self.every
        count = jnp.clip(budget_rows(float(self.share), budget) - self.sinks, 0, jnp.maximum(most, 0))
        return rivals & top_k(jnp.where(rivals, size, -jnp.inf), count[:, None])

    def attention(self, spec: LayerSpec, prompt: PromptKV, candidates: Bool[Array, "B K T"]) -> Float[Array, "B K T"]:
        """Attention from the last queries to the candidates alone, mean over queries, neighbours and the query group."""
        observers = Observers.of(prompt.q_rotated, prompt.lengths, self.every, spec.num_kv_heads, prompt.places)
        k = jnp.where(
            candidates[..., None], jnp.swapaxes(prompt.k_rotated, 1, 2), jnp.zeros((), prompt.k_rotated.dtype)
        )
        logits = jnp.einsum("bkwgh,bkth->bkwgt", observers.q.astype(k.dtype), k, preferred_element_type=jnp.float32)
        there = (observers.pos >= 0)[:, None, :, None, None]
        visible = candidates[:, :, None, None] & there
        if spec.window is not None:
            near = observers.pos[:, None, :, None] - prompt.pos[:, :, None] < spec.window
            visible &= near[:, :, :, None]
        shares = jax.nn.softmax(jnp.where(visible, logits * spec.scale, MASKED), axis=-1)
        count = jnp.maximum(jnp.sum(there, axis=2, dtype=jnp.float32), 1.0)[..., 0]
        total = jnp.sum(jnp.mean(jnp.where(visible, shares, 0.0), axis=3), axis=2) / count
        return jnp.where(candidates, pool(total, self.kernel, "avg"), 0.0)

    def sketched(self, spec: LayerSpec, prompt: PromptKV, candidates: Bool[Array, "B K T"]) -> Float[Array, "B K T"]:
        """Product of the squared norms that a random projection leaves of keys and values."""
        keys = round_keys(spec, self.seed, prompt.seen)
        projection = jax.vmap(lambda key: normal(key, (spec.head_dim, self.sketch)))(keys) * self.sketch**-0.5

        def norms(x: Float[Array, "B T K H"]) -> Float[Array, "B K T"]:
            x = jnp.where(candidates[..., None], jnp.swapaxes(x, 1, 2).astype(jnp.float32), 0.0)
            return jnp.sum(jnp.einsum("bkth,bhr->bktr", x, projection, precision="highest") ** 2, axis=-1)

        return norms(prompt.k_rotated) * norms(prompt.v)
