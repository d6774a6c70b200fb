"""What a layer gives its cache: a prompt, one new token per row, or several; with queries and keys rotated to original positions.

Rotated queries and keys are there by name, so that a policy cannot forget to rotate; unrotated ones are for methods that assign
positions anew.
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
"""Rotated queries or keys of one token per row, if need be such as the kernel that reads them rotates; opaque to policies."""


@flax.struct.dataclass
class PromptKV:
    """Right-padded prompts as one layer sees them. B rows, T places, S queries, N query heads, K KV heads, H head dim.

    A whole prompt has S = T. Where a text is read in blocks, each block makes a prompt together with what is kept of the text before it,
    which comes first, in order, each head's as many as it has up against the block: T - S places without queries (see `as_prompt_with_block`).

    Attributes:
        q, k, v: unrotated queries and keys, and values. Of what was kept rotated, `k` is rotated.
        q_rotated, k_rotated: queries and keys, rotated to their positions.
        pos: original position of the token in each place, -1 where there is none.
        lengths: places up to the end of each row; of a whole prompt, its tokens.
        seen: tokens of each row so far, kept or not.
        total: tokens that each row will reach with its new ones, which a fractional budget is a fraction of.
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

    @classmethod
    def of(
        cls,
        rope: Rope,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
        total: Int[Array, " B"],
    ) -> Self:
        """A whole prompt of unrotated queries and keys, which are rotated here once for all that read them."""
        place = jnp.arange(q.shape[1], dtype=jnp.int32)
        pos = jnp.where(prompt_mask(lengths, q.shape[1]), place, -1)[:, None]
        turn = place[None, :, None]
        return cls(q, k, v, rope.rotate(q, turn), rope.rotate(k, turn), pos, lengths, lengths, total)

    @property
    def size(self) -> int:
        """T, places of a row."""
        return self.k.shape[1]

    @property
    def before(self) -> int:
        """Places before the first query: none in a whole prompt."""
        return self.size - self.q.shape[1]

    @property
    def mask(self) -> Bool[Array, "B T"]:
        """Which places of a whole prompt hold a token."""
        return prompt_mask(self.lengths, self.size)

    @property
    def live(self) -> Bool[Array, "B #K T"]:
        """Which places hold a token in each head."""
        return self.pos >= 0

    @property
    def places(self) -> Int[Array, "B #K T"] | None:
        """Positions for operations that take those of whole prompts for granted, and then need not be told."""
        return self.pos if self.before else None

    def heads(self, kv_heads: np.ndarray) -> "PromptKV":
        """Some of the KV heads of a whole prompt, and the query heads that read them."""
        queries = query_heads(kv_heads, self.q.shape[2] // self.k.shape[2])
        return dataclasses.replace(
            self,
            q=self.q[:, :, queries],
            k=self.k[:, :, kv_heads],
            v=self.v[:, :, kv_heads],
            q_rotated=self.q_rotated[:, :, queries],
            k_rotated=self.k_rotated[:, :, kv_heads],
        )


@flax.struct.dataclass
class Token:
    """One new token per row as one layer sees it. B rows, N query heads, K KV heads, H head dim.

    Attributes:
        q, k, v: unrotated query and key, and value.
        position: original position of each row's token.
        rope: the rotation that positions stand for.
    """

    q: Float[Array, "B N H"]
    k: Float[Array, "B K H"]
    v: Float[Array, "B K H"]
    position: Int[Array, " B"]
    rope: Rope = flax.struct.field(pytree_node=False)

    @property
    def query(self) -> Rotated:
        """The rotated query, for operations of `kvjax.cache` and `kvjax.pallas_kernels`."""
        return deferred_rope(self.rope, self.q, self.position)

    @property
    def key(self) -> Rotated:
        """The rotated key, likewise."""
        return deferred_rope(self.rope, self.k, self.position)

    @property
    def q_rotated(self) -> Float[Array, "B N H"]:
        """The rotated query, computed."""
        return self.rope.rotate(self.q, self.position[:, None])

    @property
    def k_rotated(self) -> Float[Array, "B K H"]:
        """The rotated key, computed."""
        return self.rope.rotate(self.k, self.position[:, None])

    def heads(self, kv_heads: np.ndarray) -> "Token":
        """Some of the KV heads, and the query heads that read them."""
        queries = query_heads(kv_heads, self.q.shape[1] // self.k.shape[1])
        return Token(self.q[:, queries], self.k[:, kv_heads], self.v[:, kv_heads], self.position, self.rope)


@flax.struct.dataclass
class TokenBlock:
    """Up to S tokens per row that stand one after the other, padded on the right, as one layer sees them.

    Attributes:
        q, k, v: unrotated queries and keys, and values.
        position: original position of each row's first token.
        count: tokens in each row; none in a row that is not to be touched.
        total: tokens that each row will reach, which a fractional budget is a fraction of.
        rope: the rotation that positions stand for.
    """

    q: Float[Array, "B S N H"]
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]
    position: Int[Array, " B"]
    count: Int[Array, " B"]
    total: Int[Array, " B"]
    rope: Rope = flax.struct.field(pytree_node=False)

    @property
    def size(self) -> int:
        """S, places of a row."""
        return self.q.shape[1]

    @property
    def mask(self) -> Bool[Array, "B S"]:
        """Which places hold a token."""
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
        """The same as S tokens stacked in front, to be scanned over."""
        q, k, v, position = (jnp.swapaxes(x, 0, 1) for x in (self.q, self.k, self.v, self.positions))
        return Token(q, k, v, position, self.rope)

    def heads(self, kv_heads: np.ndarray) -> "TokenBlock":
        """Some of the KV heads, and the query heads that read them."""
        queries = query_heads(kv_heads, self.q.shape[2] // self.k.shape[2])
        q, k, v = self.q[:, :, queries], self.k[:, :, kv_heads], self.v[:, :, kv_heads]
        return dataclasses.replace(self, q=q, k=k, v=v)


def deferred_rope(rope: Rope, x: Float[Array, "B N H"], position: Int[Array, " B"]) -> Rotated:
    """`x` rotated to each row's position, if need be later, by the kernel that reads it."""
    if rope.rotates_halves_of(x.shape[-1]):
        return DeferredRope(x, *rope.cos_sin(position))
    return rope.rotate(x, position[:, None])


def prompt_mask(lengths: Int[Array, " B"], size: int) -> Bool[Array, "B T"]:
    """Which of `size` places of a right-padded prompt are tokens."""
    return jnp.arange(size, dtype=jnp.int32) < lengths[:, None]


def positions_from(position: Int[Array, " B"], count: int) -> Int[Array, "B S"]:
    """Positions of `count` tokens that stand one after the other from `position` on."""
    return position[:, None] + jnp.arange(count, dtype=jnp.int32)
