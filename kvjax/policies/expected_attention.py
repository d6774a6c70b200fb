"""Expected attention: the tokens that future queries would attend to, if they resemble the prompt's."""

import dataclasses
from typing import Any, ClassVar

import einops
import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Token, TokenBlock
from kvjax.pallas_kernels.sinks import softmax_with_sinks

from .families.scoring import PromptScorer, PromptScorerLayer
from .fields import check_fields
from .info import PolicyInfo
from .layer import CacheLayer, Carry
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class ExpectedAttention(PromptScorer):
    """Keep the highest expected attention of future queries times value norm (Devoto et al. 2025, section 3).

    Unrotated queries are assumed to be normally distributed, with the mean and covariance of the prompt's. A future
    query is rotated by the average rotation of the next positions. The expectation of exp(q · k / √d) is then exp(μ · k
    / √d + kᵀ Σ k / 2d). It is normalised over the prompt and averaged over the query group. A token's score is this
    plus `epsilon`, times the norm of its value. Only the prompt is compressed. Chunked prefill uses the statistics of
    all queries so far.

    Attributes:
        budget: slots for the prompt: a number of tokens, or a fraction of prompt + new tokens.
        sinks: first tokens, which are kept, and whose queries and keys are excluded from the statistics.
        future: number of future positions over which the rotation is averaged.
        epsilon: ε, added to the expected attention, so that large values count even where it is small.

    Example:
        >>> policy = kvjax.ExpectedAttention(budget=64)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('expected_attention:budget=64', 0.43)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="expected_attention",
        paper="Devoto et al. 2025, Expected Attention: KV Cache Compression by Estimating Attention from Future Queries "
        "Distribution",
        summary="the prompt's tokens that future queries are expected to attend to, and all new ones",
        memory="freed",
        stage="prompt",
        budget_excludes_new_tokens=True,
    )

    sinks: int = 4
    future: int = 512
    epsilon: float = 0.02

    def __post_init__(self) -> None:
        check_fields(self, sinks=0, future=1, epsilon=0)

    def always_kept(self, budget: Any) -> tuple[Any, Any]:
        return budget * 0 + self.sinks, budget * 0

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return ExpectedAttentionLayer(self, spec) if spec.block else super().layer(spec)

    def scores(self, spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B K T"]:
        return self.expected(spec, prompt, self.statistics(prompt))

    def statistics(self, prompt: PromptKV) -> "Queries":
        """Statistics of a prompt's queries after the sinks."""
        return Queries.of(prompt.q, prompt.pos[:, 0, prompt.before :] >= self.sinks)

    def expected(self, spec: LayerSpec, prompt: PromptKV, queries: "Queries") -> Float[Array, "B K T"]:
        """Scores of a prompt's tokens, for future queries with these statistics."""
        mean, covariance = self._future_query(spec, queries, prompt.seen)
        mean, covariance = (
            einops.rearrange(x, "b (k g) ... -> b k g ...", k=spec.num_kv_heads) for x in (mean, covariance)
        )

        inside = jnp.swapaxes(prompt.pos >= self.sinks, 1, 2)  # [B, T, #K]
        keys = jnp.where(inside[..., None], prompt.k_rotated, 0).astype(jnp.float32)
        linear = jnp.einsum("bkgh,btkh->bkgt", mean, keys) * spec.scale
        quadratic = jnp.einsum("btkh,bkghj,btkj->bkgt", keys, covariance, keys) * spec.scale**2 / 2
        inside = jnp.swapaxes(inside, 1, 2)[:, :, None]
        logits = jnp.where(inside, linear + quadratic, -jnp.inf)
        sinks = prompt.sinks if prompt.sinks is None else prompt.sinks.reshape(spec.num_kv_heads, -1)
        expected = jnp.mean(softmax_with_sinks(logits, sinks, where=inside), axis=2)
        return (expected + self.epsilon) * jnp.linalg.norm(prompt.v.astype(jnp.float32), axis=-1).swapaxes(1, 2)

    def _future_query(
        self, spec: LayerSpec, queries: "Queries", seen: Int[Array, " B"]
    ) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"]]:
        """Mean and covariance of a query, rotated by the average rotation of the next positions."""
        ahead = seen[:, None] + jnp.arange(self.future, dtype=jnp.int32)
        cos, sin = (jnp.mean(x, axis=1)[:, None] for x in spec.rope.cos_sin(ahead))  # [B, 1, R]
        mean = spec.rope.apply(queries.mean, cos, sin)
        covariance = queries.scatter / jnp.maximum(queries.count, 1.0)[:, None, None, None]
        for _ in range(2):  # R Σ Rᵀ, one side per iteration
            covariance = spec.rope.apply(covariance, cos[:, None], sin[:, None]).swapaxes(2, 3)
        return mean, covariance


