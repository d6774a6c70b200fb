"""What the two layers of `quantized` share, which keep in low-bit codes what another layer keeps of a prompt."""

import dataclasses
from typing import Any

from ..base import CacheLayer, P, Reads
from ..replay import Replay


@dataclasses.dataclass(frozen=True)
class LowBitLayer(CacheLayer[P]):
    """Base of layers whose keys and values are quantised. New tokens are appended, and no slot moves after that.

    Attributes:
        inner: the layer of the policy that is quantised, which chooses from the prompt.
    """

    inner: CacheLayer[Any] = dataclasses.field(kw_only=True)

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
