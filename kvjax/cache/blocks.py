"""Chunked prefill: the kept tokens of a text and a block of new tokens, as one prompt.

A method chooses from them by the rule with which it chooses from a prompt. A block with a whole text therefore gives
the published method. Memory is that of the kept tokens and one block, for texts of any length.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from .state import LayerCache, compact_indices, move_forward
from .tokens import PromptKV, TokenBlock

S = TypeVar("S")


def as_prompt_with_block(kept: LayerCache, block: TokenBlock, *, rotated: bool = True) -> PromptKV:
    """Return a prompt of the kept tokens, in order and directly before the block, and the block.

    Args:
        kept: cache with the kept tokens.
        block: new tokens.
        rotated: whether cached keys are rotated to their original positions. If not, tokens have their ranks as
            positions, and the block's tokens follow.

    Example:
        >>> cache = kvjax.cache.from_prompt(spec, 8, prompt)
        >>> kvjax.cache.as_prompt_with_block(cache, block).pos[0, 0].tolist()
        [-1, -1, 0, 1, 2, 3, 4, 5, 6, 7]
    """
    order = in_order(kept)
    pos = jnp.take_along_axis(jnp.where(kept.live, kept.pos, -1), order, axis=-1)
    live = pos >= 0

    def joined(x: Shaped[Array, "B K C H"], new: Shaped[Array, "B S K H"]) -> Shaped[Array, "B T K H"]:
        ordered = jnp.where(live[..., None], jnp.take_along_axis(x, order[..., None], axis=2), jnp.zeros((), x.dtype))
        return jnp.concatenate([jnp.swapaxes(ordered, 1, 2), new.astype(x.dtype)], axis=1)

    keys = joined(kept.k, block.k_rotated if rotated else block.k)
    q_rotated, k_rotated = block.q_rotated, keys
    if not rotated:
        count = jnp.sum(live, axis=-1, dtype=jnp.int32)
        places = (
            jnp.arange(pos.shape[-1] + block.size, dtype=jnp.int32) - pos.shape[-1]
        )  # 0 for the block's first token
        ranks = jnp.swapaxes(jnp.maximum(count[..., None] + places, 0), 1, 2)
        k_rotated = block.rope.rotate_by_table(keys, ranks, ranks.shape[1])
        group = block.q.shape[2] // keys.shape[2]
        own = jnp.repeat(ranks[:, pos.shape[-1] :], group, axis=2)
        q_rotated = block.rope.rotate_by_table(block.q, own, ranks.shape[1])
    new = jnp.where(block.mask, block.positions, -1)[:, None]
    return PromptKV(
        q=block.q,
        k=keys,
        v=joined(kept.v, block.v),
        q_rotated=q_rotated,
        k_rotated=k_rotated,
        pos=jnp.concatenate([pos, jnp.broadcast_to(new, (*pos.shape[:2], block.size))], axis=-1),
        lengths=block.count + pos.shape[-1],
        seen=kept.seen + block.count,
        total=block.total,
        sinks=block.sinks,
    )


def kept_as_prompt(kept: LayerCache, q: Float[Array, "B S N H"], total: Int[Array, " B"]) -> PromptKV:
    """Return a prompt of the kept tokens alone, right-aligned and in order, with rotated keys.

    Args:
        kept: cache whose tokens fill slots from the first one on, in order of position.
        q: rotated queries of the last S tokens seen, which are all kept. S is less than the number of slots. In rows
            with fewer tokens, the first queries are arbitrary.
        total: tokens that each row will reach.

    Example:
        >>> cache = kvjax.cache.from_prompt(spec, 32, prompt)
        >>> cache, _ = kvjax.cache.keep_slots(cache, cache.pos >= 2)
        >>> kvjax.cache.kept_as_prompt(cache, prompt.q[:, -2:], prompt.total).pos[0, 0, -6:].tolist()
        [-1, -1, 2, 3, 4, 5]
    """
    order = _up_against_the_end(kept)
    pos = jnp.take_along_axis(jnp.where(kept.live, kept.pos, -1), order, axis=-1)

    def ordered(x: Shaped[Array, "B K C H"]) -> Shaped[Array, "B C K H"]:
        x = jnp.take_along_axis(x, order[..., None], axis=2)
        return jnp.swapaxes(jnp.where(pos[..., None] >= 0, x, jnp.zeros((), x.dtype)), 1, 2)

    k, lengths = ordered(kept.k), jnp.full_like(kept.seen, pos.shape[-1])
    return PromptKV(q, k, ordered(kept.v), q, k, pos, lengths, kept.seen, total)


def keep_places(kept: LayerCache, capacity: int, keep: Bool[Array, "B K C"]) -> LayerCache:
    """Return the tokens of `kept_as_prompt` that are kept, in order, in the first `capacity` slots.

    Args:
        kept: cache whose tokens fill slots from the first one on, in order of position.
        capacity: slots of the result.
        keep: mask over the places of `kept_as_prompt`.

    Example:
        >>> cache = kvjax.cache.from_prompt(spec, 32, prompt)
        >>> places = kvjax.cache.kept_as_prompt(cache, prompt.q[:, -2:], prompt.total).pos
        >>> kvjax.cache.keep_places(cache, 32, places >= 3).pos[0, 0, :4].tolist()
        [3, 4, 5, -1]
    """
    order = _up_against_the_end(kept)
    index, live = compact_indices(keep & jnp.take_along_axis(kept.live, order, axis=-1), capacity)
    slot = jnp.take_along_axis(order, index, axis=-1)
    k, v = move_forward((kept.k, kept.v), slot, live)
    return LayerCache(
        k=k[:, :, :capacity],
        v=v[:, :, :capacity],
        pos=jnp.where(live, jnp.take_along_axis(kept.pos, slot, axis=-1), -1),
        weight=live.astype(jnp.float32),
        next=jnp.sum(live, axis=-1, dtype=jnp.int32),
        seen=kept.seen,
    )


def with_places(kept: LayerCache, values: Shaped[Array, "B K C"], block: TokenBlock) -> Shaped[Array, "B K T"]:
    """Move values of slots to the places of `as_prompt_with_block`. The block's places get 0.

    Example:
        >>> cache = kvjax.cache.from_prompt(spec, 8, prompt)
        >>> kvjax.cache.with_places(cache, cache.weight, block)[0, 0].tolist()  # as `as_prompt_with_block` orders them
        [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    """
    ordered = jnp.take_along_axis(values, in_order(kept), axis=-1)
    free = kept.pos.shape[-1] - kept.count
    live = jnp.arange(kept.pos.shape[-1], dtype=jnp.int32) >= free[..., None]
    return jnp.pad(jnp.where(live, ordered, jnp.zeros((), values.dtype)), ((0, 0), (0, 0), (0, block.size)))


def _up_against_the_end(kept: LayerCache) -> Int[Array, "B K C"]:
    """`in_order` for tokens that fill slots from the first one on in that order."""
    size = kept.pos.shape[-1]
    return (jnp.arange(size, dtype=jnp.int32) + kept.next[..., None]) % size


def in_order(kept: LayerCache) -> Int[Array, "B K C"]:
    """Slots in order of position, free ones first."""
    return jnp.argsort(jnp.where(kept.live, kept.pos, -1), axis=-1, stable=True).astype(jnp.int32)


def where_rows(rows: Bool[Array, " B"], new: S, old: S) -> S:
    """Return `new` in some rows, and `old` in the others. Arrays that are in both are returned as they are.

    Example:
        >>> new, old = jnp.asarray([1, 2]), jnp.asarray([10, 20])
        >>> kvjax.cache.where_rows(jnp.asarray([True, False]), new, old).tolist()
        [1, 20]
    """

    def chosen(new: Array, old: Array) -> Array:
        return new if new is old else jnp.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(chosen, new, old)
