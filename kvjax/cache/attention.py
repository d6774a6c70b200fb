"""Attention of new tokens over what a cache keeps."""

from collections.abc import Sequence

import einops
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.pallas_kernels import CacheShard, Rotation, decode_attention, sharded_decode_attention

from .spec import LayerSpec
from .state import LayerCache
from .tokens import Token, TokenBlock

BLOCK = 1024
"""Slots that `attend_block` takes at a time."""


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
    shards = [
        CacheShard(cache.k, cache.v, _seen(spec, cache, token.position), mine)
        for cache, mine in zip(caches, heads, strict=True)
    ]
    return sharded_decode_attention(token.query, shards, scale=spec.scale)


def _seen(spec: LayerSpec, cache: LayerCache, q_pos: Int[Array, " B"]) -> Float[Array, "B K C"]:
    """Weights of the slots inside the layer's sliding window."""
    if spec.window is None:
        return cache.weight
    return jnp.where(cache.pos > q_pos[:, None, None] - spec.window, cache.weight, 0.0)


def attend_block(spec: LayerSpec, cache: LayerCache, tokens: TokenBlock) -> Float[Array, "B S N H"]:
    """Attention of S tokens per row, each over the live slots of tokens up to its own position.

    `BLOCK` slots are taken at a time, as in flash attention (Dao et al. 2022), so that only the logits of one block are in memory.
    """
    q, q_pos = tokens.q_rotated, tokens.positions
    size = cache.pos.shape[-1]
    block = min(BLOCK, size)
    grouped = einops.rearrange(q, "b s (k g) h -> b k g s h", k=spec.num_kv_heads)
    window = jnp.iinfo(jnp.int32).max if spec.window is None else spec.window

    def step(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, out = sums
        at = jnp.minimum(i * block, size - block)  # the last block overlaps the one before
        k, v, pos, weight = (
            jax.lax.dynamic_slice_in_dim(x, at, block, axis=2) for x in (cache.k, cache.v, cache.pos, cache.weight)
        )
        fresh = at + jnp.arange(block, dtype=jnp.int32) >= i * block
        seen = (weight > 0) & fresh
        before = q_pos[:, None, :, None] - pos[:, :, None]
        seen = (seen[:, :, None] & (before >= 0) & (before < window))[:, :, None]
        logits = jnp.einsum("bkgsh,bkch->bkgsc", grouped, k, preferred_element_type=jnp.float32) * spec.scale
        logits = jnp.where(seen, logits + jnp.log(jnp.maximum(weight, 1.0))[:, :, None, None], -jnp.inf)
        higher = jnp.maximum(highest, jnp.max(logits, axis=-1))
        kept = jnp.where(jnp.isfinite(highest), jnp.exp(highest - higher), 0.0)
        share = jnp.where(seen, jnp.exp(logits - jnp.where(jnp.isfinite(higher), higher, 0.0)[..., None]), 0.0)
        v = jnp.where((weight > 0)[..., None], v, jnp.zeros((), v.dtype))
        added = jnp.einsum("bkgsc,bkch->bkgsh", share.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return higher, total * kept + jnp.sum(share, axis=-1), out * kept[..., None] + added

    shape = grouped.shape[:-1]
    start = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(grouped.shape, jnp.float32)
    _, total, out = jax.lax.fori_loop(0, -(-size // block), step, start)
    return einops.rearrange(out / total[..., None], "b k g s h -> b s (k g) h").astype(q.dtype)
