"""Compression while decoding, of the rows that are due.

Rows of a batch that began at different times are due at different times. If the whole batch was compressed whenever one
row is due, a batch of B rows would be compressed B times as often as each row needs. So rows that are due are gathered, a
group at a time (`group_size`), compressed as a small batch, and written back.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from kvjax.cache import LayerSpec, compact_indices
from kvjax.pallas_kernels import write_rows
from kvjax.pallas_kernels.device import target
from kvjax.policies import Policy
from kvjax.policies.checks import calling, expect_same_state
from kvjax.policies.layer import CacheLayer, Carry
from kvjax.policies.sharded import sharded

GROUP = 8
"""Minimum number of rows that are compressed at a time. Batches of this size or less are compressed as a whole."""

MOST = 32
"""Maximum number of rows that are compressed at a time, for which a layer's compression needs room beside the caches."""

WAIT = 8
"""Maximum number of steps that a row that is due waits for others, so that more are compressed at a time.

Otherwise rows that are due one after the other would be compressed one at a time, at the cost of a group each
(`benchmarks.phases`).
"""

Caches = tuple[Any, ...]


def group_size(batch: int) -> int:
    """Number of rows of a batch that are compressed at a time: an eighth of them, within `GROUP` and `MOST`.

    It follows from the batch alone, so that a row goes through the same states however many others are due with it.
    Larger groups start fewer kernels. What they gain by themselves has not been measured.
    """
    return min(batch, max(GROUP, min(batch // 8, MOST)))


@dataclasses.dataclass(frozen=True)
class Compression:
    """Compression of all layers of a model.

    Attributes:
        policy: the bound policy.
        specs: the layers' specs, on one device.
    """

    policy: Policy
    specs: tuple[LayerSpec, ...]

    @property
    def layers(self) -> tuple[CacheLayer[Any], ...]:
        """The policy's layers."""
        return self._of(None)

    @property
    def lazy(self) -> list[int]:
        """Indices of the layers that compress when they are full."""
        return [i for i, layer in enumerate(self.layers) if layer.when == "when_full"]

    def due(self, caches: Sequence[Any]) -> Bool[Array, " B"]:
        """Rows in which at least one layer is due. There must be a layer that compresses when it is full."""
        # Reduce over layers before rows: otherwise XLA launches one kernel per layer.
        return reduce(jnp.logical_or, [self.layers[i].is_due(caches[i]) for i in self.lazy])

    def each_step(self, caches: Sequence[Any]) -> Caches:
        """Compress the layers that compress in every step."""
        return tuple(
            compressed(layer, cache) if layer.when == "every_step" else cache
            for layer, cache in zip(self.layers, caches, strict=True)
        )

    def when_full(self, caches: Sequence[Any], live: Bool[Array, " B"] | None = None) -> Caches:
        """Compress the rows that are due in the layers that compress when they are full.

        With `live`, only those that are live. A batch of up to `GROUP` rows without `live` is compressed as a whole.
        """
        batch = self.specs[0].batch
        on_device = all(_on_device(leaf) for i in self.lazy for leaf in jax.tree.leaves(caches[i]))
        if not on_device or (live is None and batch <= GROUP):
            layers = self.layers
            known = observed_together([layers[i] for i in self.lazy], (caches[i] for i in self.lazy))
            return self._in_order(caches, lambda i, cache, before: compressed(layers[i], _after(before, cache), known))
        group = group_size(batch)
        layers = self._of(group)

        def some(loop: tuple[Bool[Array, " B"], Caches]) -> tuple[Bool[Array, " B"], Caches]:
            due, caches = loop
            rows, exist = compact_indices(due, group)
            to = jnp.where(exist, rows, batch)  # out of bounds where there is no further row: dropped

            def gathered(cache: Any, rows: Array) -> Any:
                return jax.tree.map(lambda x: jnp.take(x, rows, axis=0), cache)

            known = observed_together([layers[i] for i in self.lazy], (gathered(caches[i], rows) for i in self.lazy))

            def one(i: int, cache: Any, before: Any) -> Any:
                after = compressed(layers[i], gathered(cache, _after(before, rows)), known)
                return jax.tree.map(lambda x, y: write_rows(x, to, y), cache, after)

            return due.at[to].set(False, mode="drop"), self._in_order(caches, one)

        due = self.due(caches) if live is None else self.due(caches) & live
        return jax.lax.while_loop(lambda loop: jnp.any(loop[0]), some, (due, tuple(caches)))[1]

    def _in_order(self, caches: Sequence[Any], one: Callable[[int, Any, Any], Any]) -> Caches:
        """Compress layer by layer. `one` gets the layer's index, its cache, and what it must wait for."""
        # Each compression takes memory, and a GPU could run them concurrently. On other devices they run in order
        # anyway, and an explicit order only costs memory (measured with Chelsea by `benchmarks.fits`).
        held, before, waits = list(caches), None, target().platform == "gpu"
        for i in self.lazy:
            held[i] = one(i, held[i], before)
            if waits:
                before = held[i]
        return tuple(held)

    def _of(self, batch: int | None) -> tuple[CacheLayer[Any], ...]:
        specs = self.specs if batch is None else [dataclasses.replace(spec, batch=batch) for spec in self.specs]
        return tuple(sharded(self.policy.layer(spec)) for spec in specs)


def observed_together(layers: Sequence[CacheLayer[Any]], caches: Iterable[Any]) -> Carry:
    """What layers that compress together know of one another, for `compressed`."""
    carry: Carry = {}
    for layer, cache in zip(layers, caches, strict=True):
        if layer.compresses_together:
            with calling(layer, "before_compress"):
                carry = layer.before_compress(cache, carry)
    return carry


def after_block(layers: Sequence[CacheLayer[Any]], caches: Sequence[Any]) -> Caches:
    """The states after a block of chunked prefill, in which layers that compress together have done so."""
    carry = observed_together(layers, caches)
    return tuple(
        layer.compress_together(cache, carry) if layer.compresses_together else cache
        for layer, cache in zip(layers, caches, strict=True)
    )


def compressed(layer: CacheLayer[Any], cache: Any, carry: Carry | None = None) -> Any:
    """Return a layer's state after `compress`, or `compress_together` with a carry. Errors name the policy and the function."""
    together = carry is not None and layer.compresses_together
    with calling(layer, "compress_together" if together else "compress"):
        after = layer.compress_together(cache, carry) if together and carry is not None else layer.compress(cache)
    expect_same_state(layer, "compress", cache, after)
    return after


def _after(before: Any, cache: Any) -> Any:
    """Make a cache depend on another, so that it is computed later. Arrays in host memory are excluded."""
    leaves, tree = jax.tree.flatten(cache)
    own = [i for i, leaf in enumerate(leaves) if _on_device(leaf)]
    others = list(filter(_on_device, jax.tree.leaves(before)))
    if others:
        there, _ = jax.lax.optimization_barrier(([leaves[i] for i in own], others))
        for i, leaf in zip(own, there, strict=True):
            leaves[i] = leaf
    return tree.unflatten(leaves)


def _on_device(x: Array) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Device
