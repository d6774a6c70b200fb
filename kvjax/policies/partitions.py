"""How a policy's states are sharded over the devices of a mesh."""

import dataclasses
import itertools
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import PartitionSpec

from kvjax.cache import LayerSpec
from kvjax.cache.shard import DATA, HEADS, ONE_DEVICE, SLOTS

from .base import Policy
from .info import PolicyError
from .sharded import sharded
from .unbound import check_no_host_cache


def partition_specs(policy: Policy, spec: LayerSpec) -> Any:
    """Partitions of one layer's state on a mesh, for `jax.shard_map` or `NamedSharding`.

    Rows are sharded along the axis "data". The other axes are those of `spec.shard` (`kvjax.cache.Shard`): KV heads along
    "heads", and slots along "slots" where the layer supports it.

    Args:
        policy: a policy that is bound to the model.
        spec: the layer on one device: that of the whole layer if only rows are sharded, otherwise `spec.on(shard)`.

    Returns:
        A tree like the state, with a `jax.sharding.PartitionSpec` for each array.

    Raises:
        PolicyError: the policy keeps a cache in host memory, or has an array without an axis of rows that could be
            sharded.

    Example:
        >>> from jax.sharding import PartitionSpec
        >>> spec = kvjax.cache.LayerSpec(num_heads=8, num_kv_heads=4, head_dim=16, prompt_len=32, new_tokens=16, batch=2)
        >>> kvjax.policies.partition_specs(kvjax.TreeKV(budget=16), spec).cache.k == PartitionSpec("data", None, None, None)
        True
    """
    check_no_host_cache(policy)
    return state_axes(policy, spec)


@lru_cache(maxsize=1024)
def state_axes(policy: Policy, spec: LayerSpec) -> Any:
    """`partition_specs`, once for each layer.

    The axes of rows and KV heads are found by doubling both. An axis that shrinks when slots are sharded is the slot
    axis.
    """
    alone = dataclasses.replace(spec, shard=ONE_DEVICE)
    of_rows = dataclasses.replace(alone, batch=2 * spec.batch)
    of_heads = dataclasses.replace(alone, num_heads=2 * spec.num_heads, num_kv_heads=2 * spec.num_kv_heads)
    own = jax.eval_shape(sharded(policy.layer(spec)).init)
    one, rows, heads = (
        jax.tree.unflatten(jax.tree.structure(own), jax.tree.leaves(jax.eval_shape(policy.layer(each).init)))
        for each in (alone, of_rows, of_heads if spec.shard.heads > 1 else alone)
    )

    def partition(one: Any, rows: Any, heads: Any, own: Any) -> PartitionSpec:
        names = [
            [axis for axis, size in ((DATA, row), (HEADS, head), (SLOTS, slots)) if size != alone]
            for alone, row, head, slots in zip(one.shape, rows.shape, heads.shape, own.shape, strict=True)
        ]
        every = list(itertools.chain(*names))
        if max(map(len, names), default=0) > 1 or len(every) != len(set(every)):
            raise PolicyError(
                f"{policy.info.name}: an array of its cache, {list(one.shape)}, needs one axis of rows and at most one of KV "
                "heads to be sharded"
            )
        return PartitionSpec(*(each[0] if each else None for each in names))

    return jax.tree.map(partition, one, rows, heads, own)


def is_partition(x: Any) -> bool:
    """Whether a node is a partition, and so a leaf of a tree of partitions."""
    return isinstance(x, PartitionSpec)
