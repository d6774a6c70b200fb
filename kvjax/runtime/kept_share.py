"""The share of tokens that a cache keeps, in all and at each position, for policies whose text determines it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from kvjax.cache import LayerSpec
from kvjax.policies import Policy
from kvjax.policies.layer import kept_slots
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
    held = kept_slots(map(policy.layer, specs), caches)
    return [(jnp.sum(each.live, axis=-1, dtype=jnp.int32), each.seen) for each in held]


_counts = Program(_kept_and_seen, static=2)
"""`_counts(policy, specs, caches)`: kept tokens of each head and tokens of each row, by layer. Keys and values are not read."""


class KeptPositions(NamedTuple):
    """Which tokens one row keeps, on the device or on the host.

    Attributes:
        shares: share of all KV heads of all cached layers that keep each position, in 255ths, for P positions. A merged slot
            counts at the position of its latest token.
        used: number of slots in use, of all heads of all cached layers.
        tokens: number of tokens processed.
        slots: number of slots of all heads of all cached layers.
    """

    shares: Any
    used: Any
    tokens: Any
    slots: Any


def kept_positions(
    policy: Policy, specs: Sequence[LayerSpec], caches: Sequence[Any], tokens: Any, row: Any
) -> KeptPositions:
    """Which tokens a row keeps. Nothing waits for the device, and no cache is copied.

    Args:
        policy: the policy.
        specs: static description of each layer's cache, of one row on one device.
        caches: the policy's state for each layer, B rows.
        tokens: number of tokens processed, [B].
        row: the row, [1].
    """
    return KeptPositions(*_by_position(policy, tuple(specs), tuple(caches), tokens, row))


def _held_by_position(
    policy: Policy,
    specs: tuple[LayerSpec, ...],
    caches: tuple[Any, ...],
    tokens: Int[Array, " B"],
    row: Int[Array, "1"],
) -> tuple[UInt8[Array, " P"], Int[Array, ""], Int[Array, "1"], Int[Array, ""]]:
    caches, tokens = jax.tree.map(lambda x: jnp.take(x, row, axis=0), (caches, tokens))
    held = kept_slots(map(policy.layer, specs), caches)
    places = specs[0].max_tokens
    heads, slots = sum(each.live.shape[1] for each in held), sum(each.live.size for each in held)
    counts = jnp.zeros((places,), jnp.int32)
    for each in held:
        counts = counts.at[jnp.where(each.live, each.pos, places).reshape(-1)].add(1, mode="drop")
    used = sum(jnp.sum(each.live, dtype=jnp.int32) for each in held)
    shares = (counts * 255 // heads).astype(jnp.uint8)
    return shares, jnp.asarray(used, jnp.int32), tokens, jnp.asarray(slots, jnp.int32)


_by_position = Program(_held_by_position, static=2)
"""`_by_position(policy, specs, caches, tokens, row)`: the fields of `KeptPositions`. Keys and values are not read."""
