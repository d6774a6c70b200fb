"""The same, over one cache after the other; each by whoever does that best."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..decode_attention import decode_attention
from ..head_shards import query_heads
from ..op import Implementation
from ..rotary import DeferredRope
from .types import CacheShard


def attend_apart(
    q: Float[Array, "B N H"] | DeferredRope,
    caches: Sequence[CacheShard],
    *,
    scale: float,
    implementation: Implementation,
) -> Float[Array, "B N H"]:
    """Attention of each cache's heads, put back in the layer's order; where XLA is asked for, by XLA."""
    group = (q.x if isinstance(q, DeferredRope) else q).shape[1] // sum(len(held.heads) for held in caches)
    order = [query_heads(held.heads, group) for held in caches]
    by, outs = ("xla" if implementation == "xla" else "auto"), []
    for held, mine in zip(caches, order, strict=True):
        queries = q._replace(x=q.x[:, mine]) if isinstance(q, DeferredRope) else q[:, mine]
        attended = decode_attention(queries, held.k, held.v, held.weight, scale=scale, implementation=by)
        outs.append(attended.out)
    return jnp.concatenate(outs, axis=1)[:, np.argsort(np.concatenate(order))]
