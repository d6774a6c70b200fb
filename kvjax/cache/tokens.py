"""What a layer gives its cache: a prompt, one new token per row, or several; with queries and keys rotated to original positions.

Rotated queries and keys are there by name, so that a policy cannot forget to rotate; unrotated ones are for methods that assign
positions anew.
"""

from typing import Self

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.models.rope import Rope
from kvjax.pallas_kernels import DeferredRope
from kvjax.pallas_kernels.head_shards import query_heads

Rotated = Float[Array, "B N H"] | DeferredRope
"""Rotated queries or keys of one token per row, if need be such as the kernel that reads them rotates; opaque to policies."""


@flax.struct.dataclass
class Prompt:
    """Right-padded prompts as one layer sees them. B rows, T places, N query heads, K KV heads, H head dim.

    Attributes:
        q, k, v: unrotated queries and keys, and values.
        q_rotated, k_rotated: queries and keys, rotated to their positions.
        lengths: tokens in each row.
        total: tokens that each row will reach with its new ones, which a fractional budget is a fraction of.
    """

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    q_rotated: Float[Array, "B T N H"]
    k_rotated: Float[Array, "B T K H"]
    lengths: Int[Array, " B"]
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
        """A prompt of unrotated queries and keys, which are rotated here once for all that read them."""
        position = jnp.arange(q.shape[1], dtype=jnp.int32)[None, :, None]
        return cls(q, k, v, rope.rotate(q, position), rope.rotate(k, position), lengths, total)

    @property
    def size(self) -> int:
        """T, the padded length."""
        return self.k.shape[1]

    @property
    def mask(self) -> Bool[Array, "B T"]:
        """Which places hold a token."""
        return prompt_mask(self.lengths, self.size)

    def heads(self, kv_heads: np.ndarray) -> "Prompt":
        """Some of the KV heads, and the query heads that read them."""
        queries = query_heads(kv_heads, self.q.shape[2] // self.k.shape[2])
        return Prompt(
            self.q[:, :, queries],
            self.k[:, :, kv_heads],
            self.v[:, :, kv_heads],
            self.q_rotated[:, :, queries],
            self.k_rotated[:, :, kv_heads],
            self.lengths,
            self.total,
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
    """S tokens per row that stand one after the other, as one layer sees them.

    Attributes:
        q, k, v: unrotated queries and keys, and values.
        position: original position of each row's first token.
        rope: the rotation that positions stand for.
    """

    q: Float[Array, "B S N H"]
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]
    position: Int[Array, " B"]
    rope: Rope = flax.struct.field(pytree_node=False)

    @property
    def positions(self) -> Int[Array, "B S"]:
        """Original position of every token."""
        return positions_from(self.position, self.q.shape[1])

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
        return TokenBlock(q, k, v, self.position, self.rope)


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
