"""The share of tokens that a cache keeps, for policies whose text determines it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from kvjax.cache import LayerSpec
from kvjax.policies import Policy
from kvjax.runtime import mesh


def kept_shares(policy: Policy, specs: Sequence[LayerSpec], caches: Sequence[Any]) -> Float[np.ndarray, " B"]:
    """Number of kept tokens divided by tokens processed, in each row, mean over the heads of all layers.

    On a mesh, the caches are copied to the host first.
    """
    if specs[0].shard.mesh is not None:
        caches = jax.tree.map(jnp.asarray, mesh.saved(policy, specs, caches))
    shares = []
    for spec, cache in zip(specs, caches, strict=True):
        held = policy.layer(spec.whole).view(cache)
        shares.append(np.sum(np.asarray(held.pos) >= 0, axis=-1) / np.asarray(held.seen)[:, None])
    return np.concatenate(shares, axis=-1).mean(axis=-1)
