"""TurboQuant's scheme of `quantized`: a low-bit cache of rotated vectors, each coded when it comes."""

import dataclasses
import math
from typing import Any, Literal, Self

import einops
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, PromptKV, Token, TokenBlock, codebook, packing
from kvjax.cache.codebook import Coded
from kvjax.cache.packing import Bits
from kvjax.pallas_kernels.masking import MASKED

from ..layer import Carry, check_reads_blocks
from .low_bit import LowBitLayer

Values = Literal["levels", "rotated"]
"""How values are stored: evenly spaced entries per group of channels, or as keys are."""


@flax.struct.dataclass
class RotatedCache:
    """A low-bit cache of rotated vectors. B rows, K KV heads, C slots, H head dim.

    Attributes:
        k: keys, rotated to their positions, and then by the matrix that equalises their coordinates.
        v: values, as keys are (`Coded`), or in groups of channels (`packing.Packed`).
        pos, next, seen, slot_shards: as in `LayerCache`. Slots below `next` are filled.
    """

    k: Coded
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
class RotatedLayer(LowBitLayer[Any]):
    """A layer that codes keys and values when they come. A token's own step and a block's attention are exact.

    Attributes:
        bits, group, values, signs: see `TurboQuant`.
    """

    bits: Bits = dataclasses.field(kw_only=True)
    group: int = dataclasses.field(kw_only=True)
    values: Values = dataclasses.field(kw_only=True)
    signs: int | None = dataclasses.field(kw_only=True)

    @property
    def shards_own_store(self) -> bool:
        return True

    @property
    def capacity(self) -> int:
        """Slots to allocate, in whole bytes."""
        return -(-self.inner.capacity // self._count) * self._count

    def init(self, total: Int[Array, " B"] | None = None) -> RotatedCache:
        return self._coded(self.inner.init(total))

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[RotatedCache, Carry]:
        kept, carry = self.inner.prefill(prompt, carry)
        return self._coded(kept), carry

    def append(self, state: RotatedCache, token: Token) -> RotatedCache:
        slot, v = token.slot(state.next), token.v.astype(self.spec.dtype)
        own = slot if state.slot_shards == 1 else cache.local_slot(state, slot)
        rows, heads = (jnp.arange(n, dtype=jnp.int32) for n in slot.shape)
        return dataclasses.replace(
            state,
            k=codebook.put(state.k, token.k_rotated.astype(self.spec.dtype), own, self.bits, self._matrix),
            v=codebook.put(state.v, v, own, self.bits, self._matrix)
            if self._rotated
            else packing.put(state.v, v, own, self.bits, self._channels, self.spec.dtype),
            pos=state.pos.at[rows[:, None], heads[None, :], slot].set(token.position[:, None], mode="drop"),
            next=state.next + token.count(state.next),
            seen=state.seen + token.count(state.seen),
        )

    def attend(
        self, state: RotatedCache, token: Token, carry: Carry
    ) -> tuple[Float[Array, "B N H"], RotatedCache, Carry]:
        spec, slots = self.spec, jnp.arange(state.pos.shape[-1], dtype=jnp.int32)
        visible = slots < state.next[..., None] - 1  # the newest token is read exactly instead
        if spec.window is not None:
            visible &= state.pos > token.position[:, None, None] - spec.window
        own = token.k_rotated.astype(spec.dtype), token.v.astype(spec.dtype)
        options: dict[str, Any] = {"bits": self.bits, "scale": spec.scale, "rotated": self._rotated}
        if state.slot_shards == 1:
            return coded_attention(token.q_rotated, *own, state, visible, self._matrix, **options)[0], state, carry
        visible, newest = cache.local_part(visible, state.slot_shards), cache.local_slot(state, state.next - 1)
        mine = newest < state.k.factor.shape[2]
        part = coded_attention(token.q_rotated, *own, state, visible, self._matrix, **options, counts=mine)
        return cache.merged(*part, state.slot_shards), state, carry

    def read_block(
        self, state: RotatedCache, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], RotatedCache, Carry]:
        check_reads_blocks(self)
        held = cache.insert_block(self.view(state), block)
        return cache.attend_block(self.spec, held, block), self._with(state, block), carry

    def _with(self, state: RotatedCache, block: TokenBlock) -> RotatedCache:
        """Return the state with the tokens of a block appended."""
        start, stop = state.next, state.next + block.count[:, None]
        width = -(-(block.size + self._count - 1) // self._count) * self._count
        slot = (start // self._count * self._count)[..., None] + jnp.arange(width, dtype=jnp.int32)

        def run(x: Float[Array, "B S K H"]) -> Float[Array, "B K W H"]:
            new = jnp.swapaxes(x, 1, 2).astype(self.spec.dtype)
            return jnp.take_along_axis(new, (slot - start[..., None])[..., None], axis=2, mode="clip")

        keys, values = run(block.k_rotated), run(block.v)
        places = jnp.arange(state.pos.shape[-1], dtype=jnp.int32)
        fresh = (places >= start[..., None]) & (places < stop[..., None])
        return RotatedCache(
            k=codebook.put_run(state.k, keys, start, stop, self.bits, self._matrix),
            v=codebook.put_run(state.v, values, start, stop, self.bits, self._matrix)
            if self._rotated
            else packing.put_run(state.v, values, start, stop, self.bits, self._channels, self.spec.dtype),
            pos=jnp.where(fresh, block.position[:, None, None] + places - start[..., None], state.pos),
            next=stop,
            seen=state.seen + block.count,
        )

    def view(self, state: RotatedCache) -> LayerCache:
        """All slots, decoded."""

        def vectors(x: Any, *, rotated: bool) -> Float[Array, "B K C H"]:
            if rotated:
                found = codebook.rotate_back(codebook.decode(x, self.bits), self._matrix)
            else:
                found = packing.unpack(x, self.bits)
            return jnp.where(state.live[..., None], found, 0.0).astype(self.spec.dtype)

        k, v = vectors(state.k, rotated=True), vectors(state.v, rotated=self._rotated)
        return LayerCache(k, v, state.pos, state.live.astype(jnp.float32), state.next, state.seen)

    def _coded(self, filled: LayerCache) -> RotatedCache:
        """Code a cache whose slots are filled from the left."""
        padding = [(0, 0), (0, 0), (0, self.capacity - filled.pos.shape[-1])]
        live = jnp.arange(self.capacity, dtype=jnp.int32) < filled.next[..., None]
        k, v = (
            jnp.where(live[..., None], jnp.pad(x, [*padding, (0, 0)]), jnp.zeros((), x.dtype))
            for x in (filled.k, filled.v)
        )
        factor = jnp.float16 if self.spec.dtype.itemsize == 2 else self.spec.dtype
        return RotatedCache(
            k=codebook.encode(k, self.bits, self._matrix, factor),
            v=codebook.encode(v, self.bits, self._matrix, factor)
            if self._rotated
            else packing.pack(v, self.bits, self._channels, "channels", self.spec.dtype),
            pos=jnp.pad(filled.pos, padding, constant_values=-1),
            next=filled.next,
            seen=filled.seen,
        )

    @property
    def _rotated(self) -> bool:
        """Whether values are stored as keys are."""
        return self.values == "rotated"

    @property
    def _matrix(self) -> np.ndarray:
        """Π, the rotation of this layer."""
        signs = None if self.signs is None else self.signs + self.spec.layer
        return codebook.rotation(self.spec.head_dim, signs)

    @property
    def _channels(self) -> int:
        """Channels of a value's group."""
        return math.gcd(self.group, self.spec.head_dim)

    @property
    def _count(self) -> int:
        """Number of slots that share a byte."""
        return 8 // self.bits


def coded_attention(
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    state: RotatedCache,
    visible: Bool[Array, "B K C"],
    matrix: np.ndarray,
    *,
    bits: Bits,
    scale: float,
    rotated: bool,
    counts: Bool[Array, "B K"] | None = None,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
    """Softmax attention over a coded cache, which is decoded block by block, and over one exact token.

    The query is rotated once, and so is the sum of rotated values. No key is rotated back.

    Args:
        q, k, v: the exact token, with rotated query and key.
        state: the cache.
        visible: slots to attend to.
        matrix: Π.
        bits: bits per code.
        scale: factor on the logits.
        rotated: whether values are rotated.
        counts: heads that attend to the exact token. None for all.

    Returns:
        The attention output, and the logsumexp of the logits, -inf where nothing is attended to.
    """
    _, kv_heads, size = visible.shape
    grouped = einops.rearrange(q, "b (k g) h -> b k g h", k=kv_heads).astype(jnp.float32)
    turned = codebook.rotate(grouped, matrix)
    blocks, block = packing.blocks(size, 8 // bits)

    def write(i: Int[Array, ""], logits: Float[Array, "B K G C"]) -> Float[Array, "B K G C"]:
        keys = codebook.decode(state.k.part(i * block, block, bits), bits)
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
        part = state.v.part(i * block, block, bits)
        values = codebook.decode(part, bits) if rotated else packing.unpack(part, bits)
        weights, valid = (jax.lax.dynamic_slice_in_dim(x, i * block, block, axis=3) for x in (share, seen))
        values = jnp.where(jnp.swapaxes(valid, 2, 3), values, 0.0)
        return out + jnp.einsum("bkgc,bkch->bkgh", weights, values)

    out = jax.lax.fori_loop(0, blocks, add, jnp.zeros_like(grouped))
    out = codebook.rotate_back(out, matrix) if rotated else out
    out += own * v.astype(jnp.float32)[:, :, None]
    out /= jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    logsumexp = jnp.where(total > 0, highest + jnp.log(total), -jnp.inf)
    return (
        einops.rearrange(out, "b k g h -> b (k g) h").astype(q.dtype),
        einops.rearrange(logsumexp, "b k g 1 -> b (k g)"),
    )
