"""The same in plain XLA: a product for each chunk, then what stays gathered from all of them."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


def merge_clusters(
    kv: Float[Array, "B K S W"],
    pos: Int[Array, "B K S"],
    weight: Float[Array, "B K S"],
    target: Int[Array, "B K N A"],
    count: Int[Array, " B"],
) -> tuple[Float[Array, "B K S W"], Int[Array, "B K S"], Float[Array, "B K S"]]:
    """Tokens merged and gaps closed; see the public function. Where nothing is left, kv and weight are 0 and pos is -1."""
    batch, heads, places, width = kv.shape
    shape = (*target.shape[:3], places // target.shape[2])
    live = jnp.broadcast_to(jnp.arange(places, dtype=jnp.int32) < count[:, None, None], pos.shape)
    kv = jnp.where(live[..., None], kv, jnp.zeros((), kv.dtype)).reshape(*shape, width)
    weight = jnp.where(live, weight, 0.0).reshape(shape)
    pos = jnp.where(live, pos, -1).reshape(shape)
    joined = target[..., None] == jnp.arange(shape[-1] // 2, dtype=jnp.int32)  # [B, K, N, A, odd places]

    share = jnp.where(joined, weight[..., 0::2, None], 0.0)
    odd, odd_kv = weight[..., 1::2], kv[..., 1::2, :]
    degree = odd + jnp.sum(share, axis=-2)
    total = odd[..., None] * odd_kv + jnp.einsum("...ab,...ah->...bh", share, kv[..., 0::2, :], precision="highest")
    grown = degree > odd
    centroid = jnp.where(grown[..., None], total / jnp.maximum(degree, 1.0)[..., None], odd_kv)
    newest = jnp.maximum(pos[..., 1::2], jnp.max(jnp.where(joined, pos[..., 0::2, None], -1), axis=-2))

    stays = jnp.stack([target < 0, jnp.ones_like(target, bool)], axis=-1).reshape(*shape[:3], -1)[..., : shape[-1]]
    index, filled = _first(stays.reshape(live.shape) & live)
    source = jnp.asarray(_halves(places, shape[-1]))[index]

    def gather(even: Array, odd: Array, free: int) -> Array:
        """What stays, in order, from the even places of all chunks and the odd ones."""
        halves = jnp.concatenate([x.reshape(batch, heads, -1, *x.shape[4:]) for x in (even, odd)], axis=2)
        wide = (...,) + (None,) * (halves.ndim - 3)
        return jnp.where(
            filled[wide], jnp.take_along_axis(halves, source[wide], axis=2), jnp.asarray(free, halves.dtype)
        )

    return (
        gather(kv[..., 0::2, :], centroid, 0),
        gather(pos[..., 0::2], newest, -1),
        gather(weight[..., 0::2], degree, 0),
    )


def _first(stays: Bool[Array, "B K S"]) -> tuple[Int[Array, "B K S"], Bool[Array, "B K S"]]:
    """Places of what stays, ascending, and which of them there are (the others are 0)."""
    batch, heads, places = stays.shape
    rank = jnp.where(stays, jnp.cumsum(stays, axis=-1, dtype=jnp.int32) - 1, places)  # beyond the end: dropped
    rows, columns = np.ogrid[:batch, :heads]
    place = jnp.broadcast_to(jnp.arange(places, dtype=jnp.int32), stays.shape)
    index = jnp.zeros_like(place).at[rows[..., None], columns[..., None], rank].set(place, mode="drop")
    return index, jnp.arange(places, dtype=jnp.int32) < jnp.sum(stays, axis=-1, dtype=jnp.int32)[..., None]


def _halves(places: int, chunk: int) -> Int[np.ndarray, " S"]:
    """Where each place is when the even places of all chunks are written first, and then the odd ones."""
    place = np.arange(places, dtype=np.int32)
    at, half = place % chunk, -(-chunk // 2)
    even = place // chunk * half + at // 2
    odd = places // chunk * half + place // chunk * (chunk // 2) + at // 2
    return np.where(at % 2 == 0, even, odd)
