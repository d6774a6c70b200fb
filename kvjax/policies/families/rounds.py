"""Compression in rounds: methods that apply a prompt's scores repeatedly while decoding.

A cache grows by `every` tokens. A round then scores all its tokens as a prompt is scored, and cuts it to the budget.
Scores need the last queries, which caches do not have. A ring buffer stores them.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, PromptKV, Token, TokenBlock
from kvjax.pallas_kernels import write_slots

from ..layer import CacheLayer, Carry, Reads, check_reads_blocks
from .scoring import PromptScorerLayer

REWRITTEN = 2**21
"""Maximum size of a ring that is rewritten whole with every token: one kernel, where a scatter needs two."""


@flax.struct.dataclass
class ObservedCache:
    """A cache and the latest queries. B rows, W queries, N query heads, H head dim.

    Attributes:
        cache: rotated keys, and values, in order of position from the first slot on.
        queries: ring of the rotated queries of the last W tokens. The query of token p, counted from 0, is at p mod W.
        rounded: tokens that each row had seen at its last round, 0 before the first.
        total: tokens that each row will reach, for fractional budgets.
    """

    cache: LayerCache
    queries: Float[Array, "B W N H"]
    rounded: Int[Array, " B"]
    total: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class RoundsLayer(CacheLayer[Any]):
    """A layer that its scorer cuts to the budget once `every` tokens have come since the last round.

    The prompt's tokens count, too. A prompt of `every` tokens or more is compressed at once, and all rows then have
    their rounds at the same time. A head therefore has at most the budget plus `every` tokens.

    Attributes:
        scorer: chooses what to keep. Its policy's `query_window` sets W.
        every: tokens from round to round.
        keeps_prompt: whether the first round waits for `every` new tokens, however long the prompt is.
    """

    scorer: PromptScorerLayer[Any] = dataclasses.field(kw_only=True)
    every: int = dataclasses.field(kw_only=True)
    keeps_prompt: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def reads(self) -> Reads:
        return "whole" if self.keeps_prompt else "blocks"  # the state does not tell a first block from new tokens

    @property
    def compress_reads_kv(self) -> bool:
        return True

    @property
    def max_kept(self) -> int:
        return max(self._budget, self.spec.prompt_len if self.keeps_prompt else 0) + self.every - 1

    def init(self, total: Int[Array, " B"] | None = None) -> ObservedCache:
        spec = self.spec
        empty = cache.empty(spec, self.capacity)
        queries = jnp.zeros((spec.batch, self._window, spec.num_heads, spec.head_dim), spec.dtype)
        return ObservedCache(empty, queries, jnp.zeros_like(empty.seen), spec.totals(total))

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[ObservedCache, Carry]:
        lengths = prompt.lengths.astype(jnp.int32)
        due = jnp.ones_like(lengths, bool) if self.keeps_prompt else lengths >= self.every
        if self.keeps_prompt or prompt.size <= self._budget:
            kept = cache.from_prompt(self.spec, self.capacity, prompt)
        else:
            keep, carry = self.scorer.chosen(prompt, carry)
            kept, _ = cache.keep(self.spec, self.capacity, prompt, keep | ~due[:, None, None])
        none = jnp.zeros((lengths.shape[0], self._window, *prompt.q_rotated.shape[2:]), self.spec.dtype)
        queries = self._latest(none, prompt.q_rotated, jnp.zeros_like(lengths), lengths)
        return ObservedCache(kept, queries, jnp.where(due, lengths, 0), prompt.total.astype(jnp.int32)), carry

    def append(self, state: ObservedCache, token: Token) -> ObservedCache:
        queries, q = state.queries, token.q_rotated.astype(state.queries.dtype)
        place = state.cache.seen % max(self._window, 1)
        if queries.size <= REWRITTEN:
            own = jnp.arange(self._window, dtype=jnp.int32) == token.slot(place)[:, None]
            queries = jnp.where(own[..., None, None], q[:, None], queries)
        else:
            heads = queries.reshape(queries.shape[0], 1, self._window, -1)
            (heads,) = write_slots([heads], token.slot(place)[:, None], [q.reshape(q.shape[0], 1, -1)])
            queries = heads.reshape(queries.shape)
        return dataclasses.replace(state, cache=cache.insert(state.cache, token)[0], queries=queries)

    def attend(
        self, state: ObservedCache, token: Token, carry: Carry
    ) -> tuple[Float[Array, "B N H"], ObservedCache, Carry]:
        return cache.attend(self.spec, state.cache, token)[0], state, carry

    def read_block(
        self, state: ObservedCache, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], ObservedCache, Carry]:
        check_reads_blocks(self)
        held = cache.insert_block(cache.extended(state.cache, block.size), block)
        out = cache.attend_block(self.spec, held, block)
        queries = self._latest(state.queries, block.q_rotated, state.cache.seen, held.seen)
        new = self._round(ObservedCache(held, queries, state.rounded, block.total))
        return out, cache.where_rows(block.count > 0, new, state), carry

    def compress(self, state: ObservedCache) -> ObservedCache:
        over = jnp.any(
            state.cache.count > self.scorer.policy.row_budgets(self.spec, state.cache.seen, state.total)[:, None],
            axis=-1,
        )
        due = self.is_due(state)
        kept = jax.lax.cond(
            jnp.any(due & over), lambda state: self._round(state).cache, lambda state: state.cache, state
        )
        return dataclasses.replace(state, cache=kept, rounded=jnp.where(due, state.cache.seen, state.rounded))

    def is_due(self, state: ObservedCache) -> Bool[Array, " B"]:
        return state.cache.seen - state.rounded >= self.every

    def _round(self, state: ObservedCache) -> ObservedCache:
        """Cut the rows that are due, and return the state with as many slots as between two steps."""
        held, due = state.cache, self.is_due(state)
        place = held.seen[:, None] - self._window + jnp.arange(self._window, dtype=jnp.int32)
        queries = jnp.take_along_axis(state.queries, (place % max(self._window, 1))[..., None, None], axis=1)
        prompt = cache.kept_as_prompt(held, queries, state.total)
        keep, _ = self.scorer.chosen(prompt, {})
        kept = cache.keep_places(held, self.capacity, keep | ~due[:, None, None])
        return dataclasses.replace(state, cache=kept, rounded=jnp.where(due, held.seen, state.rounded))

    def _latest(
        self, ring: Float[Array, "B W N H"], q: Float[Array, "B S N H"], start: Int[Array, " B"], stop: Int[Array, " B"]
    ) -> Float[Array, "B W N H"]:
        """Return the ring with the queries of tokens `start` to `stop`, which are the first of `q`."""
        if not self._window:
            return ring
        last = stop[:, None] - 1
        token = last - (last - jnp.arange(self._window, dtype=jnp.int32)) % self._window  # latest token of each place
        ahead = (token - start[:, None])[..., None, None]
        given = jnp.take_along_axis(q, jnp.clip(ahead, 0, q.shape[1] - 1), axis=1)
        return jnp.where(ahead >= 0, given.astype(ring.dtype), ring)

    @property
    def _window(self) -> int:
        """W, the number of queries in the ring."""
        return self.scorer.policy.query_window

    @property
    def _budget(self) -> int:
        """Maximum number of tokens that a round leaves.

        Budgets that depend on a prompt's length use the number of tokens read so far.
        """
        spec = self.spec
        whole = dataclasses.replace(spec, prompt_len=spec.max_tokens, new_tokens=0, block=max(spec.block, 1))
        return self.scorer.policy.max_budget(whole)
