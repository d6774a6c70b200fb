"""What decode attention takes besides queries and cache, and what it gives."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..rotary import rotate_halves
from .packed import Packed


class Rotation(NamedTuple):
    """Rotary embedding by places that may change from step to step, applied to queries and cached keys while they are read.

    Channel i of the first half of a head pairs with channel i of the second half, as in Llama.

    Attributes:
        place: by how many positions each slot's key is rotated, at least 0 and below C.
        query: by how many the queries of each KV head are, likewise.
        inv_freq: angle per position of each channel pair, in radians.
        amplitude: factor on cosine and sine.
    """

    place: Int[Array, "B K C"]
    query: Int[Array, "B K"]
    inv_freq: Float[Array, " R"]
    amplitude: float = 1.0

    def tables(self) -> tuple[Float[Array, "C R"], Float[Array, "C R"]]:
        """Cosine and sine of every pair's angle at each place, in float32: C sines instead of one for every row and head."""
        angle = jnp.arange(self.place.shape[-1], dtype=jnp.float32)[:, None] * self.inv_freq
        return jnp.cos(angle) * self.amplitude, jnp.sin(angle) * self.amplitude

    def queries(self, q: Float[Array, "B N H"]) -> Float[Array, "B N H"]:
        """`q`, rotated."""
        place = jnp.repeat(self.query, q.shape[1] // self.query.shape[1], axis=1)
        cos, sin = (jnp.take(table, place, axis=0, mode="clip") for table in self.tables())
        return rotate_halves(q, cos, sin)


class Attended(NamedTuple):
    """Attention of one query per row over a cache.

    Attributes:
        out: attended values, in the dtype of the queries; zeros where nothing is live.
        logsumexp: of each query head's logits, in float32; -inf where nothing is live. Attention over two caches is their
            results weighted by its exponential.
        probs: each slot's probability, averaged over the query heads of its group, in float32; None unless asked for.
    """

    out: Float[Array, "B N H"]
    logsumexp: Float[Array, "B N"]
    probs: Float[Array, "B K C"] | None


class CacheShard(NamedTuple):
    """What one of the caches holds.

    Attributes:
        k, v: rotated keys, and values.
        weight: multiplicity of each slot, 0 where free.
        heads: which of the layer's KV heads they are of.
    """

    k: Float[Array, "B K C H"]
    v: Float[Array, "B K C H"]
    weight: Float[Array, "B K C"]
    heads: tuple[int, ...]


class PackedSlots(NamedTuple):
    """Keys and values in a few bits, but for the latest, which are exact. Slots are filled from the left.

    The exact key of slot s is at place s mod R, and its exact value at s mod E.

    Attributes:
        k: rotated keys, in groups along slots; those of the first `k_packed` slots count.
        v: values, in groups along channels; those but for the latest E count.
        k_recent: exact keys of the slots from `k_packed` on, at most R.
        v_recent: exact values of the latest E slots, of no fewer than have exact keys.
        k_packed: slots whose keys are packed.
        next: slots that are filled.
    """

    k: Packed
    v: Packed
    k_recent: Float[Array, "B K R H"]
    v_recent: Float[Array, "B K E H"]
    k_packed: Int[Array, "B K"]
    next: Int[Array, "B K"]
