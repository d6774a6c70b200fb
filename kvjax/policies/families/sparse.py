"""What methods with sparse attention share: every token is kept, and a query reads a selection of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Rotated, Token

from ..base import Attention, CacheLayer, Carry, P, State, When
from ..budget import budget_tokens


def reads_everything(spec: LayerSpec, budget: int | float, dense_layers: int, least: int) -> bool:
    """Whether a layer is one of the first `dense_layers`, or its budget covers all that a sequence can come to."""
    return spec.layer < dense_layers or budget_tokens(budget, spec.max_tokens, least) >= spec.max_tokens


def reads_all(spec: LayerSpec, prompt: PromptKV, budget: Int[Array, " B"]) -> Bool[Array, " B"]:
    """`reads_everything` of each row by its own length: in a batch with longer rows it reads what it would alone."""
    return budget >= cache.row_buckets(prompt.lengths, spec.prompt_len) + spec.new_tokens


@dataclasses.dataclass(frozen=True)
class SparseLayer(CacheLayer[P]):
    """Base of layers with sparse attention: token p is in slot p, with its key rotated, and a query reads three kinds of slots.

    These are what it selects, the first `always_kept[0]` tokens, and a tail of latest ones, up to `always_kept[1]` of them. The
    state has its store in a field `cache`. `offloaded` then moves only what is selected.

    A layer that keeps its store in another way says so by `store`, `with_store` and `attend_to`.
    """

    @property
    def attention(self) -> Attention:
        return "sparse"

    @property
    def when(self) -> When:
        return "never"

    @property
    def always_kept(self) -> tuple[int, int]:
        """How many first tokens every query reads, and how long the tail can be that it reads too."""
        raise NotImplementedError

    def tail_start(self, state: Any) -> Int[Array, " B"]:
        """The position that each row's tail begins at, no less than the number of first tokens."""
        raise NotImplementedError

    @property
    def selection_shape(self) -> tuple[int, int]:
        """How many heads select for themselves (R: the query heads or the KV heads), and how many slots (S)."""
        raise NotImplementedError

    def select(self, state: Any, query: Rotated) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        """Slots that rotated queries select for each selecting head, and which of them are valid.

        Keys and values are not looked at: they may be out of reach.
        """
        raise NotImplementedError

    @property
    def slots_read(self) -> int:
        """Slots that one of the selecting heads gathers in a decoding step."""
        return cache.round_slots(self.selection_shape[1] + sum(self.always_kept))

    @property
    def page(self) -> int:
        """Slots of a page: all that is read comes in runs of so many slots, each of which begins at a multiple of it."""
        return 1

    def query(self, token: Token, carry: Carry) -> Rotated:
        """The rotated queries that it selects by: those that attend, or such as it has looked ahead to."""
        return token.query

    def store(self, state: Any) -> tuple[Array, ...]:
        """What is gathered by slot, and may be out of reach: keys and values [B, K, C, H]."""
        return state.cache.k, state.cache.v

    def with_store(self, state: Any, store: tuple[Array, ...]) -> State:
        """The state with its store elsewhere."""
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
        """Attention of the newest token, given all of the store that it reads.

        Args:
            index, valid: slots, and which of them are valid.
            fetched: what the store has there, [B, R, S, H] each.
        """
        return cache.attend(self.spec, gathered(fetched[0], fetched[1], index, valid, state.cache.seen), token)[0]

    def compress(self, state: State) -> State:
        return self.regroup(state, lambda pos: cache.keys_at(state.cache, pos))

    def pages_to_read(
        self, state: Any, query: Rotated, position: Int[Array, " B"]
    ) -> tuple[Int[Array, "B R P"], Bool[Array, "B R L"]]:
        """`slots_to_read` within the layer's window, as pages of `page` slots; and which of the pages, or of the slots in them, are valid.

        Slots that hold no token yet need not be left out.
        """
        index, valid = self.slots_to_read(state, query)
        if self.spec.window is not None:
            valid &= index > position[:, None, None] - self.spec.window
        return index[..., :: self.page] // self.page, valid

    def slots_to_read(self, state: Any, query: Rotated) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
        """All slots that rotated queries read, as for `select`: the selection, the first tokens, the tail, and padding."""
        index, valid = self.select(state, query)
        kept, exists = (
            jnp.broadcast_to(x[:, None], (*index.shape[:2], x.shape[-1])) for x in self.always_kept_slots(state)
        )
        index, valid = jnp.concatenate([index, kept], axis=-1), jnp.concatenate([valid, exists], axis=-1)
        index = jnp.minimum(index, self.capacity - 1)
        padding = ((0, 0), (0, 0), (0, self.slots_read - index.shape[-1]))
        return jnp.pad(index, padding), jnp.pad(valid, padding)

    def always_kept_slots(self, state: Any) -> tuple[Int[Array, "B E"], Bool[Array, "B E"]]:
        """Slots that every query reads: first tokens and tail, and which of them exist."""
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
    """A small cache of R heads, of what they have read."""
    return LayerCache(
        k=k,
        v=v,
        pos=jnp.where(valid, index, -1),
        weight=valid.astype(jnp.float32),
        next=jnp.zeros(index.shape[:2], jnp.int32),
        seen=seen,
    )
