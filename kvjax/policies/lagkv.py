"""LagKV: the prompt's tokens that stand out relative to the tokens after them. Attention-free."""

import dataclasses
from typing import Any, ClassVar

import einops
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import LayerSpec, PromptKV
from kvjax.pallas_kernels import top_k

from .families.scoring import PromptScorer, PromptScorerLayer
from .fields import check_fields
from .info import PolicyInfo
from .layer import CacheLayer
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class LagKV(PromptScorer):
    """Keep the tokens of each segment that vary most relative to the next segment (Liang et al. 2025, section 3).

    After the sinks, a prompt is cut into segments of `lag` tokens. Each segment but the last is scored. Keys and values
    are scaled so that the next segment's minimum and maximum of each channel are 0 and 1. A token's standard deviation
    over the channels goes through a softmax over its segment. The softmaxes of rotated keys and of values are added.

    The sinks, the last whole segment and the tokens after it are kept. The rest of the budget is divided evenly among
    the scored segments. A remainder stays unused. Only the prompt is compressed. Tokens decoded later are kept in
    addition.

    As in the published code, the standard deviation has one degree of freedom less than channels. If the budget is too
    small for the tokens that are always kept, the sinks and the latest tokens get all of it. A channel without a range,
    which the paper does not mention, counts 0.

    Attributes:
        budget: slots for the prompt: a number of tokens, or a fraction of prompt + new tokens. A prompt within it is
            kept whole.
        sinks: S, first tokens, always kept.
        lag: L, tokens in a segment. A prompt longer than the budget keeps its last L to 2 L - 1 tokens.

    Example:
        >>> policy = kvjax.LagKV(budget=64, lag=16)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('lagkv:budget=64,lag=16', 0.43)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="lagkv",
        paper="Liang et al. 2025, LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important",
        summary="the prompt's tokens that vary most in the range of the tokens after them, its two ends, and all new ones",
        memory="freed",
        stage="prompt",
        budget_excludes_new_tokens=True,
    )

    keeps_highest: ClassVar[bool] = False
    scores_whole_prompts: ClassVar[bool] = True

    sinks: int = 16
    lag: int = 128

    def __post_init__(self) -> None:
        check_fields(self, sinks=0, lag=2)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return PromptScorerLayer(self, spec)

    def always_kept(self, budget: Any) -> tuple[Any, Any]:
        return budget * 0 + self.sinks, budget * 0 + 1

    def scores(self, spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B K T"]:
        def relative(x: Float[Array, "B T K H"]) -> Float[Array, "B K M L"]:
            x = self._segments(einops.rearrange(x.astype(jnp.float32), "b t k h -> b k h t"))
            low, high = (jnp.roll(end, -1, axis=-2) for end in (x.min(-1, keepdims=True), x.max(-1, keepdims=True)))
            x = jnp.where(high > low, (x - low) / (high - low), 0.0)
            return jax.nn.softmax(x.std(axis=2, ddof=1), axis=-1)

        return self._tokens(relative(prompt.k_rotated) + relative(prompt.v), prompt.size)

    def keep_mask(
        self,
        scores: Float[Array, "B K T"],
        lengths: Int[Array, " B"],
        budget: Int[Array, " B"],
        pos: Int[Array, "B #K T"] | None = None,
    ) -> Bool[Array, "B K T"]:
        """Which tokens of a whole prompt are kept: equally many of each scored segment, and all outside of them."""
        scored = jnp.maximum((lengths - self.sinks) // self.lag - 1, 0)  # number of scored segments
        share = (budget - (lengths - scored * self.lag)) // jnp.maximum(scored, 1)
        best = self._tokens(top_k(self._segments(scores), share[:, None, None]), scores.shape[-1])
        place, end = jnp.arange(scores.shape[-1], dtype=jnp.int32), self.sinks + scored * self.lag
        latest = jnp.maximum(end, lengths - budget + self.sinks)
        kept = (place < self.sinks) | (place >= latest[:, None])
        return best & (place < end[:, None])[:, None] | kept[:, None]

    def _segments(self, x: Float[Array, "*B T"]) -> Float[Array, "*B M L"]:
        """Divide the tokens after the sinks into segments, the last one padded."""
        x = x[..., self.sinks :]
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % self.lag)])
        return x.reshape(*x.shape[:-1], -1, self.lag)

    def _tokens(self, x: Array, size: int) -> Array:
        """The inverse of `_segments`, with zeros for the sinks."""
        x = x.reshape(*x.shape[:-2], -1)
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(self.sinks, 0)])[..., :size]
