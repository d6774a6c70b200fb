"""XLA reference of `gather_attention` and `fetch_slots`.

`Op` in `api.py` calls it if no kernel supports the case. The kernels must match it up to rounding. It gathers the
selected slots, then attends to them as to a small cache.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..decode_attention import Attended, decode_attention
from ..rotary import DeferredRope
from .pages import live_slots


def gather_attention(
    q: Float[Array, "B N H"] | DeferredRope,
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    index: Int[Array, "B R P"],
    live: Bool[Array, "B R L"],
    *,
    scale: float,
    page: int = 1,
    tokens: Int[Array, " B"] | None = None,
) -> Attended:
    """Softmax attention of each head over the slots that it selected; see the public function."""
    live = live_slots(index, live, page, tokens)
    batch, kv_heads, _, dim = k.shape

    def take(x: Array) -> Array:
        pages = x.reshape(batch, kv_heads, -1, page * dim)
        got = jnp.take_along_axis(pages, index.reshape(batch, kv_heads, -1)[..., None], axis=2)
        return got.reshape(*live.shape, dim)

    weight = live.astype(jnp.float32)
    return decode_attention(q, take(k), take(v), weight, scale=scale, implementation="xla")


def fetch_slots(stores: Sequence[Array], index: Array, missing: Array, got: Sequence[Array]) -> list[Array]:
    """Gather the missing slots from each store."""
    rows, heads, _ = np.ogrid[: index.shape[0], : index.shape[1], :1]
    heads = heads // (index.shape[1] // stores[0].shape[1])
    return [
        jnp.where(missing[..., None], store[rows, heads, index], old) for store, old in zip(stores, got, strict=True)
    ]
