"""Ada-KV: heads with spread-out attention get slots that other heads do not need."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import LayerSpec
from kvjax.pallas_kernels import top_k

from .budget import budget_rows
from .families.ragged import RaggedLayer
from .fields import check_fields
from .info import PolicyError, PolicyInfo
from .layer import CacheLayer
from .registry import register
from .snapkv import SnapKV


@register
@dataclasses.dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV with one budget per layer, which goes to the best tokens of all heads (Feng et al. 2024, Ada-SnapKV).

    With K heads and b slots per head beside the window, the layer's K · b highest scores determine how many tokens each
    head wants. A head gets (1 - alpha) · wanted + alpha · b, rounded down, so every head has a minimum. (The published
    code rounds to the nearest, so a layer may exceed its budget by a few tokens.)

    Slots that a head does not need occupy no memory: a layer has one store, with a segment of the required length for
    each head. A decoding step reads the store once, see `kvjax.pallas_kernels.ragged_attention`.

    Attributes:
        budget: slots for the prompt in the average head, window included: tokens, or a fraction of prompt + new tokens.
        window, pool, kernel: see `SnapKV`.
        alpha: α, safeguard. Each head gets at least this share of what an equal division of the budget would give it.

    Example:
        >>> policy = kvjax.AdaKV(budget=64, window=16)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('adakv:budget=64,window=16', 0.41)
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
            raise PolicyError(f"{self.info.name}: alpha={self.alpha} is out of range. Give a share from 0 to 1.")
        super().__post_init__()

    @property
    def query_window(self) -> None:
        return None  # heads have segments of different sizes

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
