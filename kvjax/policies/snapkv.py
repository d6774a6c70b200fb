"""SnapKV: the prompt's tokens that its last tokens attend to, with their neighbours."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import LayerSpec, PromptKV, prompt_mask

from .families.scoring import PromptScorer, last_queries, pool
from .fields import check_fields
from .info import PolicyError, PolicyInfo
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class SnapKV(PromptScorer):
    """Keep what a prompt's last tokens attend to, pooled over neighbours (Li et al. 2024, section 4).

    The last `window` tokens are kept and serve as observers. A token before them scores the attention that it receives
    from them, averaged over the query group and pooled over neighbours. The highest scores are kept besides the window.
    Only the prompt is compressed. In chunked prefill, the last `window` tokens of each block observe, and neighbours
    are among the tokens left.

    The paper and its LongBench configurations use `pool="max", kernel=7`. The published class defaults to `pool="avg",
    kernel=5`, where zeros beyond the ends of the scored tokens count.

    Attributes:
        budget: slots for the prompt, window included: a number of tokens, or a fraction of prompt + new tokens.
        window: L_obs, last tokens of the prompt, which observe and are kept.
        pool: pooling of scores over neighbours: "max", "avg", or None.
        kernel: tokens pooled over, odd.

    Example:
        >>> policy = kvjax.SnapKV(budget=64, window=16)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('snapkv:budget=64,window=16', 0.43)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="snapkv",
        paper="Li et al. 2024, SnapKV: LLM Knows What You are Looking for Before Generation",
        summary="the prompt's most attended tokens with their neighbours, its last tokens, and all new ones",
        memory="freed",
        stage="prompt",
        budget_excludes_new_tokens=True,
    )

    window: int = 32
    pool: Literal["max", "avg"] | None = "max"
    kernel: int = 7

    def __post_init__(self) -> None:
        check_fields(self, window=1, kernel=1)
        if self.kernel % 2 == 0:
            raise PolicyError(f"{self.info.name}: kernel={self.kernel} is even. Give an odd width, such as 7.")

    @property
    def query_window(self) -> int | None:
        return self.window

    def always_kept(self, budget: Any) -> tuple[Any, Any]:
        return budget * 0, budget * 0 + self.window

    def scores(self, spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B K T"]:
        observed = last_queries(prompt, self.window, spec)
        before = prompt_mask(prompt.lengths - self.window, prompt.size)[:, None]
        observed = jnp.where(before, observed, 0.0)
        return observed if self.pool is None else pool(observed, self.kernel, self.pool)
