"""Writing new tokens into slots, and freeing slots."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from kvjax.pallas_kernels import SlotUpdate, write_sharded_slots, write_slots

from . import host_memory
from .sharded import local_slot
from .state import LayerCache, compact_indices, move_forward
from .tokens import Token, TokenBlock


def insert(
    cache: LayerCache,
    token: Token,
    extra: Sequence[tuple[Shaped[Array, "B K C ..."], Any]] = (),
    *,
    rotated: bool = True,
) -> tuple[LayerCache, list[Array]]:
    """Put one new token into each head's next slot, with weight 1, in rows that have one (`Token.live`).

    Args:
        cache: the cache.
        token: the new token.
        extra: other per-slot arrays of a policy, each with its value for the token, as for `write_slots`.
        rotated: whether keys are stored rotated.

    Returns:
        The cache, and the other arrays.

    Example:
        >>> cache, _ = kvjax.cache.insert(kvjax.cache.from_prompt(spec, 8, prompt), token)
        >>> cache.pos[0, 0].tolist(), cache.next[0, 0].item()
        ([0, 1, 2, 3, 4, 5, 6, -1], 7)
    """
    key = token.key if rotated else token.k
    if host_memory.on_host(cache.k):
        new = (cache.k, key), (cache.v, token.v)
        stored = [host_memory.write(store, cache.next, x) for store, x in new]
        stores, values = [], []
    else:
        stored, stores, values = [], [cache.k, cache.v], [key, token.v]
    if cache.slot_shards > 1:  # keys and values are sharded, all other arrays replicated
        stored, stores, values = write_slots(stores, local_slot(cache, cache.next), values, live=token.live), [], []
    arrays = [*stores, cache.pos, cache.weight, *(array for array, _ in extra)]
    values += [token.position[:, None], 1.0, *(value for _, value in extra)]
    written = write_slots(arrays, cache.next, values, [cache.next, cache.seen], live=token.live)
    *others, following, seen = written[len(stores) + 2 :]
    kept = LayerCache(*stored, *written[: len(stores) + 2], next=following, seen=seen, slot_shards=cache.slot_shards)
    return kept, others


def insert_split(caches: Sequence[LayerCache], heads: Sequence[tuple[int, ...]], token: Token) -> list[LayerCache]:
    """`insert` into several caches that divide a layer's KV heads, in one call. Keys are stored rotated.

    Args:
        caches: one cache per group of heads.
        heads: KV heads of each cache.
        token: of all heads.

    Example:
        >>> cache = kvjax.cache.from_prompt(spec, 8, prompt)  # all heads, here one, are in one cache
        >>> (cache,) = kvjax.cache.insert_split([cache], [(0,)], token)
        >>> cache.pos[0, 0].tolist()
        [0, 1, 2, 3, 4, 5, 6, -1]
    """
    if any(cache.slot_shards > 1 for cache in caches):
        return [insert(cache, token.heads(np.asarray(own)))[0] for cache, own in zip(caches, heads, strict=True)]
    values = [token.key, token.v, token.position[:, None], 1.0]
    written = write_sharded_slots(
        [
            SlotUpdate(
                [cache.k, cache.v, cache.pos, cache.weight],
                cache.next,
                values,
                [cache.next, cache.seen],
                mine,
                token.live,
            )
            for cache, mine in zip(caches, heads, strict=True)
        ]
    )
    return [LayerCache(*arrays) for arrays in written]


def evict(cache: LayerCache, slot: Int[Array, "B K"], when: Bool[Array, "B K"]) -> LayerCache:
    """Free `slot` in the heads where `when` is True. The next token will take its place.

    Example:
        >>> cache = kvjax.cache.from_prompt(spec, 8, prompt)
        >>> cache = kvjax.cache.evict(cache, jnp.asarray([[2]]), jnp.asarray([[True]]))
        >>> cache.pos[0, 0].tolist(), cache.next[0, 0].item()  # the next token goes to slot 2
        ([0, 1, -1, 3, 4, 5, -1, -1], 2)
    """
    target = jnp.where(when, slot, cache.pos.shape[-1])  # out of bounds where nothing is evicted: dropped
    pos, weight = write_slots([cache.pos, cache.weight], target, [-1, 0.0])
    return dataclasses.replace(cache, pos=pos, weight=weight, next=jnp.where(when, slot, cache.next))


def keep_slots(
    cache: LayerCache, keep: Bool[Array, "B K C"], extra: Sequence[Shaped[Array, "B K C"]] = ()
) -> tuple[LayerCache, list[Array]]:
    """Keep some slots, which move to the first places in their order. All other slots are freed.

    Args:
        cache: the cache.
        keep: which slots stay. Free slots are never kept.
        extra: other per-slot arrays of a policy, which move with the slots.

    Returns:
        The cache, and the other arrays, with zeros in free slots.

    Raises:
        ValueError: `keep` or an array of `extra` does not have a value for each slot.

    Example:
        >>> cache = kvjax.cache.from_prompt(spec, 8, prompt)
        >>> cache, _ = kvjax.cache.keep_slots(cache, cache.pos >= 3)
        >>> cache.pos[0, 0, :4].tolist(), cache.next[0, 0].item()
        ([3, 4, 5, -1], 3)
    """
    for name, x in ("keep", keep), *(("an array of `extra`", each) for each in extra):
        if x.shape != cache.pos.shape:
            raise ValueError(
                f"{name} has shape {x.shape}, but the cache's slots are {cache.pos.shape}. Give [B, K, C]: a value for each slot."
            )
    index, live = compact_indices(keep & cache.live, cache.pos.shape[-1])

    def moved(x: Shaped[Array, "B K C"], free: Any = 0) -> Array:
        return jnp.where(live, jnp.take_along_axis(x, index, axis=2), jnp.asarray(free, x.dtype))

    k, v = move_forward((cache.k, cache.v), index, live)
    kept = dataclasses.replace(
        cache,
        k=k,
        v=v,
        pos=moved(cache.pos, -1),
        weight=moved(cache.weight),
        next=jnp.sum(live, axis=-1, dtype=jnp.int32),
    )
    return kept, [moved(x) for x in extra]


def seek_free(cache: LayerCache) -> LayerCache:
    """Direct the next token of each head to the first free slot, or nowhere in heads that have none.

    Example:
        >>> cache = kvjax.cache.from_prompt(spec, 8, prompt)
        >>> cache = kvjax.cache.evict(cache, jnp.asarray([[2]]), jnp.asarray([[True]]))
        >>> cache, _ = kvjax.cache.insert(cache, token)  # in slot 2
        >>> kvjax.cache.seek_free(cache).next.tolist()
        [[6]]
    """
    free = jnp.argmin(cache.live, axis=-1).astype(jnp.int32)
    full = jnp.all(cache.live, axis=-1)
    return dataclasses.replace(cache, next=jnp.where(full, cache.pos.shape[-1], free))


def insert_block(cache: LayerCache, block: TokenBlock) -> LayerCache:
    """Put a block's tokens into each head's next slots, which are free, with weight 1 and rotated keys.

    Example:
        >>> cache = kvjax.cache.insert_block(kvjax.cache.from_prompt(spec, 8, prompt), block)
        >>> cache.pos[0, 0].tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    rows, heads = (jnp.arange(n, dtype=jnp.int32) for n in cache.next.shape)
    place = jnp.arange(block.size, dtype=jnp.int32)
    slot = jnp.where(block.mask[:, None], cache.next[..., None] + place, cache.pos.shape[-1])  # out of bounds: dropped
    own = slot if cache.slot_shards == 1 else local_slot(cache, slot)

    def written(array: Array, values: Any, slot: Array = slot) -> Array:
        return array.at[rows[:, None, None], heads[:, None], slot].set(values, mode="drop")

    return dataclasses.replace(
        cache,
        k=written(cache.k, jnp.swapaxes(block.k_rotated, 1, 2).astype(cache.k.dtype), own),
        v=written(cache.v, jnp.swapaxes(block.v, 1, 2).astype(cache.v.dtype), own),
        pos=written(cache.pos, block.positions[:, None]),
        weight=written(cache.weight, 1.0),
        next=cache.next + block.count[:, None],
        seen=cache.seen + block.count,
    )
