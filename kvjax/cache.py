"""The cache state: a pytree of fixed shape, and the few verbs that policies are written with.

A cache holds C slots for every row and KV head. Its capacity is a shape, never a mask over the whole context, so what a policy
drops is really freed. Slots are filled from the left; when one is evicted, the next token takes its place, so keys and
values never move while decoding.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax import host_memory
from kvjax.models.config import ModelConfig
from kvjax.models.rope import NO_ROPE, Rope
from kvjax.pallas_kernels import (
    Held,
    Rotation,
    Turned,
    Writing,
    decode_attention,
    divided_attention,
    heads_of,
    write_divided_slots,
    write_slots,
)

BLOCK = 1024
"""Slots that `attend_many` takes at a time."""


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """All that is static about one layer's cache: hashable, known before anything runs.

    Attributes:
        layer, num_layers: which layer of how many.
        batch: B, rows.
        num_heads, num_kv_heads, head_dim: N, K, H.
        prompt_len: T, length to which prompts are padded; 0 when decoding starts from an empty cache.
        new_tokens: how many tokens will be decoded at most.
        dtype: type of the cached keys and values.
        rope: the rotation that positions stand for.
        scale: factor on attention logits.
        window: sliding attention window in tokens, None where attention is full.
        kv_heads: which of the layer's KV heads these are, None for all.
    """

    layer: int
    num_layers: int
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    prompt_len: int
    new_tokens: int
    dtype: Any
    rope: Rope
    scale: float
    window: int | None = None
    kv_heads: tuple[int, ...] | None = None

    @property
    def max_tokens(self) -> int:
        """The most tokens a row can hold: padded prompt and all new ones."""
        return self.prompt_len + self.new_tokens


def layer_specs(config: ModelConfig, batch: int, prompt_len: int, new_tokens: int, dtype: Any) -> tuple[LayerSpec, ...]:
    """One `LayerSpec` a layer.

    Args:
        prompt_len: tokens of the longest prompt; padded up here, see `bucket`.
    """
    rope = config.rope.resolve(prompt_len + new_tokens)
    return tuple(
        LayerSpec(
            layer=layer,
            num_layers=config.num_layers,
            batch=batch,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            prompt_len=bucket(prompt_len),
            new_tokens=new_tokens,
            dtype=jnp.dtype(dtype),
            rope=rope,
            scale=config.head_dim**-0.5,
            window=window,
        )
        for layer, window in enumerate(config.windows)
    )


def bucket(length: int) -> int:
    """The length a prompt is padded to: 2^n or 1.5 × 2^n, at least 64, so that a few compiled programs serve all prompts."""
    if length == 0:
        return 0
    size = 64
    while size < length:
        size *= 2
    return size * 3 // 4 if size > 64 and length <= size * 3 // 4 else size


def round_slots(slots: int) -> int:
    """Capacity for at least `slots` slots: a multiple of 128, or of 32 in caches under 2048.

    Odd capacities are slow (13107 slots took 12.5 ms a step on an H200 where 13056 took 8.1); in a small cache a step of 128
    would hold up to half as many slots again as were asked for.
    """
    step = 128 if slots > 2048 else 32
    return -(-slots // step) * step


@flax.struct.dataclass
class Slots:
    """Keys and values that one layer keeps. B rows, K KV heads, C slots, H head dim.

    Attributes:
        k, v: keys and values. Whether keys are rotated is the policy's choice. A free slot may hold anything, NaN included.
        pos: original position of the token in a slot, -1 where free. Of a merged slot, its newest token's.
        weight: 0 free, 1 a token, n a cluster of n tokens.
        next: the slot that the next token goes to.
        seen: tokens that have passed through this cache, kept or not.
    """

    k: Float[Array, "B K C H"]
    v: Float[Array, "B K C H"]
    pos: Int[Array, "B K C"]
    weight: Float[Array, "B K C"]
    next: Int[Array, "B K"]
    seen: Int[Array, " B"]

    @property
    def live(self) -> Bool[Array, "B K C"]:
        """Which slots hold something."""
        return self.weight > 0

    @property
    def count(self) -> Int[Array, "B K"]:
        """How many slots hold something."""
        return jnp.sum(self.live, axis=-1, dtype=jnp.int32)


def empty(spec: LayerSpec, capacity: int) -> Slots:
    """A cache of `capacity` free slots."""
    heads = (spec.batch, spec.num_kv_heads)
    return Slots(
        k=jnp.zeros((*heads, capacity, spec.head_dim), spec.dtype),
        v=jnp.zeros((*heads, capacity, spec.head_dim), spec.dtype),
        pos=jnp.full((*heads, capacity), -1, jnp.int32),
        weight=jnp.zeros((*heads, capacity), jnp.float32),
        next=jnp.zeros(heads, jnp.int32),
        seen=jnp.zeros((spec.batch,), jnp.int32),
    )


def whole(
    spec: LayerSpec,
    capacity: int,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    lengths: Int[Array, " B"],
) -> Slots:
    """All tokens of a prompt, padded to at most `capacity`, in the first slots of a new cache."""
    live = jnp.broadcast_to(in_prompt(lengths, capacity)[:, None], (spec.batch, spec.num_kv_heads, capacity))

    def taken(x: Array) -> Array:
        x = jnp.swapaxes(x, 1, 2).astype(spec.dtype)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, capacity - x.shape[2]), (0, 0)))
        return jnp.where(live[..., None], x, jnp.zeros((), spec.dtype))

    return Slots(
        k=taken(k),
        v=taken(v),
        pos=jnp.where(live, jnp.arange(capacity, dtype=jnp.int32), -1),
        weight=live.astype(jnp.float32),
        next=jnp.broadcast_to(lengths.astype(jnp.int32)[:, None], live.shape[:2]),
        seen=lengths.astype(jnp.int32),
    )


def select(
    spec: LayerSpec,
    capacity: int,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    keep: Bool[Array, "B K T"],
    lengths: Int[Array, " B"],
) -> tuple[Slots, Int[Array, "B K C"]]:
    """The kept tokens of a prompt, in order, in the first slots of a new cache.

    Args:
        keep: which tokens each head keeps; at most `capacity` of them. Padding is never kept, whatever `keep` says.
        lengths: tokens in each row.

    Returns:
        The cache, and the prompt index that each slot was filled from (0 where free), for gathering what else a policy knows
        of its tokens.
    """
    return _selected(capacity, spec.dtype, k, v, keep, lengths)


@partial(jax.jit, static_argnums=(0, 1))
def _selected(
    capacity: int,
    dtype: Any,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    keep: Bool[Array, "B K T"],
    lengths: Int[Array, " B"],
) -> tuple[Slots, Int[Array, "B K C"]]:
    """`select`, traced once for all layers of one shape."""
    index, live = compact(keep & in_prompt(lengths, keep.shape[-1])[:, None], capacity)
    gather = jnp.swapaxes(index, 1, 2)[..., None]  # [B, C, K, 1]
    held = live[..., None]

    def taken(x: Array) -> Array:
        return jnp.where(held, jnp.swapaxes(jnp.take_along_axis(x, gather, axis=1), 1, 2), jnp.zeros((), x.dtype))

    slots = Slots(
        k=taken(k).astype(dtype),
        v=taken(v).astype(dtype),
        pos=jnp.where(live, index, -1),
        weight=live.astype(jnp.float32),
        next=jnp.sum(live, axis=-1, dtype=jnp.int32),
        seen=lengths.astype(jnp.int32),
    )
    return slots, index


def compact(keep: Bool[Array, "*B T"], capacity: int) -> tuple[Int[Array, "*B C"], Bool[Array, "*B C"]]:
    """Indices of the first `capacity` kept entries, ascending, and which of them exist (the others are 0)."""
    rank = jnp.cumsum(keep, axis=-1, dtype=jnp.int32) - 1
    flat_rank = jnp.where(keep, rank, capacity).reshape(-1, keep.shape[-1])  # what is not kept falls off the end
    rows = jnp.arange(flat_rank.shape[0], dtype=jnp.int32)[:, None]
    source = jnp.broadcast_to(jnp.arange(keep.shape[-1], dtype=jnp.int32), flat_rank.shape)
    index = jnp.zeros((flat_rank.shape[0], capacity), jnp.int32).at[rows, flat_rank].set(source, mode="drop")
    kept = jnp.sum(keep, axis=-1, dtype=jnp.int32)[..., None]
    live = jnp.arange(capacity, dtype=jnp.int32) < kept
    return index.reshape(live.shape), live


def in_prompt(lengths: Int[Array, " B"], size: int) -> Bool[Array, "B T"]:
    """Which positions of a right-padded prompt are tokens."""
    return jnp.arange(size, dtype=jnp.int32) < lengths[:, None]


def insert(
    slots: Slots,
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    pos: Int[Array, " B"],
    *,
    rope: Rope = NO_ROPE,
) -> Slots:
    """Put one new token into each head's next slot, with weight 1.

    Args:
        rope: rotation by `pos` that the key is still to be given.
    """
    return insert_with(slots, k, v, pos, (), rope=rope)[0]


def insert_with(
    slots: Slots,
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    pos: Int[Array, " B"],
    beside: Sequence[tuple[Shaped[Array, "B K C ..."], Any]],
    *,
    rope: Rope = NO_ROPE,
) -> tuple[Slots, list[Array]]:
    """`insert`, and what else a policy knows of the token in the same slots of other arrays.

    Args:
        beside: arrays and their values for the new token, as `write_slots` takes them.

    Returns:
        The cache, and the other arrays.
    """
    new_k = turned(rope, k, pos)
    if host_memory.on_host(slots.k):
        new_k = heads_of(new_k)
        stored = [host_memory.write(store, slots.next, x) for store, x in ((slots.k, new_k), (slots.v, v))]
        stores, values = [], []
    else:
        stored, stores, values = [], [slots.k, slots.v], [new_k, v]
    arrays = [*stores, slots.pos, slots.weight, *(array for array, _ in beside)]
    values += [pos[:, None], 1.0, *(value for _, value in beside)]
    written = write_slots(arrays, slots.next, values, [slots.next, slots.seen])
    *others, following, seen = written[len(stores) + 2 :]
    return Slots(*stored, *written[: len(stores) + 2], next=following, seen=seen), others


def insert_divided(
    caches: Sequence[Slots],
    heads: Sequence[tuple[int, ...]],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    pos: Int[Array, " B"],
    *,
    rope: Rope = NO_ROPE,
) -> list[Slots]:
    """`insert` into caches among which a layer's KV heads are divided, at once.

    Args:
        heads: for each cache, which of the KV heads it has.
        k, v: of all heads.
    """
    values = [turned(rope, k, pos), v, pos[:, None], 1.0]
    written = write_divided_slots(
        [
            Writing([slots.k, slots.v, slots.pos, slots.weight], slots.next, values, [slots.next, slots.seen], mine)
            for slots, mine in zip(caches, heads, strict=True)
        ]
    )
    return [Slots(*arrays) for arrays in written]


def turned(rope: Rope, x: Float[Array, "B N H"], pos: Int[Array, " B"]) -> Float[Array, "B N H"] | Turned:
    """`x` rotated to each row's position, if need be later, by the kernel that reads it."""
    return Turned(x, *rope.cos_sin(pos)) if rope.turns_halves_of(x.shape[-1]) else rope.rotate(x, pos[:, None])


