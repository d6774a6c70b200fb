"""Attention of new tokens over what a cache keeps."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.pallas_kernels import (
    CacheShard,
    PackedSlots,
    Rotation,
    Run,
    block_attention,
    decode_attention,
    gather_attention,
    packed_and_latest,
    packed_decode_attention,
    partial_block_attention,
    partial_packed_attention,
    sharded_decode_attention,
)
from kvjax.pallas_kernels.head_shards import query_heads

from .packing import Bits, PackedCache
from .sharded import local_pages, local_part, local_slot, merged, stripes
from .spec import LayerSpec
from .state import LayerCache
from .tokens import PromptKV, Token, TokenBlock


def attend(
    spec: LayerSpec,
    cache: LayerCache,
    token: Token,
    *,
    ranks: tuple[Int[Array, "B K C"], Int[Array, "B K"]] | None = None,
    probs: bool = False,
) -> tuple[Float[Array, "B N H"], Float[Array, "B K C"] | None]:
    """Attention of one query per row over the live slots, inside the layer's sliding window if it has one.

    Args:
        token: whose query it is.
        ranks: where each slot's key stands now, and each head's query, at least 0 and below C, where the cache keeps keys
            unrotated.
        probs: whether each slot's probability is wanted.

    Returns:
        The attended values, and each slot's probability averaged over its query group, if it was asked for: without a gradient, since
        it tells what is kept, and that has none.
    """
    rope, weight, keys = spec.rope, _seen(spec, cache, token.position), cache.k
    if cache.slot_shards > 1:
        assert ranks is None, "keys of a cache that is sharded are rotated"
        assert not probs, "devices that share a head's slots do not tell each other probabilities"
        part = decode_attention(token.query, keys, cache.v, local_part(weight, cache.slot_shards), scale=spec.scale)
        return merged(part.out, part.logsumexp, cache.slot_shards), None
    query, rotation = token.query if ranks is None else token.q, None
    if ranks is not None and rope.rotates_halves_of(spec.head_dim):
        rotation = Rotation(*ranks, jnp.asarray(rope.inv_freq, jnp.float32), rope.amplitude)
    elif ranks is not None:
        query = rope.rotate(token.q, jnp.repeat(ranks[1], spec.num_heads // spec.num_kv_heads, axis=1))
        keys = rope.rotate_by_table(keys, ranks[0], keys.shape[2])
    attended = decode_attention(query, keys, cache.v, weight, scale=spec.scale, rotation=rotation, probs=probs)
    return attended.out, jax.lax.stop_gradient(attended.probs)


def attend_split(
    spec: LayerSpec, caches: Sequence[LayerCache], heads: Sequence[tuple[int, ...]], token: Token
) -> Float[Array, "B N H"]:
    """`attend` over caches among which a layer's KV heads are divided, at once.

    Args:
        spec: of the whole layer.
        heads: for each cache, which of the KV heads it has.
        token: of all heads.
    """
    if any(cache.slot_shards > 1 for cache in caches):
        group = spec.num_heads // spec.num_kv_heads
        order = np.argsort(np.concatenate([query_heads(mine, group) for mine in heads]))
        outs = [
            attend(spec, cache, token.heads(np.asarray(mine)))[0] for cache, mine in zip(caches, heads, strict=True)
        ]
        return jnp.concatenate(outs, axis=1)[:, order]
    shards = [
        CacheShard(cache.k, cache.v, _seen(spec, cache, token.position), mine)
        for cache, mine in zip(caches, heads, strict=True)
    ]
    return sharded_decode_attention(token.query, shards, scale=spec.scale)


def attend_selected(
    spec: LayerSpec,
    cache: LayerCache,
    token: Token,
    index: Int[Array, "B R P"],
    live: Bool[Array, "B R L"],
    page: int = 1,
) -> Float[Array, "B N H"]:
    """Attention of one query per row over slots that each head has selected, of a cache where token p is in slot p with its key rotated.

    Args:
        index, live, page: pages of slots, and which of them are meant, see `gather_attention`.
    """
    k, v, query = cache.k, cache.v, token.query
    if cache.slot_shards == 1:
        return gather_attention(query, k, v, index, live, scale=spec.scale, page=page, tokens=cache.seen).out
    index, live, page = local_pages(cache, index, live, page)
    part = gather_attention(query, k, v, index, live, scale=spec.scale, page=page)
    return merged(part.out, part.logsumexp, cache.slot_shards)


def attend_packed(spec: LayerSpec, cache: PackedCache, token: Token, *, bits: Bits) -> Float[Array, "B N H"]:
    """`attend` over a cache in a few bits, which is not unpacked first."""
    visible = cache.live
    if spec.window is not None:
        visible &= cache.pos > token.position[:, None, None] - spec.window
    slots = PackedSlots(cache.k, cache.v, cache.k_recent, cache.v_recent, cache.k_packed, cache.next)
    options: Any = {"bits": bits, "scale": spec.scale}
    if cache.slot_shards == 1:
        return packed_decode_attention(token.q_rotated, slots, visible, **options)
    packed, latest, late = packed_and_latest(slots, visible)
    packed, latest = local_part(packed, cache.slot_shards), local_slot(cache, latest)
    found = partial_packed_attention(token.q_rotated, slots, packed, latest, late, **options)
    return merged(*found, cache.slot_shards)


def _seen(spec: LayerSpec, cache: LayerCache, q_pos: Int[Array, " B"]) -> Float[Array, "B K C"]:
    """Weights of the slots inside the layer's sliding window."""
    if spec.window is None:
        return cache.weight
    return jnp.where(cache.pos > q_pos[:, None, None] - spec.window, cache.weight, 0.0)


def attend_block(spec: LayerSpec, held: LayerCache, block: TokenBlock) -> Float[Array, "B S N H"]:
    """Attention of a block's tokens, each over the live slots of tokens up to its own position; theirs are among the slots."""
    q_pos = jnp.where(block.mask, block.positions, -1)
    pos = jnp.where(held.live, held.pos, -1)
    begun = held.next - block.count[:, None]
    options = {"scale": spec.scale, "window": spec.window, "run": Run(jnp.zeros_like(begun), begun)}
    if held.slot_shards > 1:
        places, weight = local_part(pos, held.slot_shards, -1), local_part(held.weight, held.slot_shards)
        slots = block.q_rotated, held.k, held.v, q_pos, places, weight
        out, logsumexp = partial_block_attention(*slots, **options, stripes=stripes(held.slot_shards))
        return merged(out, logsumexp, held.slot_shards)
    return block_attention(block.q_rotated, held.k, held.v, q_pos, pos, held.weight, **options)


def attend_prompt(spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B S N H"]:
    """Attention of a prompt's queries, each over the tokens up to its own position."""
    pos = jnp.broadcast_to(prompt.pos, (*prompt.pos.shape[:1], spec.num_kv_heads, prompt.size))
    k, v = (jnp.swapaxes(x, 1, 2) for x in (prompt.k_rotated, prompt.v))
    q_pos = prompt.pos[:, 0, prompt.before :]  # the same in all heads
    own = jnp.full(pos.shape[:2], prompt.before, jnp.int32)
    run = Run(own - jnp.sum(pos[:, :, : prompt.before] >= 0, axis=-1, dtype=jnp.int32), own)
    return block_attention(prompt.q_rotated, k, v, q_pos, pos, scale=spec.scale, window=spec.window, run=run)
