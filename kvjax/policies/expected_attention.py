"""Expected attention: what future queries, taken to be like those of the prompt, would attend to."""

import dataclasses
from typing import Any, ClassVar

import einops
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import LayerSpec, Prompt

from .families.scoring import PromptScorer
from .fields import check_fields
from .info import PolicyInfo
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class ExpectedAttention(PromptScorer):
    """Keep what future queries are expected to attend to, weighed by the size of its value (Devoto et al. 2025, section 3).

    Queries are taken to be normally distributed before rotation, with the mean and covariance of the prompt's; a future one
    is rotated as the positions to come are on average. The expectation of exp(q · k / √d) is then
    exp(μ · k / √d + kᵀ Σ k / 2d); normalised over the prompt and averaged over the query group, plus `epsilon`, times the
    norm of the value, it is the token's score. Only the prompt is compressed.

    Attributes:
        budget: slots for the prompt: a number of tokens, or a fraction of prompt + new tokens.
        sinks: first tokens, which are kept, and whose queries and keys are left out of the statistics.
        future: positions to come that the rotation is averaged over.
        epsilon: added to the expected attention, so that large values count even where it is small.
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

    def scores(self, spec: LayerSpec, prompt: Prompt) -> Float[Array, "B K T"]:
        inside = prompt.mask & (jnp.arange(prompt.size, dtype=jnp.int32) >= self.sinks)
        queries = jnp.where(inside[..., None, None], prompt.q, 0)
        mean, covariance = self._future_query(spec, queries, inside, prompt.lengths)
        mean, covariance = (
            einops.rearrange(x, "b (k g) ... -> b k g ...", k=spec.num_kv_heads) for x in (mean, covariance)
        )

        keys = jnp.where(inside[..., None, None], prompt.k_rotated, 0).astype(jnp.float32)
        linear = jnp.einsum("bkgh,btkh->bkgt", mean, keys) * spec.scale
        quadratic = jnp.einsum("btkh,bkghj,btkj->bkgt", keys, covariance, keys) * spec.scale**2 / 2
        logits = jnp.where(inside[:, None, None], linear + quadratic, -jnp.inf)
        expected = jnp.mean(jax.nn.softmax(logits, axis=-1, where=inside[:, None, None]), axis=2)
        return (expected + self.epsilon) * jnp.linalg.norm(prompt.v.astype(jnp.float32), axis=-1).swapaxes(1, 2)

    def _future_query(
        self, spec: LayerSpec, q: Float[Array, "B T N H"], inside: Bool[Array, "B T"], lengths: Int[Array, " B"]
    ) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"]]:
        """Mean and covariance of a query's average rotation over the positions to come; what is not `inside` is 0 in `q`."""
        count = jnp.maximum(jnp.sum(inside, axis=1), 1).astype(jnp.float32)[:, None, None]
        q = q.astype(jnp.float32)
        mean = jnp.sum(q, axis=1) / count
        centred = jnp.where(inside[..., None, None], q - mean[:, None], 0.0)
        covariance = jnp.einsum("btnh,btnj->bnhj", centred, centred) / count[..., None]

        ahead = lengths[:, None] + jnp.arange(self.future, dtype=jnp.int32)
        cos, sin = (jnp.mean(x, axis=1)[:, None] for x in spec.rope.cos_sin(ahead))  # [B, 1, R]
        mean = spec.rope.apply(mean, cos, sin)
        for _ in range(2):  # R Σ Rᵀ, one side after the other
            covariance = spec.rope.apply(covariance, cos[:, None], sin[:, None]).swapaxes(2, 3)
        return mean, covariance
