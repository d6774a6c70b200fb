"""The state of one layer's cache: a pytree of fixed shape, and how a prompt fills it."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import einops
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from .spec import LayerSpec
from .tokens import PromptKV, prompt_mask


@flax.struct.dataclass
class LayerCache:
    """Keys and values that one layer keeps. B rows, K KV heads, C slots, H head dim.

    Attributes:
        k, v: keys and values. The policy decides whether keys are rotated. Free slots may contain anything, NaN
            included.
        pos: original position of the token in a slot, -1 if free. For a merged slot, that of its newest token.
        weight: 0 free, 1 a token, n a cluster of n tokens.
        next: the slot of the next token.
        seen: tokens that have passed through this cache, kept or not.
        slot_shards: number of devices that shard keys and values by slots, see `kvjax.cache.sharded`.

    Example:
        >>> cache = kvjax.cache.from_prompt(spec, 8, prompt)
        >>> cache.pos[0, 0].tolist(), cache.count[0, 0].item()  # two slots are free
        ([0, 1, 2, 3, 4, 5, -1, -1], 6)
    """

    k: Float[Array, "B K _ H"]
    v: Float[Array, "B K _ H"]
    pos: Int[Array, "B K C"]
    weight: Float[Array, "B K C"]
    next: Int[Array, "B K"]
    seen: Int[Array, " B"]
    slot_shards: int = flax.struct.field(pytree_node=False, default=1, kw_only=True)

    @property
    def live(self) -> Bool[Array, "B K C"]:
        """Slots that contain a token."""
        return self.weight > 0

    @property
    def cache(self) -> Self:
        """The cache itself, because a state may be just a cache."""
        return self

    @property
    def slot_axes(self) -> tuple[int, int]:
        """Slot axes of keys and values."""
        return 2, 2

    @property
    def count(self) -> Int[Array, "B K"]:
        """Number of slots that contain a token."""
        return jnp.sum(self.live, axis=-1, dtype=jnp.int32)


def empty(spec: LayerSpec, capacity: int) -> LayerCache:
    """Return a cache of `capacity` free slots.

    Example:
        >>> cache = kvjax.cache.empty(spec, 8)
        >>> cache.k.shape, cache.pos[0, 0].tolist()  # rows, KV heads, slots, channels; -1 is a free slot
        ((1, 1, 8, 4), [-1, -1, -1, -1, -1, -1, -1, -1])
    """
    heads = (spec.batch, spec.num_kv_heads)
    return LayerCache(
        k=jnp.zeros((*heads, capacity, spec.head_dim), spec.dtype),
        v=jnp.zeros((*heads, capacity, spec.head_dim), spec.dtype),
        pos=jnp.full((*heads, capacity), -1, jnp.int32),
        weight=jnp.zeros((*heads, capacity), jnp.float32),
        next=jnp.zeros(heads, jnp.int32),
        seen=jnp.zeros((spec.batch,), jnp.int32),
    )


def extended(held: LayerCache, slots: int) -> LayerCache:
    """Return a cache with `slots` more free slots.

    Example:
        >>> cache = kvjax.cache.from_prompt(spec, 6, prompt)
        >>> kvjax.cache.extended(cache, 2).pos[0, 0].tolist()
        [0, 1, 2, 3, 4, 5, -1, -1]
    """

    def padded(x: Array, fill: int) -> Array:
        return jnp.pad(x, [(0, 0), (0, 0), (0, slots)] + [(0, 0)] * (x.ndim - 3), constant_values=fill)

    k, v, weight = padded(held.k, 0), padded(held.v, 0), padded(held.weight, 0)
    return dataclasses.replace(held, k=k, v=v, pos=padded(held.pos, -1), weight=weight)


def from_prompt(spec: LayerSpec, capacity: int, prompt: PromptKV) -> LayerCache:
    """Return a new cache with all tokens of a prompt in its first slots, with rotated keys.

    Args:
        spec: the layer's static shapes and model facts.
        capacity: slots of the cache, at least the padded length of the prompt.
        prompt: the prompt.

    Raises:
        ValueError: the prompt has other rows or KV heads than `spec`, or more tokens than `capacity`.

    Example:
        >>> cache = kvjax.cache.from_prompt(spec, 8, prompt)
        >>> cache.pos[0, 0].tolist(), cache.next[0, 0].item()
        ([0, 1, 2, 3, 4, 5, -1, -1], 6)
    """
    _check_prompt(spec, prompt)
    if prompt.size > capacity:
        raise ValueError(
            f"a prompt padded to {prompt.size} tokens does not fit {capacity} slots. Override prefill and choose tokens with "
            "keep, or raise max_kept."
        )
    live = prompt_mask(prompt.lengths, capacity)[:, None]
    live = jnp.broadcast_to(live, (spec.batch, spec.num_kv_heads, capacity))

    def taken(x: Array) -> Array:
        x = jnp.swapaxes(x, 1, 2).astype(spec.dtype)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, capacity - x.shape[2]), (0, 0)))
        return jnp.where(live[..., None], x, jnp.zeros((), spec.dtype))

    lengths = prompt.lengths.astype(jnp.int32)
    return LayerCache(
        k=taken(prompt.k_rotated),
        v=taken(prompt.v),
        pos=jnp.where(live, jnp.arange(capacity, dtype=jnp.int32), -1),
        weight=live.astype(jnp.float32),
        next=jnp.broadcast_to(lengths[:, None], live.shape[:2]),
        seen=lengths,
    )


def keep(
    spec: LayerSpec, capacity: int, prompt: PromptKV, keep: Bool[Array, "B K T"], *, rotated: bool = True
) -> tuple[LayerCache, Int[Array, "B K C"]]:
    """Return a new cache with the kept tokens of a prompt, in order, in its first slots.

    Args:
        spec: the layer's static shapes and model facts.
        capacity: slots of the cache.
        prompt: the prompt.
        keep: which tokens each head keeps, at most `capacity`. Padding is never kept.
        rotated: whether keys are stored rotated.

    Returns:
        The cache, and the prompt index of each slot's token (0 if free), with which a policy can gather other values of
        its tokens.

    Raises:
        ValueError: the prompt has other rows or KV heads than `spec`, or `keep` has another size.

    Example:
        >>> odd = jnp.arange(6) % 2 == 1
        >>> cache, index = kvjax.cache.keep(spec, 4, prompt, jnp.broadcast_to(odd, (1, 1, 6)))
        >>> cache.pos[0, 0].tolist(), index[0, 0].tolist()
        ([1, 3, 5, -1], [1, 3, 5, 0])
    """
    _check_prompt(spec, prompt)
    if keep.shape[-1] != prompt.size:
        raise ValueError(f"keep has shape {keep.shape} for a prompt of {prompt.size} places. Give [B, K, T].")
    k = prompt.k_rotated if rotated else prompt.k
    return _gathered(capacity, spec.dtype, k, prompt.v, keep & prompt.live, prompt.places, prompt.seen)


def _check_prompt(spec: LayerSpec, prompt: PromptKV) -> None:
    rows, _, heads, _ = prompt.v.shape
    if (rows, heads) != (spec.batch, spec.num_kv_heads):
        raise ValueError(
            f"the prompt has {rows} rows and {heads} KV heads, but the LayerSpec has batch={spec.batch} and num_kv_heads={spec.num_kv_heads}"
        )


@partial(jax.jit, static_argnums=(0, 1))
def _gathered(
    capacity: int,
    dtype: Any,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    keep: Bool[Array, "B K T"],
    pos: Int[Array, "B K T"] | None,
    seen: Int[Array, " B"],
) -> tuple[LayerCache, Int[Array, "B K C"]]:
    """`keep`, traced once for all layers of one shape."""
    index, live = compact_indices(keep, capacity)
    gather = einops.rearrange(index, "b k c -> b c k 1")

    def taken(x: Array) -> Array:
        kept = einops.rearrange(jnp.take_along_axis(x, gather, axis=1), "b c k h -> b k c h")
        return jnp.where(live[..., None], kept, jnp.zeros((), x.dtype))

    slots = LayerCache(
        k=taken(k).astype(dtype),
        v=taken(v).astype(dtype),
        pos=jnp.where(live, index if pos is None else jnp.take_along_axis(pos, index, axis=-1), -1),
        weight=live.astype(jnp.float32),
        next=jnp.sum(live, axis=-1, dtype=jnp.int32),
        seen=seen.astype(jnp.int32),
    )
    return slots, index


def map_kv(f: Callable[..., Any], state: Any, *others: Any) -> Any:
    """Return a layer's state (a `LayerCache`, or a state with a `cache`) with `f((k, v), ...)` as keys and values.

    Args:
        f: maps keys and values.
        state: the state.
        others: states of the same kind, whose keys and values are passed to `f`, too.

    Example:
        >>> cache = kvjax.cache.from_prompt(spec, 8, prompt)
        >>> half = kvjax.cache.map_kv(lambda kv: tuple(x.astype("bfloat16") for x in kv), cache)
        >>> half.k.dtype, half.weight.dtype
        (dtype(bfloat16), dtype('float32'))
    """
    k, v = f(*((each.cache.k, each.cache.v) for each in (state, *others)))
    mapped = dataclasses.replace(state.cache, k=k, v=v)
    return mapped if state.cache is state else dataclasses.replace(state, cache=mapped)


MOVED = 2**25
"""Maximum size of a cache that moves in two parts, a larger one in eight. Fewer parts need fewer kernels, but more memory."""


def move_forward(
    stores: tuple[Array, Array], slot: Int[Array, "B K S"], live: Bool[Array, "B K S"]
) -> tuple[Array, Array]:
    """Move keys and values of some slots to the first S places, in place, with zeros in places without a token.

    Args:
        stores: keys and values [B, K, C, H].
        slot: current slot of each place's entry, at or after the place.
        live: which places are filled.
    """
    size = slot.shape[-1]
    part = max(size // (2 if stores[0].size <= MOVED else 8), 16)
    part = size if size % part else part  # engines round sizes up to multiples of 32; others move at once

    def move(i: Int[Array, ""], stores: tuple[Array, Array]) -> tuple[Array, Array]:
        def moved(x: Shaped[Array, "B K C H"]) -> Shaped[Array, "B K C H"]:
            source, there = (jax.lax.dynamic_slice_in_dim(y, i * part, part, axis=2) for y in (slot, live))
            x_part = jnp.take_along_axis(x, source[..., None], axis=2)
            x_part = jnp.where(there[..., None], x_part, jnp.zeros((), x.dtype))
            return jax.lax.dynamic_update_slice_in_dim(x, x_part, i * part, axis=2)

        k, v = stores
        return moved(k), moved(v)

    # One part at a time: nothing moves to a later slot, so no part is overwritten before it is read.
    return jax.lax.fori_loop(0, size // part, move, stores)


def compact_indices(keep: Bool[Array, "*B T"], capacity: int) -> tuple[Int[Array, "*B C"], Bool[Array, "*B C"]]:
    """Indices of the first `capacity` kept entries, ascending, and which of them exist (0 for the others).

    Example:
        >>> index, exists = kvjax.cache.compact_indices(jnp.asarray([False, True, False, True]), 3)
        >>> index.tolist(), exists.tolist()
        ([1, 3, 0], [True, True, False])
    """
    rank = jnp.cumsum(keep, axis=-1, dtype=jnp.int32) - 1
    flat_rank = jnp.where(keep, rank, capacity).reshape(-1, keep.shape[-1])  # out of bounds if not kept: dropped
    rows = jnp.arange(flat_rank.shape[0], dtype=jnp.int32)[:, None]
    source = jnp.broadcast_to(jnp.arange(keep.shape[-1], dtype=jnp.int32), flat_rank.shape)
    index = jnp.zeros((flat_rank.shape[0], capacity), jnp.int32).at[rows, flat_rank].set(source, mode="drop")
    kept = jnp.sum(keep, axis=-1, dtype=jnp.int32)[..., None]
    live = jnp.arange(capacity, dtype=jnp.int32) < kept
    return index.reshape(live.shape), live
