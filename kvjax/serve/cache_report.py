"""What a stream says of its sequence's cache: bytes beside a full cache's, and which tokens are kept."""

import base64
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.runtime.batch import Batch

from .serving import Choice


@dataclasses.dataclass(frozen=True)
class CacheSizes:
    """Sizes of the caches of a batch's rows.

    Args:
        batch: the batch.
    """

    batch: Batch

    def in_use(self, slots: int, of: int) -> int:
        """Bytes of a row, by the share of its slots that are in use, on each device."""
        return self._states + round((self.batch.row_bytes - self._states) * slots / of)

    def full(self, tokens: int) -> int:
        """Bytes of a full cache of as many tokens, on each device."""
        spec = self.batch.specs[0]
        whole = self.batch.engine.config.cache_bytes(tokens, spec.dtype.itemsize)
        return self._states + whole // (spec.shard.heads * spec.shard.slots)

    @property
    def _states(self) -> int:
        """Bytes of the states of recurrent layers, on each device."""
        spec = self.batch.specs[0]
        return self.batch.engine.config.state_bytes(spec.dtype.itemsize) // spec.shard.heads


class CacheReporter:
    """Reports of one sequence.

    Args:
        sizes: sizes of the caches.
        texts: text of each token of the prompt.
    """

    def __init__(self, sizes: CacheSizes, texts: Sequence[str]) -> None:
        self._sizes, self._texts = sizes, texts
        self._told: Any = None
        self._sent = 0

    def report(self, choice: Choice, text_of: Any) -> dict[str, Any] | None:
        """What is new since the last report; None if nothing is.

        Args:
            choice: the sequence.
            text_of: text of a token id.
        """
        kept = choice.kept
        if kept is None or kept is self._told:
            return None
        self._told, tokens = kept, int(kept.tokens[0])
        new = (
            self._texts[i] if i < len(self._texts) else self._new(choice, i, text_of) for i in range(self._sent, tokens)
        )
        texts, self._sent = list(new), max(self._sent, tokens)
        return {
            "tokens": tokens,
            "bytes": self._sizes.in_use(int(kept.used), int(kept.slots)),
            "full_bytes": self._sizes.full(tokens),
            "row_bytes": self._sizes.batch.row_bytes,
            "ms_per_token": choice.ms_per_token,
            "kept": base64.b64encode(np.asarray(kept.shares[:tokens]).tobytes()).decode(),
            "texts": texts,
        }

    def _new(self, choice: Choice, position: int, text_of: Any) -> str:
        """Text of a sampled token. A row whose end is known late has read some tokens more, which have no text."""
        index = position - len(self._texts)
        return text_of(choice.row.tokens[index]) if index < len(choice.row.tokens) else ""
