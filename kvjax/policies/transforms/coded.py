"""Schemes of `quantized` that code every token when it comes: TurboQuant's, and 8-bit floats."""

import dataclasses
import math
from typing import Any, Self

import einops
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, PromptKV, Token, TokenBlock, codebook, packing
from kvjax.cache.codecs import Codec, Floats
from kvjax.cache.float8 import Float8
from kvjax.pallas_kernels import Factors, Float8Codes, Float8Factor, decode_attention, write_slots
from kvjax.pallas_kernels.masking import MASKED
from kvjax.pallas_kernels.sinks import with_sinks

from ..layer import Carry, check_reads_blocks
from .low_bit import LowBitLayer


@flax.struct.dataclass
class CodedCache:
    """A cache of coded vectors. B rows, K KV heads, C slots.

    Attributes:
        k: store of the keys, rotated to their positions, of the layer's codec.
        v: store of the values.
        pos, next, seen, slot_shards: as in `LayerCache`. Slots below `next` are filled.
    """

    k: Any
    v: Any
    pos: Int[Array, "B K C"]
    next: Int[Array, "B K"]
    seen: Int[Array, " B"]
    slot_shards: int = flax.struct.field(pytree_node=False, default=1, kw_only=True)

    @property
    def cache(self) -> Self:
        """The state itself, for code that reads the `cache` of a state."""
        return self

    @property
    def slot_axes(self) -> tuple[Any, Any]:
        """Slot axis of each array of keys and values."""
        return self.k.slot_axes, self.v.slot_axes

    @property
    def live(self) -> Bool[Array, "B K C"]:
        """Slots that contain a token."""
        return jnp.arange(self.pos.shape[-1], dtype=jnp.int32) < self.next[..., None]