def evict(slots: Slots, slot: Int[Array, "B K"], when: Bool[Array, "B K"]) -> Slots:
    """Free `slot` in the heads where `when` holds; the next token will take its place."""
    target = jnp.where(when, slot, slots.pos.shape[-1])  # out of range, hence dropped, where nothing is evicted
    pos, weight = write_slots([slots.pos, slots.weight], target, [-1, 0.0])
    return dataclasses.replace(slots, pos=pos, weight=weight, next=jnp.where(when, slot, slots.next))


def attend(
    spec: LayerSpec,
    slots: Slots,
    q: Float[Array, "B N H"] | Turned,
    q_pos: Int[Array, " B"],
    *,
    place: tuple[Int[Array, "B K C"], Int[Array, "B K"]] | None = None,
    probs: bool = False,
) -> tuple[Float[Array, "B N H"], Float[Array, "B K C"] | None]:
    """Attention of one query a row over the live slots, inside the layer's sliding window if it has one.

    Args:
        q: queries, rotated or `turned`; unrotated with a `place`.
        q_pos: original position of the query.
        place: where each slot's key stands now, and each head's query, at least 0 and below C, where the cache keeps keys
            unrotated.
        probs: whether each slot's probability is wanted.

    Returns:
        The attended values, and each slot's probability averaged over its query group, if it was asked for: without a gradient, since
        it tells what is kept, and that has none.
    """
    rope, weight, keys, rotation = spec.rope, _seen(spec, slots, q_pos), slots.k, None
    if place is not None and rope.turns_halves_of(spec.head_dim):
        rotation = Rotation(*place, jnp.asarray(rope.inv_freq, jnp.float32), rope.amplitude)
    elif place is not None:
        assert not isinstance(q, Turned)
        q = rope.rotate(q, jnp.repeat(place[1], spec.num_heads // spec.num_kv_heads, axis=1))
        keys = rope.rotate_by_table(keys, place[0], keys.shape[2])
    attended = decode_attention(q, keys, slots.v, weight, scale=spec.scale, rotation=rotation, probs=probs)
    return attended.out, jax.lax.stop_gradient(attended.probs)


def attend_divided(
    spec: LayerSpec,
    caches: Sequence[Slots],
    heads: Sequence[tuple[int, ...]],
    q: Float[Array, "B N H"] | Turned,
    q_pos: Int[Array, " B"],
) -> Float[Array, "B N H"]:
    """`attend` over caches among which a layer's KV heads are divided, at once.

    Args:
        spec: of the whole layer.
        heads: for each cache, which of the KV heads it has.
        q: queries of all heads, rotated or `turned`.
    """
    held = [Held(slots.k, slots.v, _seen(spec, slots, q_pos), mine) for slots, mine in zip(caches, heads, strict=True)]
    return divided_attention(q, held, scale=spec.scale)


def _seen(spec: LayerSpec, slots: Slots, q_pos: Int[Array, " B"]) -> Float[Array, "B K C"]:
    """Weights of the slots inside the layer's sliding window."""
    if spec.window is None:
        return slots.weight
    return jnp.where(slots.pos > q_pos[:, None, None] - spec.window, slots.weight, 0.0)


def places(pos: Int[Array, " B"], count: int) -> Int[Array, "B S"]:
    """Positions of `count` tokens that stand one after the other from `pos` on."""
    return pos[:, None] + jnp.arange(count, dtype=jnp.int32)


def insert_many(
    slots: Slots,
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    pos: Int[Array, "B S"],
    count: Int[Array, ""] | None = None,
) -> Slots:
    """Put S new tokens into each head's next slots, which are free, with weight 1.

    Args:
        count: how many of them, the first ones; all by default.
    """
    size = pos.shape[1]
    count = jnp.asarray(size, jnp.int32) if count is None else count
    rows, heads = _heads(slots.next)
    place = jnp.arange(size, dtype=jnp.int32)
    slot = jnp.where(place < count, slots.next[..., None] + place, slots.pos.shape[-1])  # out of range, hence dropped
    at = rows[..., None], heads[..., None], slot

    def written(array: Array, values: Any) -> Array:
        return array.at[at].set(values, mode="drop")

    return dataclasses.replace(
        slots,
        k=written(slots.k, jnp.swapaxes(k, 1, 2).astype(slots.k.dtype)),
        v=written(slots.v, jnp.swapaxes(v, 1, 2).astype(slots.v.dtype)),
        pos=written(slots.pos, pos[:, None]),
        weight=written(slots.weight, 1.0),
        next=slots.next + count,
        seen=slots.seen + count,
    )


def attend_many(
    spec: LayerSpec, slots: Slots, q: Float[Array, "B S N H"], q_pos: Int[Array, "B S"]
) -> Float[Array, "B S N H"]:
    """Attention of S rotated queries a row, each over the live slots of tokens up to its own position.

    `BLOCK` slots are taken at a time, as in flash attention (Dao et al. 2022), so that room is needed for the logits of a block only.
    """
    batch, count, heads, dim = q.shape
    size = slots.pos.shape[-1]
    block = min(BLOCK, size)
    grouped = jnp.moveaxis(q.reshape(batch, count, spec.num_kv_heads, -1, dim), 1, 3)  # [B, K, G, S, H]
    window = jnp.iinfo(jnp.int32).max if spec.window is None else spec.window

    def step(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, out = sums
        at = jnp.minimum(i * block, size - block)  # the last block overlaps the one before
        k, v, pos, weight = (
            jax.lax.dynamic_slice_in_dim(x, at, block, axis=2) for x in (slots.k, slots.v, slots.pos, slots.weight)
        )
        fresh = at + jnp.arange(block, dtype=jnp.int32) >= i * block
        seen = (weight > 0) & fresh
        before = q_pos[:, None, :, None] - pos[:, :, None]
        seen = (seen[:, :, None] & (before >= 0) & (before < window))[:, :, None]
        logits = jnp.einsum("bkgsh,bkch->bkgsc", grouped, k, preferred_element_type=jnp.float32) * spec.scale
        logits = jnp.where(seen, logits + jnp.log(jnp.maximum(weight, 1.0))[:, :, None, None], -jnp.inf)
        higher = jnp.maximum(highest, jnp.max(logits, axis=-1))
        kept = jnp.where(jnp.isfinite(highest), jnp.exp(highest - higher), 0.0)
        share = jnp.where(seen, jnp.exp(logits - jnp.where(jnp.isfinite(higher), higher, 0.0)[..., None]), 0.0)
        v = jnp.where((weight > 0)[..., None], v, jnp.zeros((), v.dtype))
        added = jnp.einsum("bkgsc,bkch->bkgsh", share.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return higher, total * kept + jnp.sum(share, axis=-1), out * kept[..., None] + added

    shape = grouped.shape[:-1]
    start = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(grouped.shape, jnp.float32)
    _, total, out = jax.lax.fori_loop(0, -(-size // block), step, start)
    return jnp.moveaxis(out / total[..., None], 3, 1).reshape(q.shape).astype(q.dtype)


def _heads(like: Int[Array, "B K"]) -> tuple[Int[Array, "B 1"], Int[Array, "1 K"]]:
    """Row and head indices that broadcast against one slot index a head."""
    batch, heads = like.shape
    return jnp.arange(batch, dtype=jnp.int32)[:, None], jnp.arange(heads, dtype=jnp.int32)[None, :]
