"""Two stages: eviction from a prompt, and then a selection of the rest for each query."""

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Token
from kvjax.config import NO_ROPE

from ..layer import CacheLayer, Carry, P, State
from .scoring import PromptScorerLayer
from .sparse import SparseLayer


@flax.struct.dataclass
class Staged:
    """The cache of the second stage, in which a token's position is its rank. B rows, K KV heads, P slots of the prompt.

    Attributes:
        inner: the second stage's state.
        pos: original positions of the prompt's kept tokens, -1 elsewhere.
        dropped: number of evicted tokens of each row.
    """

    inner: State
    pos: Int[Array, "B K P"]
    dropped: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class StagedLayer(CacheLayer[P]):
    """A layer that evicts from its prompt, and then selects what a query reads of the rest.

    Attributes:
        first: chooses from the prompt.
        second: a layer for the tokens that are left, whose positions are their ranks, with keys that are rotated already.
    """

    first: PromptScorerLayer[Any] = dataclasses.field(kw_only=True)
    second: SparseLayer[Any] = dataclasses.field(kw_only=True)

    @property
    def max_kept(self) -> int:
        return self.second.max_kept

    @property
    def needs_context(self) -> bool:
        return self.first.needs_context

    @property
    def reduces_heads(self) -> bool:
        return self.first.reduces_heads

    @property
    def bytes_read(self) -> int:
        return self.second.bytes_read

    def init(self, total: Int[Array, " B"] | None = None) -> Staged:
        spec = self.second.spec
        pos = jnp.full((spec.batch, spec.num_kv_heads, spec.prompt_len), -1, jnp.int32)
        return Staged(self.second.init(total), pos, jnp.zeros(spec.batch, jnp.int32))

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[Staged, Carry]:
        keep, carry = self.first.chosen(prompt, carry)
        size = self.second.spec.prompt_len
        kept, _ = cache.keep(self.spec, size, prompt, keep)
        lengths = kept.next[:, 0]  # of every head
        dropped = prompt.seen.astype(jnp.int32) - lengths
        k, v = (jnp.swapaxes(x, 1, 2) for x in (kept.k, kept.v))
        rank = jnp.arange(size, dtype=jnp.int32)
        places = jnp.where(rank < lengths[:, None], rank, -1)[:, None]
        q = prompt.q_rotated[:, :size]  # of no use without the tokens' own positions
        left = PromptKV(q, k, v, q, k, places, lengths, lengths, prompt.total.astype(jnp.int32) - dropped, prompt.sinks)
        inner, carry = self.select_from(left, prompt, carry)
        return Staged(inner, kept.pos, dropped), carry

    def select_from(self, left: PromptKV, prompt: PromptKV, carry: Carry) -> tuple[State, Carry]:
        """Return the second stage's state after the tokens that are left of a prompt, and the carry."""
        return self.second.prefill(left, carry)

    def append(self, state: Staged, token: Token) -> Staged:
        return dataclasses.replace(state, inner=self.second.append(state.inner, self._ranked(state, token)))

    def attend(self, state: Staged, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], Staged, Carry]:
        out, inner, carry = self.second.attend(state.inner, self._ranked(state, token), carry)
        return out, dataclasses.replace(state, inner=inner), carry

    def view(self, state: Staged) -> LayerCache:
        held = self.second.view(state.inner)
        places = [(0, 0), (0, 0), (0, held.pos.shape[-1] - state.pos.shape[-1])]
        own = jnp.pad(state.pos, places, constant_values=-1)
        pos = jnp.where(own >= 0, own, held.pos + state.dropped[:, None, None])
        return dataclasses.replace(held, pos=jnp.where(held.live, pos, -1), seen=held.seen + state.dropped)

    def _ranked(self, state: Staged, token: Token) -> Token:
        """The token with its rank as its position. Its query and key are rotated to its original position."""
        rank = token.position - state.dropped
        return Token(token.q_rotated, token.k_rotated, token.v, rank, NO_ROPE, token.live, sinks=token.sinks)


def second_spec(first: PromptScorerLayer[Any]) -> LayerSpec:
    """The spec of the second stage: for the tokens that the first one leaves, whose keys are rotated already."""
    kept = min(first.max_kept - first.spec.new_tokens, first.spec.prompt_len)
    return dataclasses.replace(first.spec, prompt_len=kept, rope=NO_ROPE, block=0)
