"""The share of tokens that a cache keeps, for policies whose text determines it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache import LayerSpec
from kvjax.policies import Policy
from kvjax.runtime import mesh
from kvjax.runtime.program import Program


def kept_shares(policy: Policy, specs: Sequence[LayerSpec], caches: Sequence[Any]) -> Float[np.ndarray, " B"]:
    """Number of kept tokens divided by tokens processed, in each row, mean over the heads of all cached layers.

    On a mesh, the caches are copied to the host first.
    """
    if specs[0].shard.mesh is not None:
        caches = jax.tree.map(jnp.asarray, mesh.saved(policy, specs, caches))
    found = _counts(policy, tuple(spec.whole for spec in specs), tuple(caches))
    return np.concatenate([np.asarray(kept) / np.asarray(seen)[:, None] for kept, seen in found], axis=-1).mean(axis=-1)


def _kept_and_seen(
    policy: Policy, specs: tuple[LayerSpec, ...], caches: tuple[Any, ...]
) -> list[tuple[Int[Array, "B K"], Int[Array, " B"]]]:
    every = zip(specs, caches, strict=True)
    held = [policy.layer(spec).view(cache) for spec, cache in every if spec.recurrent is None]
    return [(jnp.sum(each.live, axis=-1, dtype=jnp.int32), each.seen) for each in held]


_counts = Program(_kept_and_seen, static=2)
"""`_counts(policy, specs, caches)`: kept tokens of each head and tokens of each row, by layer. Keys and values are not read."""
