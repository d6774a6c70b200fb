"""Base of the two layers of `quantized`, which keep another layer's tokens in low-bit codes."""

import dataclasses
from typing import Any

from ..layer import CacheLayer, P, Reads
from ..replay import Replay


@dataclasses.dataclass(frozen=True)
class LowBitLayer(CacheLayer[P]):
    """Base of layers with quantised keys and values. New tokens are appended, and no slot moves afterwards.

    Attributes:
        inner: the layer of the quantised policy, which chooses from the prompt.
    """

    inner: CacheLayer[Any] = dataclasses.field(kw_only=True)

    @property
    def max_kept(self) -> int:
        return self.inner.max_kept

    @property
    def reads(self) -> Reads:
        """Chunked prefill needs an inner layer that keeps every token, because quantised slots cannot be evicted."""
        return "whole" if self.inner.max_kept < self.spec.max_tokens else "blocks"

    @property
    def replays(self) -> tuple[Replay, ...]:
        return self.inner.replays

    @property
    def needs_context(self) -> bool:
        return self.inner.needs_context
