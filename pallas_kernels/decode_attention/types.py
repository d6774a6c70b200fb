"""Argument and result types of decode attention."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..rotary import rotate_halves
from .packed import Packed


class Rotation(NamedTuple):
    """Rotary embedding applied to queries and cached keys as they are read, by positions that can change at every step.

    Channel i of the first half of a head pairs with channel i of the second half, as in Llama.

    Attributes:
        place: position by which each slot's key is rotated, at least 0 and below C.
        query: position by which the queries of each KV head are rotated, in the same range.
        inv_freq: angle per position of each channel pair, in radians.
        amplitude: factor on cosine and sine.

    Example:
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, heads, 6, 4)) for i, heads in enumerate((2, 1, 1)))
        >>> place, query = jnp.arange(6)[None, None], jnp.asarray([[5]])
        >>> rotation = kvjax.pallas_kernels.Rotation(place, query, jnp.asarray([1.0, 0.1]))
        >>> weight = jnp.ones((1, 1, 6))
        >>> found = kvjax.pallas_kernels.decode_attention(q[:, :, 0], k, v, weight, scale=0.5, rotation=rotation)
        >>> found.out.shape
        (1, 2, 4)
    """

    place: Int[Array, "B K C"]
    query: Int[Array, "B K"]
    inv_freq: Float[Array, " R"]
    amplitude: float = 1.0

    def tables(self) -> tuple[Float[Array, "C R"], Float[Array, "C R"]]:
        """Return cosine and sine of each pair's angle at every position, in float32.

        The tables need C sines per pair, instead of one per sequence, head and slot.
        """
        angle = jnp.arange(self.place.shape[-1], dtype=jnp.float32)[:, None] * self.inv_freq
        return jnp.cos(angle) * self.amplitude, jnp.sin(angle) * self.amplitude

    def queries(self, q: Float[Array, "B N H"]) -> Float[Array, "B N H"]:
        """Return `q`, rotated."""
        place = jnp.repeat(self.query, q.shape[1] // self.query.shape[1], axis=1)
        cos, sin = (jnp.take(table, place, axis=0, mode="clip") for table in self.tables())
        return rotate_halves(q, cos, sin)


class Factors(NamedTuple):
    """Factors by which keys and values in 8-bit floats are multiplied, in float32.

    The largest code of a value should be near 448, as `Float8Codes` makes it. A zero vector has factor 0. With 16-bit queries,
    the GPU kernel rounds a slot's weight to zero if probability times factor is below about 2^-24 of the largest.

    Attributes:
        k: factor of each slot's key.
        v: factor of each slot's value.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (1, 1, 6, 4))
        >>> codes, ones = (x * 100).astype("float8_e4m3fn"), jnp.ones((1, 1, 6))
        >>> factors = kvjax.pallas_kernels.Factors(k=ones / 100, v=ones / 100)
        >>> found = kvjax.pallas_kernels.decode_attention(x[:, :, 0], codes, codes, ones, scale=0.5, factors=factors)
        >>> exact = kvjax.pallas_kernels.decode_attention(x[:, :, 0], x, x, ones, scale=0.5)
        >>> bool(abs(found.out - exact.out).max() < 0.1)
        True
    """

    k: Float[Array, "B K C"]
    v: Float[Array, "B K C"]


class Attended(NamedTuple):
    """Result of the attention of one query per sequence over a cache.

    Attributes:
        out: attended values, in the dtype of the queries; zeros for heads without live slots.
        logsumexp: log-sum-exp of each query head's logits, in float32; -inf without live slots. To combine attention
            over two caches, weight their outputs by exp(logsumexp) and normalise.
        probs: each slot's probability, averaged over the query heads of its group, in float32; None unless requested.

    Example:
        >>> one, none = jnp.ones((1, 1, 6, 4)), jnp.zeros((1, 1, 6))
        >>> found = kvjax.pallas_kernels.decode_attention(one[:, :, 0], one, one, none, scale=0.5)  # no slot is live
        >>> found.out[0, 0].tolist(), found.logsumexp.item(), found.probs
        ([0.0, 0.0, 0.0, 0.0], -inf, None)
    """

    out: Float[Array, "B N H"]
    logsumexp: Float[Array, "B N"]
    probs: Float[Array, "B K C"] | None


class CacheShard(NamedTuple):
    """One of several caches among which a layer's KV heads are divided.

    Attributes:
        k, v: rotated keys, and values.
        weight: number of tokens that each slot represents, 0 for free slots.
        heads: indices of this cache's KV heads in the layer.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (1, 1, 6, 4))
        >>> short = kvjax.pallas_kernels.CacheShard(x[:, :, :2], x[:, :, :2], jnp.ones((1, 1, 2)), heads=(0,))
        >>> long = kvjax.pallas_kernels.CacheShard(x, x, jnp.ones((1, 1, 6)), heads=(1,))
        >>> kvjax.pallas_kernels.sharded_decode_attention(jnp.ones((1, 4, 4)), [short, long], scale=0.5).shape
        (1, 4, 4)
    """

    k: Float[Array, "B K C H"]
    v: Float[Array, "B K C H"]
    weight: Float[Array, "B K C"]
    heads: tuple[int, ...]


class PackedSlots(NamedTuple):
    """Quantised keys and values, with the latest slots unquantised. Slots are filled in order.

    The unquantised key of slot s is at index s mod R, and its unquantised value at s mod E.

    Attributes:
        k: quantised rotated keys, in groups along slots. Valid for the first `k_packed` slots.
        v: quantised values, in groups along channels. Valid for all slots but the latest E.
        k_recent: unquantised keys of the slots from `k_packed` on, at most R.
        v_recent: unquantised values of the latest E slots, which include all slots with unquantised keys.
        k_packed: number of slots whose keys are quantised.
        next: number of filled slots.

    Example:
        >>> state, _ = kvjax.KIVI(bits=8, group=2, residual=2).layer(spec).prefill(prompt, {})  # 8-bit codes
        >>> recent = state.k_recent, state.v_recent
        >>> slots = kvjax.pallas_kernels.PackedSlots(state.k, state.v, *recent, state.k_packed, state.next)
        >>> slots.k_packed.tolist(), slots.next.tolist()  # keys of the first slots are codes
        ([[4]], [[6]])
    """

    k: Packed
    v: Packed
    k_recent: Float[Array, "B K R H"]
    v_recent: Float[Array, "B K E H"]
    k_packed: Int[Array, "B K"]
    next: Int[Array, "B K"]
