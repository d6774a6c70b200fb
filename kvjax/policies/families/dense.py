"""Layers that keep and read every token."""

import dataclasses

from jaxtyping import Array, Float

from kvjax import cache
from kvjax.cache import LayerCache, TokenBlock

from ..layer import Attention, CacheLayer, Carry, P


@dataclasses.dataclass(frozen=True)
class DenseLayer(CacheLayer[P]):
    """A layer whose cache has all tokens, in order."""

    @property
    def attention(self) -> Attention:
        return "dense"

    def read_block(
        self, state: LayerCache, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], LayerCache, Carry]:
        state = cache.insert_block(state, block)
        return cache.attend_block(self.spec, state, block), state, carry
