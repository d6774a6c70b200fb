"""`RingLayer`: the cache of a layer with a sliding window, whose slots are reused."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax import cache
from kvjax.cache import LayerCache, PromptKV, Token, TokenBlock

from ..layer import Attention, CacheLayer, Carry, P, read_as_prompt


@dataclasses.dataclass(frozen=True)
class RingLayer(CacheLayer[P]):
    """Keeps the tokens inside the layer's sliding window. A new token takes the slot of the oldest one.

    The output is that of a layer that keeps everything. A window that no sequence exceeds has a slot for every token.
    """

    @property
    def attention(self) -> Attention:
        return "kept" if self._reuses else "dense"

    @property
    def max_kept(self) -> int:
        return min(self.spec.window or self.spec.max_tokens, self.spec.max_tokens)

    @property
    def shards_slots(self) -> bool:
        return True

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[LayerCache, Carry]:
        if prompt.size <= self.capacity:
            return self._wrapped(cache.from_prompt(self.spec, self.capacity, prompt)), carry
        place = jnp.arange(prompt.size, dtype=jnp.int32)
        latest = place >= (prompt.lengths - self.capacity)[:, None, None]
        latest = jnp.broadcast_to(latest, (self.spec.batch, self.spec.num_kv_heads, prompt.size))
        kept, _ = cache.keep(self.spec, self.capacity, prompt, latest)
        return self._wrapped(kept), carry

    def read_block(
        self, state: LayerCache, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], LayerCache, Carry]:
        if self._reuses:
            return read_as_prompt(self, state, block, carry)
        state = cache.insert_block(state, block)
        return cache.attend_block(self.spec, state, block), state, carry

    def append(self, state: LayerCache, token: Token) -> LayerCache:
        return self._wrapped(cache.insert(state, token)[0])

    @property
    def _reuses(self) -> bool:
        return self.capacity < self.spec.max_tokens

    def _wrapped(self, state: LayerCache) -> LayerCache:
        """After the last slot, the next token goes into the first one."""
        if not self._reuses:
            return state
        return dataclasses.replace(state, next=jnp.where(state.next < self.capacity, state.next, 0))
