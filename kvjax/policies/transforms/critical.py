"""CriticalKV: any prompt scorer, with part of its budget selected by the projected size of values."""

import dataclasses
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import LayerSpec, PromptKV, layer_specs
from kvjax.config import ModelConfig

from ..attention_context import AttentionContext
from ..base import Policy
from ..budget import budget_rows
from ..families.scoring import PromptScorer, PromptScorerLayer
from ..fields import check_fields
from ..info import PolicyError
from ..layer import CacheLayer, Carry
from .wrapper import Wrapper

TOKENS = 64
"""Values that are projected at a time, which materialises 64 x N x D numbers in float32."""

SURE = 1e30
"""Score of tokens that the first stage keeps."""


@dataclasses.dataclass(frozen=True)
class Critical(Wrapper):
    """A prompt scorer that weights scores by projected values for a part of its budget, made by `critical`.

    Attributes:
        policy: scores the prompt, and has the budget.
        share: share of the budget that is selected by the policy's scores alone. It includes the ends that the policy
            always keeps.
        epsilon: added to scores before they are multiplied.

    Example:
        >>> policy = kvjax.policies.Critical(kvjax.SnapKV(budget=64))
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('critical(snapkv:budget=64)', 0.43)
    """

    transform: ClassVar[str] = "critical"

    share: float = 0.5
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        check_fields(self, share=0, epsilon=0)
        if self.share > 1:
            raise PolicyError(f"{self.info.name}: share={self.share} is out of range. Give 0 to 1.")

    def bind(self, config: ModelConfig) -> Policy:
        bound = super().bind(config)
        for spec in layer_specs(config, 1, 64, 64, jnp.float32):
            bound.layer(spec)  # raises if the policy is not supported
        return bound

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        inner = self.policy.layer(spec)
        scores = getattr(self.policy, "keeps_highest", False)
        if scores and inner.attention == "dense":
            return inner
        if not (scores and inner.is_plain and inner.when == "never"):
            raise PolicyError(
                f"{self.info.name}: {self.policy.info.name!r} does not keep each head's highest scores of the prompt. Use a policy that "
                "does, such as snapkv, pyramidkv or compactor."
            )
        scorer = cast(PromptScorer, self.policy)
        return CriticalLayer(scorer, spec, share=self.share, epsilon=self.epsilon)


@dataclasses.dataclass(frozen=True)
class CriticalLayer(PromptScorerLayer[PromptScorer]):
    """One layer of `Critical`: a layer of its scorer that selects in two stages."""

    share: float = dataclasses.field(kw_only=True)
    epsilon: float = dataclasses.field(kw_only=True)

    @property
    def needs_context(self) -> bool:
        return True

    def chosen(self, prompt: PromptKV, carry: Carry) -> tuple[Bool[Array, "B K T"], Carry]:
        policy, spec = self.policy, self.spec
        budget = policy.row_budgets(spec, prompt.seen, prompt.total)
        scores = policy.scores(spec, prompt)

        def kept(scores: Float[Array, "B K T"], budget: Int[Array, " B"]) -> Bool[Array, "B K T"]:
            return policy.keep_mask(scores, prompt.lengths, budget, prompt.places)

        sure = kept(scores, jnp.maximum(budget_rows(float(self.share), budget), sum(policy.always_kept(budget))))
        weights = projected_sizes(spec, AttentionContext.of(carry, spec), jax.lax.stop_gradient(prompt.v))
        return kept(jnp.where(sure, SURE, (scores + self.epsilon) * weights), budget), carry


def projected_sizes(
    spec: LayerSpec, around: AttentionContext, values: Float[Array, "B T K H"]
) -> Float[Array, "B K T"]:
    """L1 norm that each value has after the output projection, mean over the query group."""
    output, size = around.output_of(spec), values.shape[1]
    step = min(TOKENS, size)
    blocks = jnp.pad(values, ((0, 0), (0, -size % step), (0, 0), (0, 0))).astype(jnp.float32)
    blocks = jnp.moveaxis(blocks.reshape(values.shape[0], -1, step, *values.shape[2:]), 1, 0)

    def sizes(block: Float[Array, "B C K H"]) -> Float[Array, "B K C"]:
        projected = jnp.einsum("btkh,kghd->bkgtd", block, output, precision="highest")
        return jnp.mean(jnp.sum(jnp.abs(projected), axis=-1), axis=2)

    found = jnp.moveaxis(jax.lax.map(sizes, blocks), 0, 2)
    return found.reshape(*found.shape[:2], -1)[..., :size]


def critical(policy: Policy, share: float = 0.5, epsilon: float = 1e-4) -> Critical:
    """Weight scores by projected values for a part of a prompt's budget (Feng et al. 2025, CriticalKV): `critical(SnapKV(budget=512))`.

    A share of the budget goes to the policy's highest scores. The rest goes to the highest (score + epsilon) · N. N is
    the L1 norm of a token's value after the layer's output projection, mean over the query heads that read it. It
    bounds the token's contribution to the output. This follows the published code for policies with one budget per
    head. Scores should not be negative. Memory is that of the policy.

    Args:
        policy: keeps each head's highest scores of the prompt: snapkv, pyramidkv, compactor, or your own.
            expected_attention already weighs scores by value norms, which then count twice. Its chunked prefill is not
            supported.
        share, epsilon: see above.

    Raises:
        PolicyError: a number is out of range, or (once a model is known) the policy is not supported.

    Example:
        >>> str(kvjax.critical(kvjax.SnapKV(budget=512)))
        'critical(snapkv:budget=512)'
    """
    return Critical(policy, share, epsilon)
