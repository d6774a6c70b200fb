"""What one of the caches has among which a layer's KV heads are divided."""

from typing import NamedTuple

from jaxtyping import Array, Float


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