@dataclasses.dataclass(frozen=True)
class CodedLayer(LowBitLayer[Any]):
    """A layer that codes keys and values when they come. A token's own step and a block's attention are exact.

    Attributes:
        keys, values: how keys and values are stored.
    """

    keys: Codec = dataclasses.field(kw_only=True)
    values: Codec = dataclasses.field(kw_only=True)

    @property
    def shards_own_store(self) -> bool:
        return True

    @property
    def capacity(self) -> int:
        """Slots to allocate, in whole bytes."""
        return -(-self.inner.capacity // self._run) * self._run

    def init(self, total: Int[Array, " B"] | None = None) -> CodedCache:
        return self._coded(self.inner.init(total))

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[CodedCache, Carry]:
        kept, carry = self.inner.prefill(prompt, carry)
        return self._coded(kept), carry

    def append(self, state: CodedCache, token: Token) -> CodedCache:
        if self._float8 and state.slot_shards == 1 and token.v.dtype == self.spec.dtype:
            return self._append_at_once(state, token)
        at = state.next if state.slot_shards == 1 else cache.local_slot(state, state.next)
        slot, (k, v) = token.slot(at), (x.astype(self.spec.dtype) for x in (token.k_rotated, token.v))
        pos, following, seen = write_slots(
            [state.pos], state.next, [token.position[:, None]], [state.next, state.seen], live=token.live
        )
        k, v = self.keys.put(state.k, k, slot), self.values.put(state.v, v, slot)
        return dataclasses.replace(state, k=k, v=v, pos=pos, next=following, seen=seen)

    def _append_at_once(self, state: CodedCache, token: Token) -> CodedCache:
        """`append` in one call of `write_slots`, which codes the vectors as well."""
        arrays = [state.k.codes, state.k.factor, state.v.codes, state.v.factor, state.pos]
        new: list[Any] = [kind(x) for x in (token.key, token.v) for kind in (Float8Codes, Float8Factor)]
        new.append(token.position[:, None])
        *stores, pos, following, seen = write_slots(arrays, state.next, new, [state.next, state.seen], live=token.live)
        k, v = Float8(*stores[:2]), Float8(*stores[2:])
        return dataclasses.replace(state, k=k, v=v, pos=pos, next=following, seen=seen)

    def attend(self, state: CodedCache, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], CodedCache, Carry]:
        spec, slots = self.spec, jnp.arange(state.pos.shape[-1], dtype=jnp.int32)
        visible = slots < state.next[..., None] - 1  # the newest token is read exactly instead
        if spec.window is not None:
            visible &= state.pos > token.position[:, None, None] - spec.window
        given = token.q_rotated, token.k_rotated.astype(spec.dtype), token.v.astype(spec.dtype), state
        if state.slot_shards == 1:
            return with_sinks(*self._attention(*given, visible), token.sinks), state, carry
        newest, size = state.next - 1, cache.local_slots(state.pos.shape[-1], state.slot_shards)
        mine = cache.local_slot(state, newest) < size
        part = self._attention(*given, cache.local_part(visible, state.slot_shards), mine)
        return cache.merged(*part, state.slot_shards, token.sinks), state, carry

    def _attention(
        self,
        q: Float[Array, "B N H"],
        k: Float[Array, "B K H"],
        v: Float[Array, "B K H"],
        state: CodedCache,
        visible: Bool[Array, "B K C"],
        counts: Bool[Array, "B K"] | None = None,
    ) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
        """`coded_attention`, by the kernels of `decode_attention` if they read both codecs."""
        if self._float8:
            return float8_attention(q, k, v, state, visible, scale=self.spec.scale, counts=counts)
        codecs = self.keys, self.values
        return coded_attention(q, k, v, state, visible, codecs, scale=self.spec.scale, counts=counts)

    def read_block(
        self, state: CodedCache, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], CodedCache, Carry]:
        check_reads_blocks(self)
        held = cache.insert_block(self.view(state), block)
        return cache.attend_block(self.spec, held, block), self._with(state, block), carry

    def _with(self, state: CodedCache, block: TokenBlock) -> CodedCache:
        """Return the state with the tokens of a block appended."""
        start, stop = state.next, state.next + block.count[:, None]

        def put(codec: Codec, stored: Any, x: Float[Array, "B S K H"]) -> Any:
            width = -(-(block.size + codec.run - 1) // codec.run) * codec.run
            slot = (start // codec.run * codec.run)[..., None] + jnp.arange(width, dtype=jnp.int32)
            new = jnp.swapaxes(x, 1, 2).astype(self.spec.dtype)
            run = jnp.take_along_axis(new, (slot - start[..., None])[..., None], axis=2, mode="clip")
            return codec.put_run(stored, run, start, stop)

        places = jnp.arange(state.pos.shape[-1], dtype=jnp.int32)
        fresh = (places >= start[..., None]) & (places < stop[..., None])
        return CodedCache(
            k=put(self.keys, state.k, block.k_rotated),
            v=put(self.values, state.v, block.v),
            pos=jnp.where(fresh, block.position[:, None, None] + places - start[..., None], state.pos),
            next=stop,
            seen=state.seen + block.count,
        )

    def view(self, state: CodedCache) -> LayerCache:
        """All slots, decoded."""

        def vectors(codec: Codec, stored: Any) -> Float[Array, "B K C H"]:
            found = codec.decode(stored)
            found = found if codec.matrix is None else codebook.rotate_back(found, codec.matrix)
            return jnp.where(state.live[..., None], found, 0.0).astype(self.spec.dtype)

        k, v = vectors(self.keys, state.k), vectors(self.values, state.v)
        return LayerCache(k, v, state.pos, state.live.astype(jnp.float32), state.next, state.seen)

    def _coded(self, filled: LayerCache) -> CodedCache:
        """Code a cache whose slots are filled from the left."""
        padding = [(0, 0), (0, 0), (0, self.capacity - filled.pos.shape[-1])]
        live = jnp.arange(self.capacity, dtype=jnp.int32) < filled.next[..., None]
        k, v = (
            jnp.where(live[..., None], jnp.pad(x, [*padding, (0, 0)]), jnp.zeros((), x.dtype))
            for x in (filled.k, filled.v)
        )
        return CodedCache(
            k=self.keys.encode(k),
            v=self.values.encode(v),
            pos=jnp.pad(filled.pos, padding, constant_values=-1),
            next=filled.next,
            seen=filled.seen,
        )

    @property
    def _float8(self) -> bool:
        return self.keys == self.values == Floats()

    @property
    def _run(self) -> int:
        """Number of slots that share bytes in keys or values."""
        return math.lcm(self.keys.run, self.values.run)


def float8_attention(
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    state: CodedCache,
    visible: Bool[Array, "B K C"],
    *,
    scale: float,
    counts: Bool[Array, "B K"] | None = None,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
    """`coded_attention` over 8-bit floats, which a kernel reads in place."""
    factors = Factors(state.k.factor, state.v.factor)
    part = decode_attention(q, state.k.codes, state.v.codes, visible.astype(jnp.float32), scale=scale, factors=factors)
    grouped = einops.rearrange(q, "b (k g) h -> b k g h", k=visible.shape[1]).astype(jnp.float32)
    own = jnp.einsum("bkgh,bkh->bkg", grouped, k.astype(jnp.float32)) * scale
    own = own if counts is None else jnp.where(counts[..., None], own, -jnp.inf)
    own, value = einops.rearrange(own, "b k g -> b (k g)"), jnp.repeat(v, grouped.shape[2], axis=1)
    total = jnp.logaddexp(part.logsumexp, own)
    there = jnp.where(jnp.isfinite(total), total, 0.0)
    old, new = (jnp.exp(x - there)[..., None] for x in (part.logsumexp, own))
    out = old * part.out.astype(jnp.float32) + new * value.astype(jnp.float32)
    return out.astype(q.dtype), total


def coded_attention(
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    state: CodedCache,
    visible: Bool[Array, "B K C"],
    codecs: tuple[Codec, Codec],
    *,
    scale: float,
    counts: Bool[Array, "B K"] | None = None,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
    """Softmax attention over a coded cache, which is decoded block by block, and over one exact token.

    If keys or values are rotated, the query is rotated once, and so is the sum of values. No key is rotated back.

    Args:
        q, k, v: the exact token, with rotated query and key.
        state: the cache.
        visible: slots to attend to.
        codecs: those of keys and of values.
        scale: factor on the logits.
        counts: heads that attend to the exact token. None for all.

    Returns:
        The attention output, and the logsumexp of the logits, -inf where nothing is attended to.
    """
    _, kv_heads, size = visible.shape
    grouped = einops.rearrange(q, "b (k g) h -> b k g h", k=kv_heads).astype(jnp.float32)
    of_keys, of_values = codecs
    turned = grouped if of_keys.matrix is None else codebook.rotate(grouped, of_keys.matrix)
    blocks, block = packing.blocks(size, math.lcm(of_keys.run, of_values.run))

    def write(i: Int[Array, ""], logits: Float[Array, "B K G C"]) -> Float[Array, "B K G C"]:
        keys = of_keys.decode(of_keys.part(state.k, i * block, block))
        return jax.lax.dynamic_update_slice_in_dim(
            logits, jnp.einsum("bkgh,bkch->bkgc", turned, keys) * scale, i * block, axis=3
        )

    logits = jax.lax.fori_loop(0, blocks, write, jnp.zeros((*grouped.shape[:3], size), jnp.float32))
    seen = visible[:, :, None]
    logits = jnp.where(seen, logits, MASKED)
    own = jnp.einsum("bkgh,bkh->bkg", grouped, k.astype(jnp.float32))[..., None] * scale
    own = own if counts is None else jnp.where(counts[..., None, None], own, MASKED)
    highest = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), own)
    share, own = jnp.where(seen, jnp.exp(logits - highest), 0.0), jnp.exp(own - highest)
    own = own if counts is None else jnp.where(counts[..., None, None], own, 0.0)
    total = jnp.sum(share, axis=-1, keepdims=True) + own

    def add(i: Int[Array, ""], out: Float[Array, "B K G H"]) -> Float[Array, "B K G H"]:
        values = of_values.decode(of_values.part(state.v, i * block, block))
        weights, valid = (jax.lax.dynamic_slice_in_dim(x, i * block, block, axis=3) for x in (share, seen))
        values = jnp.where(jnp.swapaxes(valid, 2, 3), values, 0.0)
        return out + jnp.einsum("bkgc,bkch->bkgh", weights, values)

    out = jax.lax.fori_loop(0, blocks, add, jnp.zeros_like(grouped))
    out = out if of_values.matrix is None else codebook.rotate_back(out, of_values.matrix)
    out += own * v.astype(jnp.float32)[:, :, None]
    out /= jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    logsumexp = jnp.where(total > 0, highest + jnp.log(total), -jnp.inf)
    return (
        einops.rearrange(out, "b k g h -> b (k g) h").astype(q.dtype),
        einops.rearrange(logsumexp, "b k g 1 -> b (k g)"),
    )
