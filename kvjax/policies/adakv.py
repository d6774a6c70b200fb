"""Ada-KV: heads whose attention is spread out get slots that others do not need."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import LayerSpec
from kvjax.pallas_kernels import top_k

from .base import CacheLayer
from .budget import budget_rows
from .families.ragged import RaggedLayer
from .fields import check_fields
from .info import PolicyError, PolicyInfo
from .registry import register
from .snapkv import SnapKV


@register
@dataclasses.dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV with one budget for all heads of a layer, which the best tokens of all heads share (Feng et al. 2024, Ada-SnapKV).

    Of K heads with b slots each beside the window, the K · b highest scores of the layer say how many tokens each head wants.
    It gets (1 - alpha) · wanted + alpha · b, rounded down, so that every head has something. (The published code rounds to the
    nearest, so that a layer may hold a few tokens more than its budget.)

    What a head does not need holds no memory: a layer has one store, in which each head has a segment as long as it needs. A
    decoding step reads the store once, see `kvjax.pallas_kernels.ragged_attention`.

    Attributes:
        budget: slots for the prompt in the average head, window included: tokens, or a fraction of prompt + new tokens.
        window, pool, kernel: see `SnapKV`.
        alpha: α, the safeguard: share of its part of the budget that every head has in any case.
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="adakv",
        paper="Feng et al. 2024, Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference",
        summary="as SnapKV, more in heads with spread-out attention and less in others",
        memory="freed",
        stage="prompt",
        budget_excludes_new_tokens=True,
        heads_coupled=True,
    )

    keeps_highest: ClassVar[bool] = False

    alpha: float = 0.2

    def __post_init__(self) -> None:
        check_fields(self, alpha=0)
        if self.alpha > 1:
            raise PolicyError(f"{self.info.name}: alpha={self.alpha}; give a share, 0 to 1")
        super().__post_init__()

    @property
    def query_window(self) -> None:
        return None  # its heads have stores of their own sizes

    def keep_mask(
        self,
        scores: Float[Array, "B K T"],
        lengths: Int[Array, " B"],
        budget: Int[Array, " B"],
        pos: Int[Array, "B #K T"] | None = None,
    ) -> Bool[Array, "B K T"]:
        live, ends = (jnp.broadcast_to(x, scores.shape) for x in self.ends(scores.shape[-1], lengths, budget, pos))
        heads = scores.shape[1]
        whole = (jnp.sum(live, axis=(1, 2), dtype=jnp.int32) <= budget * heads)[:, None, None]
        between = live & ~ends & ~whole
        scores, share = jnp.where(between, scores, -jnp.inf), budget - sum(self.always_kept(budget))
        best = top_k(scores.reshape(scores.shape[0], -1), share * heads).reshape(scores.shape) & between
        wanted = jnp.sum(best, axis=-1, dtype=jnp.int32)
        given = share[:, None] + budget_rows(float(1 - self.alpha), wanted - share[:, None])
        return top_k(scores, given) & between | live & (ends | whole)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return RaggedLayer(self, spec)