@flax.struct.dataclass
class Queries:
    """Statistics of unrotated queries. B rows, N heads, H head dim.

    Attributes:
        count: number of queries.
        mean: their mean.
        scatter: sum of outer products of deviations from the mean: `count` times the covariance.
    """

    count: Float[Array, " B"]
    mean: Float[Array, "B N H"]
    scatter: Float[Array, "B N H H"]

    @classmethod
    def of(cls, q: Float[Array, "B S N H"], inside: Bool[Array, "B S"]) -> "Queries":
        """Statistics of the queries that are `inside`."""
        inside = inside[..., None, None]
        q = jnp.where(inside, q.astype(jnp.float32), 0.0)
        count = jnp.sum(inside, axis=(1, 2, 3)).astype(jnp.float32)
        mean = jnp.sum(q, axis=1) / jnp.maximum(count, 1.0)[:, None, None]
        centred = jnp.where(inside, q - mean[:, None], 0.0)
        return cls(count, mean, jnp.einsum("btnh,btnj->bnhj", centred, centred))

    def joined(self, other: "Queries") -> "Queries":
        """Statistics of the union of both sets of queries (Chan et al. 1979)."""
        count = self.count + other.count
        share = (other.count / jnp.maximum(count, 1.0))[:, None, None]
        apart = other.mean - self.mean
        between = jnp.einsum("bnh,bnj->bnhj", apart, apart) * (self.count[:, None, None] * share)[..., None]
        return Queries(count, self.mean + apart * share, self.scatter + other.scatter + between)


@flax.struct.dataclass
class Observed:
    """A cache during chunked prefill, and statistics of all queries so far."""

    cache: LayerCache
    queries: Queries


@dataclasses.dataclass(frozen=True)
class ExpectedAttentionLayer(PromptScorerLayer[ExpectedAttention]):
    """A layer with chunked prefill, which keeps statistics of the queries so far."""

    def init(self, total: Int[Array, " B"] | None = None) -> Observed:
        spec = self.spec
        none = jnp.zeros((spec.batch, 1, spec.num_heads, spec.head_dim), jnp.float32)
        return Observed(super().init(total), Queries.of(none, jnp.zeros((spec.batch, 1), bool)))

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[Observed, Carry]:
        return self._kept(prompt, self.policy.statistics(prompt)), carry

    def read_block(
        self, state: Observed, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], Observed, Carry]:
        prompt = cache.as_prompt_with_block(state.cache, block)
        new = self._kept(prompt, state.queries.joined(self.policy.statistics(prompt)))
        return cache.attend_prompt(self.spec, prompt), cache.where_rows(block.count > 0, new, state), carry

    def append(self, state: Observed, token: Token) -> Observed:
        return dataclasses.replace(state, cache=super().append(state.cache, token))

    def attend(self, state: Observed, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], Observed, Carry]:
        return super().attend(state.cache, token, carry)[0], state, carry

    def _kept(self, prompt: PromptKV, queries: Queries) -> Observed:
        keep, _ = self.best(prompt, self.policy.expected(self.spec, prompt, queries))
        return Observed(cache.keep(self.spec, self.capacity, prompt, keep)[0], queries)
