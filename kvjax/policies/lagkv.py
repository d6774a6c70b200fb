"""LagKV: the tokens of a prompt that stand out in the range of the tokens that follow them; no attention is needed."""

import dataclasses
from typing import Any, ClassVar

import einops
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import LayerSpec, PromptKV
from kvjax.pallas_kernels import top_k

from .base import CacheLayer
from .families.scoring import PromptScorer, PromptScorerLayer
from .fields import check_fields
from .info import PolicyInfo
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class LagKV(PromptScorer):
    """Keep of every segment of a prompt what varies most, measured by the segment after it (Liang et al. 2025, section 3).

    After the sinks a prompt is cut into segments of `lag` tokens. Each but the last is scored: of every channel, the next
    segment's minimum is 0 and its maximum 1, and a token's standard deviation over the channels goes through a softmax over its
    segment; the softmaxes of rotated keys and of values are added. Beside the sinks, the last whole segment and what comes after
    it, which are kept, the budget is shared out evenly among the scored segments. What cannot be shared out is left unused.
    Only the prompt is compressed: tokens decoded later are kept in addition.

    As in the published code, the deviation has one degree of freedom less than there are channels, and of a budget too small for
    what is kept in any case, the sinks and the latest tokens get all. A channel without a range, which the paper does not
    mention, counts 0.

    Attributes:
        budget: slots for the prompt: a number of tokens, or a fraction of prompt + new tokens. A prompt within it is kept whole.
        sinks: S, first tokens, which are kept.
        lag: L, tokens in a segment. Of a prompt longer than the budget, L to 2 L - 1 tokens at its end are kept.
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
        return PromptScorerLayer(self, spec)  # segments are of whole prompts

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
        """Which tokens of a whole prompt are kept: as many of each segment that has a whole one after it, and all before and after these."""
        scored = jnp.maximum((lengths - self.sinks) // self.lag - 1, 0)  # segments
        share = (budget - (lengths - scored * self.lag)) // jnp.maximum(scored, 1)
        best = self._tokens(top_k(self._segments(scores), share[:, None, None]), scores.shape[-1])
        place, end = jnp.arange(scores.shape[-1], dtype=jnp.int32), self.sinks + scored * self.lag
        latest = jnp.maximum(end, lengths - budget + self.sinks)
        kept = (place < self.sinks) | (place >= latest[:, None])
        return best & (place < end[:, None])[:, None] | kept[:, None]

    def _segments(self, x: Float[Array, "*B T"]) -> Float[Array, "*B M L"]:
        """What comes after the sinks, in segments, of which the last is filled up."""
        x = x[..., self.sinks :]
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % self.lag)])
        return x.reshape(*x.shape[:-1], -1, self.lag)

    def _tokens(self, x: Array, size: int) -> Array:
        """The inverse of `_segments`; for the sinks it has zeros."""
        x = x.reshape(*x.shape[:-2], -1)
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(self.sinks, 0)])[..., :size]
