"""Attention of new tokens to cached ones."""

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
from kvjax.pallas_kernels.sinks import with_sinks

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
    """Attention of one query per row to the live slots, inside the layer's sliding window if it has one.

    Attention sinks of the token are part of the softmax, here and in the other functions.

    Args:
        spec: the layer's static shapes and model facts.
        cache: the cache.
        token: the token with the query.
        ranks: for a cache with unrotated keys: position of each slot's key and of each head's query, in [0, C).
        probs: whether to return the probability of each slot.

    Returns:
        The attention output, and with `probs` the probability of each slot, averaged over its query group.
        Probabilities have no gradient, because they serve to choose tokens.

    Example:
        >>> cache, _ = kvjax.cache.insert(kvjax.cache.from_prompt(spec, 8, prompt), token)
        >>> out, probs = kvjax.cache.attend(spec, cache, token, probs=True)
        >>> out.shape, round(probs.sum().item(), 3), probs[0, 0, 7].item()  # free slots get nothing
        ((1, 2, 4), 1.0, 0.0)
    """
    rope, weight, keys = spec.rope, _seen(spec, cache, token.position), cache.k
    if cache.slot_shards > 1:
        assert ranks is None, "a sharded cache stores rotated keys"
        assert not probs, "a sharded cache returns no probabilities"
        part = decode_attention(token.query, keys, cache.v, local_part(weight, cache.slot_shards), scale=spec.scale)
        return merged(part.out, part.logsumexp, cache.slot_shards, token.sinks), None
    query, rotation = token.query if ranks is None else token.q, None
    if ranks is not None and rope.rotates_halves_of(spec.head_dim):
        rotation = Rotation(*ranks, jnp.asarray(rope.inv_freq, jnp.float32), rope.amplitude)
    elif ranks is not None:
        query = rope.rotate(token.q, jnp.repeat(ranks[1], spec.num_heads // spec.num_kv_heads, axis=1))
        keys = rope.rotate_by_table(keys, ranks[0], keys.shape[2])
    options: Any = {"scale": spec.scale, "rotation": rotation, "probs": probs, "sinks": token.sinks}
    attended = decode_attention(query, keys, cache.v, weight, **options)
    return attended.out, jax.lax.stop_gradient(attended.probs)


def attend_split(
    spec: LayerSpec, caches: Sequence[LayerCache], heads: Sequence[tuple[int, ...]], token: Token
) -> Float[Array, "B N H"]:
    """`attend` to several caches that divide a layer's KV heads, in one call.

    Args:
        spec: of the whole layer.
        caches: one cache per group of heads.
        heads: KV heads of each cache.
        token: of all heads.

    Example:
        >>> cache, _ = kvjax.cache.insert(kvjax.cache.from_prompt(spec, 8, prompt), token)
        >>> one, _ = kvjax.cache.attend(spec, cache, token)
        >>> bool(jnp.allclose(kvjax.cache.attend_split(spec, [cache], [(0,)], token), one))
        True
    """
    if token.sinks is not None or any(cache.slot_shards > 1 for cache in caches):
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
    """Attention of one query per row to slots that each head has selected.

    Token p is in slot p of the cache, with its key rotated.

    Args:
        spec: the layer's static shapes and model facts.
        cache: the cache.
        token: the token with the query.
        index, live, page: pages of slots, and which of them are valid, see `gather_attention`.

    Example:
        >>> cache, _ = kvjax.cache.insert(kvjax.cache.from_prompt(spec, 8, prompt), token)
        >>> index = jnp.asarray([[[0, 6]]])  # rows, KV heads, selected slots
        >>> kvjax.cache.attend_selected(spec, cache, token, index, index >= 0).shape
        (1, 2, 4)
    """
    k, v, query = cache.k, cache.v, token.query
    if cache.slot_shards == 1:
        part = gather_attention(query, k, v, index, live, scale=spec.scale, page=page, tokens=cache.seen)
        return with_sinks(part.out, part.logsumexp, token.sinks)
    index, live, page = local_pages(cache, index, live, page)
    part = gather_attention(query, k, v, index, live, scale=spec.scale, page=page)
    return merged(part.out, part.logsumexp, cache.slot_shards, token.sinks)


def attend_packed(spec: LayerSpec, cache: PackedCache, token: Token, *, bits: Bits) -> Float[Array, "B N H"]:
    """`attend` to a quantised cache, without unpacking it first.

    Example:
        >>> layer = kvjax.KIVI(bits=8, group=2, residual=2).layer(spec)
        >>> state, _ = layer.prefill(prompt, {})
        >>> state = layer.append(state, token)
        >>> kvjax.cache.attend_packed(spec, state, token, bits=8).shape
        (1, 2, 4)
    """
    visible = cache.live
    if spec.window is not None:
        visible &= cache.pos > token.position[:, None, None] - spec.window
    slots = PackedSlots(cache.k, cache.v, cache.k_recent, cache.v_recent, cache.k_packed, cache.next)
    options: Any = {"bits": bits, "scale": spec.scale}
    if cache.slot_shards == 1 and token.sinks is None:
        return packed_decode_attention(token.q_rotated, slots, visible, **options)
    packed, latest, late = packed_and_latest(slots, visible)
    if cache.slot_shards > 1:
        packed, latest = local_part(packed, cache.slot_shards), local_slot(cache, latest)
    found = partial_packed_attention(token.q_rotated, slots, packed, latest, late, **options)
    if cache.slot_shards == 1:
        return with_sinks(*found, token.sinks)
    return merged(*found, cache.slot_shards, token.sinks)


def _seen(spec: LayerSpec, cache: LayerCache, q_pos: Int[Array, " B"]) -> Float[Array, "B K C"]:
    """Weights of the slots inside the layer's sliding window, 0 outside."""
    if spec.window is None:
        return cache.weight
    return jnp.where(cache.pos > q_pos[:, None, None] - spec.window, cache.weight, 0.0)


def attend_block(spec: LayerSpec, held: LayerCache, block: TokenBlock) -> Float[Array, "B S N H"]:
    """Attention of a block's tokens, each to the live slots up to its position. The block's tokens are in the cache.

    Example:
        >>> cache = kvjax.cache.insert_block(kvjax.cache.from_prompt(spec, 8, prompt), block)
        >>> kvjax.cache.attend_block(spec, cache, block).shape  # rows, tokens, query heads, channels
        (1, 2, 2, 4)
    """
    q_pos = jnp.where(block.mask, block.positions, -1)
    pos = jnp.where(held.live, held.pos, -1)
    begun = held.next - block.count[:, None]
    options = {"scale": spec.scale, "window": spec.window, "run": Run(jnp.zeros_like(begun), begun)}
    if held.slot_shards > 1:
        places, weight = local_part(pos, held.slot_shards, -1), local_part(held.weight, held.slot_shards)
        slots = block.q_rotated, held.k, held.v, q_pos, places, weight
        out, logsumexp = partial_block_attention(*slots, **options, stripes=stripes(held.slot_shards))
        return merged(out, logsumexp, held.slot_shards, block.sinks)
    return block_attention(block.q_rotated, held.k, held.v, q_pos, pos, held.weight, **options, sinks=block.sinks)


def attend_prompt(spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B S N H"]:
    """Attention of a prompt's queries, each to the tokens up to its position.

    Example:
        >>> out = kvjax.cache.attend_prompt(spec, prompt)
        >>> bool(jnp.allclose(out[:, 0], prompt.v[:, 0]))  # the first token attends to itself alone
        True
    """
    pos = jnp.broadcast_to(prompt.pos, (*prompt.pos.shape[:1], spec.num_kv_heads, prompt.size))
    k, v = (jnp.swapaxes(x, 1, 2) for x in (prompt.k_rotated, prompt.v))
    q_pos = prompt.pos[:, 0, prompt.before :]  # equal in all heads
    own = jnp.full(pos.shape[:2], prompt.before, jnp.int32)
    run = Run(own - jnp.sum(pos[:, :, : prompt.before] >= 0, axis=-1, dtype=jnp.int32), own)
    options: Any = {"scale": spec.scale, "window": spec.window, "run": run, "sinks": prompt.sinks}
    return block_attention(prompt.q_rotated, k, v, q_pos, pos, **options)
