"""Inputs of a layer's cache: a prompt, one new token per row, or a block of tokens.

Queries and keys have rotated versions by name, so that a policy cannot forget to rotate. Unrotated ones are for methods
that assign new positions.
"""

import dataclasses
from typing import Self

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.config import Rope
from kvjax.pallas_kernels import DeferredRope
from kvjax.pallas_kernels.head_shards import query_heads

Rotated = Float[Array, "B N H"] | DeferredRope
"""Rotated queries or keys of one token per row, possibly in a form that a kernel rotates. Opaque to policies."""


@flax.struct.dataclass
class PromptKV:
    """Right-padded prompts as one layer sees them. B rows, T places, S queries, N query heads, K KV heads, H head dim.

    A whole prompt has S = T. In chunked prefill, the prompt has the kept tokens of the text, followed by a block. Kept
    tokens are in order and right-aligned before the block in each head. They have T - S places without queries (see
    `as_prompt_with_block`).

    Attributes:
        q, k, v: unrotated queries and keys, and values. `k` is rotated for tokens that were cached rotated.
        q_rotated, k_rotated: queries and keys, rotated to their positions.
        pos: original position of the token in each place, -1 if there is none.
        lengths: places up to the end of each row. For a whole prompt, its number of tokens.
        seen: tokens of each row so far, kept or not.
        total: tokens that each row will reach with its new ones, for fractional budgets.
        sinks: logit of each query head's attention sink. None without sinks.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (1, 6, 4, 4))  # rows, tokens, heads, channels
        >>> lengths = jnp.asarray([5])
        >>> prompt = kvjax.cache.PromptKV.of(spec.rope, x[:, :, :2], x[:, :, 2:3], x[:, :, 3:], lengths, lengths + 2)
        >>> prompt.pos.tolist()  # the last place is padding
        [[[0, 1, 2, 3, 4, -1]]]
    """

    q: Float[Array, "B S N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    q_rotated: Float[Array, "B S N H"]
    k_rotated: Float[Array, "B T K H"]
    pos: Int[Array, "B #K T"]
    lengths: Int[Array, " B"]
    seen: Int[Array, " B"]
    total: Int[Array, " B"]
    sinks: Float[Array, " N"] | None = None

    @classmethod
    def of(
        cls,
        rope: Rope,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
        total: Int[Array, " B"],
        sinks: Float[Array, " N"] | None = None,
    ) -> Self:
        """Make a whole prompt from unrotated queries and keys, which are rotated once here."""
        place = jnp.arange(q.shape[1], dtype=jnp.int32)
        pos = jnp.where(prompt_mask(lengths, q.shape[1]), place, -1)[:, None]
        turn = place[None, :, None]
        return cls(q, k, v, rope.rotate(q, turn), rope.rotate(k, turn), pos, lengths, lengths, total, sinks)

    @property
    def size(self) -> int:
        """T, places of a row."""
        return self.k.shape[1]

    @property
    def before(self) -> int:
        """Places before the first query, 0 in a whole prompt."""
        return self.size - self.q.shape[1]

    @property
    def mask(self) -> Bool[Array, "B T"]:
        """Places of a whole prompt that contain a token."""
        return prompt_mask(self.lengths, self.size)

    @property
    def live(self) -> Bool[Array, "B #K T"]:
        """Places that contain a token, in each head."""
        return self.pos >= 0

    @property
    def places(self) -> Int[Array, "B #K T"] | None:
        """Positions, or None for a whole prompt, whose positions operations assume by default."""
        return self.pos if self.before else None

    def heads(self, kv_heads: np.ndarray) -> "PromptKV":
        """Return some KV heads, with the query heads that read them."""
        queries = query_heads(kv_heads, self.q.shape[2] // self.k.shape[2])
        return dataclasses.replace(
            self,
            q=self.q[:, :, queries],
            k=self.k[:, :, kv_heads],
            v=self.v[:, :, kv_heads],
            q_rotated=self.q_rotated[:, :, queries],
            k_rotated=self.k_rotated[:, :, kv_heads],
            pos=self.pos if self.pos.shape[1] == 1 else self.pos[:, kv_heads],
            sinks=self.sinks if self.sinks is None else self.sinks[queries],
        )


@flax.struct.dataclass
class Token:
    """One new token per row as one layer sees it. B rows, N query heads, K KV heads, H head dim.

    Attributes:
        q, k, v: unrotated query and key, and value.
        position: original position of each row's token.
        rope: the rotation by positions.
        live: rows that have a token. In other rows, no function of a `CacheLayer` changes the state. None if all rows
            have one.
        inputs: normed inputs of the attention projections, for a layer that declares `needs_token_inputs`.
        sinks: logit of each query head's attention sink. None without sinks.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (1, 4, 4))  # rows, heads, channels
        >>> token = kvjax.cache.Token(x[:, :2], x[:, 2:3], x[:, 3:], jnp.asarray([6]), spec.rope)
        >>> cache, _ = kvjax.cache.insert(kvjax.cache.from_prompt(spec, 8, prompt), token)
        >>> cache.pos[0, 0].tolist()
        [0, 1, 2, 3, 4, 5, 6, -1]
    """

    q: Float[Array, "B N H"]
    k: Float[Array, "B K H"]
    v: Float[Array, "B K H"]
    position: Int[Array, " B"]
    rope: Rope = flax.struct.field(pytree_node=False)
    live: Bool[Array, " B"] | None = None
    inputs: Float[Array, "B D"] | None = None
    sinks: Float[Array, " N"] | None = None

    @property
    def query(self) -> Rotated:
        """The rotated query, for operations of `kvjax.cache` and `kvjax.pallas_kernels`."""
        return deferred_rope(self.rope, self.q, self.position)

    @property
    def key(self) -> Rotated:
        """The rotated key, for the same operations."""
        return deferred_rope(self.rope, self.k, self.position)

    @property
    def q_rotated(self) -> Float[Array, "B N H"]:
        """The rotated query, as an array."""
        return self.rope.rotate(self.q, self.position[:, None])

    @property
    def k_rotated(self) -> Float[Array, "B K H"]:
        """The rotated key, as an array."""
        return self.rope.rotate(self.k, self.position[:, None])

    def heads(self, kv_heads: np.ndarray) -> "Token":
        """Return some KV heads, with the query heads that read them."""
        queries = query_heads(kv_heads, self.q.shape[1] // self.k.shape[1])
        q, k, v = self.q[:, queries], self.k[:, kv_heads], self.v[:, kv_heads]
        return dataclasses.replace(self, q=q, k=k, v=v, sinks=self.sinks if self.sinks is None else self.sinks[queries])

    def slot(self, following: Int[Array, "B ..."]) -> Int[Array, "B ..."]:
        """`following`, the next slot of each row, in rows that have a token; else a slot out of bounds, where writes are dropped."""
        if self.live is None:
            return following
        return jnp.where(_by_row(self.live, following), following, jnp.iinfo(jnp.int32).max)

    def count(self, like: Int[Array, "B ..."]) -> Int[Array, "B ..."] | int:
        """Number of new tokens in each row, 0 or 1, to add to a counter."""
        return 1 if self.live is None else _by_row(self.live, like).astype(jnp.int32)


@flax.struct.dataclass
class TokenBlock:
    """Up to S consecutive tokens per row, right-padded, as one layer sees them.

    Attributes:
        q, k, v: unrotated queries and keys, and values.
        position: original position of each row's first token.
        count: tokens in each row, 0 in rows that stay unchanged.
        total: tokens that each row will reach, for fractional budgets.
        rope: the rotation by positions.
        sinks: logit of each query head's attention sink. None without sinks.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (1, 2, 4, 4))  # rows, tokens, heads, channels
        >>> first, count, total = jnp.asarray([6]), jnp.asarray([2]), jnp.asarray([8])
        >>> block = kvjax.cache.TokenBlock(x[:, :, :2], x[:, :, 2:3], x[:, :, 3:], first, count, total, spec.rope)
        >>> kvjax.cache.insert_block(kvjax.cache.from_prompt(spec, 8, prompt), block).pos[0, 0].tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """

    q: Float[Array, "B S N H"]
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]
    position: Int[Array, " B"]
    count: Int[Array, " B"]
    total: Int[Array, " B"]
    rope: Rope = flax.struct.field(pytree_node=False)
    sinks: Float[Array, " N"] | None = None

    @property
    def size(self) -> int:
        """S, places of a row."""
        return self.q.shape[1]

    @property
    def mask(self) -> Bool[Array, "B S"]:
        """Places that contain a token."""
        return prompt_mask(self.count, self.size)

    @property
    def positions(self) -> Int[Array, "B S"]:
        """Original position of every token."""
        return positions_from(self.position, self.size)

    @property
    def q_rotated(self) -> Float[Array, "B S N H"]:
        """Queries, rotated to their positions."""
        return self.rope.rotate(self.q, self.positions[..., None])

    @property
    def k_rotated(self) -> Float[Array, "B S K H"]:
        """Keys, rotated to their positions."""
        return self.rope.rotate(self.k, self.positions[..., None])

    def by_token(self) -> Token:
        """Return S tokens, stacked along a new first axis to scan over."""
        q, k, v, position = (jnp.swapaxes(x, 0, 1) for x in (self.q, self.k, self.v, self.positions))
        sinks = self.sinks if self.sinks is None else jnp.broadcast_to(self.sinks, (self.size, *self.sinks.shape))
        return Token(q, k, v, position, self.rope, sinks=sinks)

    def heads(self, kv_heads: np.ndarray) -> "TokenBlock":
        """Return some KV heads, with the query heads that read them."""
        queries = query_heads(kv_heads, self.q.shape[2] // self.k.shape[2])
        q, k, v = self.q[:, :, queries], self.k[:, :, kv_heads], self.v[:, :, kv_heads]
        return dataclasses.replace(self, q=q, k=k, v=v, sinks=self.sinks if self.sinks is None else self.sinks[queries])


def _by_row(live: Bool[Array, " B"], like: Array) -> Bool[Array, "B ..."]:
    return live.reshape(-1, *[1] * (like.ndim - 1))


def deferred_rope(rope: Rope, x: Float[Array, "B N H"], position: Int[Array, " B"]) -> Rotated:
    """Rotate `x` to each row's position, or defer the rotation to the kernel that reads it."""
    if rope.rotates_halves_of(x.shape[-1]):
        return DeferredRope(x, *rope.cos_sin(position))
    return rope.rotate(x, position[:, None])


def prompt_mask(lengths: Int[Array, " B"], size: int) -> Bool[Array, "B T"]:
    """Which of `size` places of a right-padded prompt are tokens.

    Example:
        >>> kvjax.cache.prompt_mask(jnp.asarray([2, 3]), 3).tolist()
        [[True, True, False], [True, True, True]]
    """
    return jnp.arange(size, dtype=jnp.int32) < lengths[:, None]


def positions_from(position: Int[Array, " B"], count: int) -> Int[Array, "B S"]:
    """Positions of `count` consecutive tokens from `position` on.

    Example:
        >>> kvjax.cache.positions_from(jnp.asarray([0, 6]), 3).tolist()
        [[0, 1, 2], [6, 7, 8]]
    """
    return position[:, None] + jnp.arange(count, dtype=jnp.int32)
