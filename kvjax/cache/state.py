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
        k, v: keys and values. Whether keys are rotated is the policy's choice. A free slot may hold anything, NaN included.
        pos: original position of the token in a slot, -1 where free. Of a merged slot, its newest token's.
        weight: 0 free, 1 a token, n a cluster of n tokens.
        next: the slot that the next token goes to.
        seen: tokens that have passed through this cache, kept or not.
        sharded: among how many devices keys and values are sharded by slots, each of which has a part of C; see `kvjax.cache.sharded`.
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
        """Which slots hold something."""
        return self.weight > 0

    @property
    def cache(self) -> Self:
        """Itself: a state may be nothing but a cache."""
        return self

    @property
    def slot_axes(self) -> tuple[int, int]:
        """Along which axis keys and values have their slots."""
        return 2, 2

    @property
    def count(self) -> Int[Array, "B K"]:
        """How many slots hold something."""
        return jnp.sum(self.live, axis=-1, dtype=jnp.int32)


def empty(spec: LayerSpec, capacity: int) -> LayerCache:
    """A cache of `capacity` free slots."""
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
    """A cache with so many free slots more."""

    def padded(x: Array, fill: int) -> Array:
        return jnp.pad(x, [(0, 0), (0, 0), (0, slots)] + [(0, 0)] * (x.ndim - 3), constant_values=fill)

    k, v, weight = padded(held.k, 0), padded(held.v, 0), padded(held.weight, 0)
    return dataclasses.replace(held, k=k, v=v, pos=padded(held.pos, -1), weight=weight)


def from_prompt(spec: LayerSpec, capacity: int, prompt: PromptKV) -> LayerCache:
    """All tokens of a prompt, padded to at most `capacity`, with rotated keys in the first slots of a new cache.

    Raises:
        ValueError: the prompt has other rows or KV heads than `spec`, or more tokens than `capacity`.
    """
    _check_prompt(spec, prompt)
    if prompt.size > capacity:
        raise ValueError(
            f"a prompt padded to {prompt.size} tokens does not fit {capacity} slots; override prefill, and choose what to keep by "
            "keep, or raise max_kept"
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
    """The kept tokens of a prompt, in order, in the first slots of a new cache.

    Args:
        keep: which tokens each head keeps; at most `capacity` of them. Padding is never kept, whatever `keep` says.
        rotated: whether keys are stored rotated.

    Returns:
        The cache, and the prompt index that each slot was filled from (0 where free), for gathering what else a policy knows
        of its tokens.
    """
    _check_prompt(spec, prompt)
    if keep.shape[-1] != prompt.size:
        raise ValueError(f"keep has shape {keep.shape} for a prompt of {prompt.size} places; give [B, K, T]")
    k = prompt.k_rotated if rotated else prompt.k
    return _gathered(capacity, spec.dtype, k, prompt.v, keep & prompt.live, prompt.places, prompt.seen)


def _check_prompt(spec: LayerSpec, prompt: PromptKV) -> None:
    rows, _, heads, _ = prompt.v.shape
    if (rows, heads) != (spec.batch, spec.num_kv_heads):
        raise ValueError(
            f"the prompt has {rows} rows and {heads} KV heads, but the LayerSpec says batch={spec.batch} and num_kv_heads={spec.num_kv_heads}"
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
    """A layer's state, a `LayerCache` or one that has it as `cache`, with `f((k, v), ...)` for its keys and values.

    Args:
        others: states of the same kind, whose keys and values `f` is given, too.
    """
    k, v = f(*((each.cache.k, each.cache.v) for each in (state, *others)))
    mapped = dataclasses.replace(state.cache, k=k, v=v)
    return mapped if state.cache is state else dataclasses.replace(state, cache=mapped)


MOVED = 2**25
"""A cache of up to so many numbers moves within itself in two parts, a larger one in eight: fewer parts are fewer kernels, but need more room."""


def move_forward(
    stores: tuple[Array, Array], slot: Int[Array, "B K S"], live: Bool[Array, "B K S"]
) -> tuple[Array, Array]:
    """Keys and values of some slots, moved to the first S places in place; zeros where nothing lives.

    Args:
        stores: keys and values [B, K, C, H].
        slot: where what is to stand in each place is now, which is that place or a later one.
        live: which places are filled.
    """
    size = slot.shape[-1]
    part = max(size // (2 if stores[0].size <= MOVED else 8), 16)  # sizes are multiples of 32

    def move(i: Int[Array, ""], stores: tuple[Array, Array]) -> tuple[Array, Array]:
        def moved(x: Shaped[Array, "B K C H"]) -> Shaped[Array, "B K C H"]:
            source, there = (jax.lax.dynamic_slice_in_dim(y, i * part, part, axis=2) for y in (slot, live))
            x_part = jnp.take_along_axis(x, source[..., None], axis=2)
            x_part = jnp.where(there[..., None], x_part, jnp.zeros((), x.dtype))
            return jax.lax.dynamic_update_slice_in_dim(x, x_part, i * part, axis=2)

        k, v = stores
        return moved(k), moved(v)

    # A part at a time: nothing moves to a later slot, so no part is overwritten before it is read.
    return jax.lax.fori_loop(0, size // part, move, stores)


def compact_indices(keep: Bool[Array, "*B T"], capacity: int) -> tuple[Int[Array, "*B C"], Bool[Array, "*B C"]]:
    """Indices of the first `capacity` kept entries, ascending, and which of them exist (the others are 0)."""
    rank = jnp.cumsum(keep, axis=-1, dtype=jnp.int32) - 1
    flat_rank = jnp.where(keep, rank, capacity).reshape(-1, keep.shape[-1])  # what is not kept falls off the end
    rows = jnp.arange(flat_rank.shape[0], dtype=jnp.int32)[:, None]
    source = jnp.broadcast_to(jnp.arange(keep.shape[-1], dtype=jnp.int32), flat_rank.shape)
    index = jnp.zeros((flat_rank.shape[0], capacity), jnp.int32).at[rows, flat_rank].set(source, mode="drop")
    kept = jnp.sum(keep, axis=-1, dtype=jnp.int32)[..., None]
    live = jnp.arange(capacity, dtype=jnp.int32) < kept
    return index.reshape(live.shape), live
