"""Sparse attention: every token is kept, and a query reads a selection of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Rotated, Token

from ..budget import budget_tokens
from ..layer import Attention, CacheLayer, Carry, P, State, When


def reads_everything(spec: LayerSpec, budget: int | float, dense_layers: int, least: int) -> bool:
    """Whether a layer is one of the first `dense_layers`, or its budget covers the longest possible sequence."""
    return spec.layer < dense_layers or budget_tokens(budget, spec.max_tokens, least) >= spec.max_tokens


def reads_all(spec: LayerSpec, prompt: PromptKV, budget: Int[Array, " B"]) -> Bool[Array, " B"]:
    """`reads_everything` for each row by its length, so that a row reads the same tokens in any batch."""
    return budget >= cache.row_buckets(prompt.lengths, spec.prompt_len) + spec.new_tokens


@dataclasses.dataclass(frozen=True)
class SparseLayer(CacheLayer[P]):
    """Base of layers with sparse attention: token p is in slot p, with its key rotated.

    A query reads the slots that it selects, the first `always_kept[0]` tokens, and a tail of up to `always_kept[1]`
    latest tokens. The state has its store in a field `cache`. `offloaded` then moves only selected entries.

    A layer with another kind of store overrides `store`, `with_store` and `attend_to`.

    Example:
        >>> layer = kvjax.Quest(budget=4, page=2, dense_layers=0).layer(spec)
        >>> isinstance(layer, kvjax.policies.SparseLayer), layer.always_kept
        (True, (0, 0))
    """

    @property
    def attention(self) -> Attention:
        return "sparse"

    @property
    def when(self) -> When:
        return "never"

    @property
    def selects_slots(self) -> bool:
        looks_ahead = type(self).look_ahead is not CacheLayer.look_ahead
        return self.when == "never" and not self.has_own_store and not looks_ahead

    @property
    def always_kept(self) -> tuple[int, int]:
        """Number of first tokens that every query reads, and maximum length of the tail that it also reads."""
        raise NotImplementedError

    def tail_start(self, state: Any) -> Int[Array, " B"]:
        """First position of each row's tail, at least the number of first tokens."""
        raise NotImplementedError

    @property
    def selection_shape(self) -> tuple[int, int]:
        """Number of heads that select (R: query heads or KV heads), and number of slots that each selects (S)."""
        raise NotImplementedError

    def select(self, state: Any, query: Rotated) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        """Return the slots that each selecting head's rotated query selects, and which of them are valid.

        This must not read keys or values, because they may be in host memory.
        """
        raise NotImplementedError

    @property
    def slots_read(self) -> int:
        """Slots that one selecting head gathers in a decoding step."""
        return cache.round_slots(self.selection_shape[1] + sum(self.always_kept))

    @property
    def page(self) -> int:
        """Slots of a page. Slots are read in runs of this length, each aligned to a multiple of it."""
        return 1

    def query(self, token: Token, carry: Carry) -> Rotated:
        """Return the rotated queries to select by: the token's own, or those computed by `look_ahead`."""
        return token.query

    def store(self, state: Any) -> tuple[Array, ...]:
        """Return the arrays that are gathered by slot, which may be in host memory: keys and values [B, K, C, H]."""
        return state.cache.k, state.cache.v

    def with_store(self, state: Any, store: tuple[Array, ...]) -> State:
        """Return the state with another store."""
        return dataclasses.replace(state, cache=dataclasses.replace(state.cache, k=store[0], v=store[1]))

    def regroup(self, state: State, keys: Callable[[Array], Array]) -> State:
        """`compress`, given a function from positions [B, W] in the tail to their keys [B, K, W, H]."""
        return state

    def append(self, state: State, token: Token) -> State:
        return dataclasses.replace(state, cache=super().append(state.cache, token))

    def attend(self, state: State, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], State, Carry]:
        pages, valid = self.pages_to_read(state, self.query(token, carry), token.position)
        return cache.attend_selected(self.spec, state.cache, token, pages, valid, self.page), state, carry

    def attend_to(
        self,
        state: Any,
        token: Token,
        index: Int[Array, "B R S"],
        valid: Bool[Array, "B R S"],
        fetched: tuple[Array, ...],
    ) -> Float[Array, "B N H"]:
        """Return the attention of the newest token over gathered entries of the store.

        Args:
            state: the layer's state.
            token: the newest token.
            index, valid: slots, and which of them are valid.
            fetched: the store's entries at these slots, [B, R, S, H] each.
        """
        return cache.attend(self.spec, gathered(fetched[0], fetched[1], index, valid, state.cache.seen), token)[0]

    def compress(self, state: State) -> State:
        return self.regroup(state, lambda pos: cache.keys_at(state.cache, pos))

    def pages_to_read(
        self, state: Any, query: Rotated, position: Int[Array, " B"]
    ) -> tuple[Int[Array, "B R P"], Bool[Array, "B R L"]]:
        """`slots_to_read` within the layer's window, as pages of `page` slots, and which pages or slots are valid.

        Slots without a token may be included.
        """
        index, valid = self.slots_to_read(state, query)
        if self.spec.window is not None:
            valid &= index > position[:, None, None] - self.spec.window
        return index[..., :: self.page] // self.page, valid

    def slots_to_read(self, state: Any, query: Rotated) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        """Return all slots that rotated queries read: the selection, the first tokens, the tail, and padding."""
        index, valid = self.select(state, query)
        kept, exists = (
            jnp.broadcast_to(x[:, None], (*index.shape[:2], x.shape[-1])) for x in self.always_kept_slots(state)
        )
        index, valid = jnp.concatenate([index, kept], axis=-1), jnp.concatenate([valid, exists], axis=-1)
        index = jnp.minimum(index, self.capacity - 1)
        padding = ((0, 0), (0, 0), (0, self.slots_read - index.shape[-1]))
        return jnp.pad(index, padding), jnp.pad(valid, padding)

    def always_kept_slots(self, state: Any) -> tuple[Int[Array, "B E"], Bool[Array, "B E"]]:
        """Return the slots that every query reads, first tokens and tail, and which of them exist."""
        first, latest = self.always_kept
        pos = jnp.arange(first + latest, dtype=jnp.int32)
        pos = jnp.where(pos < first, pos, self.tail_start(state)[:, None] + pos - first)
        return pos, pos < state.cache.seen[:, None]


def gathered(
    k: Float[Array, "B R S H"],
    v: Float[Array, "B R S H"],
    index: Int[Array, "B R S"],
    valid: Bool[Array, "B R S"],
    seen: Int[Array, " B"],
) -> LayerCache:
    """Return a small cache of R heads with gathered keys and values."""
    return LayerCache(
        k=k,
        v=v,
        pos=jnp.where(valid, index, -1),
        weight=valid.astype(jnp.float32),
        next=jnp.zeros(index.shape[:2], jnp.int32),
        seen=seen,
    )
