"""Quantisation: keys and values in a few bits, under any policy that leaves its cache alone once the prompt is read."""

import dataclasses
import math
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import packing
from kvjax.cache import LayerSpec, Slots
from kvjax.models.config import ModelConfig
from kvjax.packing import Bits, Packed
from kvjax.pallas_kernels.masking import MASKED

from .base import Carry, Memory, Policy, PolicyError, Stage, State, check_fields
from .full import Full
from .registry import register
from .wrapper import Wrapper

BLOCK = 512
"""Slots of a head that are unpacked at a time."""


@flax.struct.dataclass
class PackedSlots:
    """A cache in a few bits, but for its latest tokens. B rows, K KV heads, C slots, R residual tokens, E = R + 1, H head dim.

    It is as the latest query reads it, which has its own token and the R before it exact: what is to be packed then is packed when
    the next token comes. The token in slot s has its key exact at place s mod R, and its value at s mod (R + 1), as long as they are
    residual; slots below `next` are filled.

    Attributes:
        k: rotated keys; those up to the last multiple of R before the newest token count.
        v: values; those but for the newest one and the R before it count.
        k_recent, v_recent: exact keys and values of the latest slots.
        pos, next, seen: as in `Slots`.
    """

    k: Packed
    v: Packed
    k_recent: Float[Array, "B K R H"]
    v_recent: Float[Array, "B K E H"]
    pos: Int[Array, "B K C"]
    next: Int[Array, "B K"]
    seen: Int[Array, " B"]

    @property
    def live(self) -> Bool[Array, "B K C"]:
        """Which slots hold something."""
        return jnp.arange(self.pos.shape[-1], dtype=jnp.int32) < self.next[..., None]

    @property
    def k_packed(self) -> Int[Array, "B K"]:
        """How many slots have their keys packed."""
        residual = self.k_recent.shape[2]
        return jnp.maximum(self.next - 1, 0) // residual * residual

    @property
    def v_recent_slots(self) -> Int[Array, "B K E"]:
        """Slots of the values at each place of `v_recent`, negative where there is none."""
        places = self.v_recent.shape[2]
        last = self.next[..., None] - 1
        return last - (last - jnp.arange(places, dtype=jnp.int32)) % places


@dataclasses.dataclass(frozen=True)
class Quantized(Wrapper):
    """A policy whose keys and values are kept in a few bits; made by `quantized`.

    Attributes:
        policy: what is kept.
        bits, group, residual: see `KIVI`.
    """

    verb: ClassVar[str] = "quantized"
    memory: ClassVar[Memory] = "quantised"  # pyright: ignore[reportIncompatibleMethodOverride]
    stage: ClassVar[Stage] = "both"  # pyright: ignore[reportIncompatibleMethodOverride]

    bits: Bits = 2
    group: int = 32
    residual: int = 32

    def __post_init__(self) -> None:
        _check(self, self.bits, self.group, self.residual)

    def admit(self, policy: Policy) -> None:
        changed = [
            name
            for name in ("append", "attend", "compress")
            if getattr(type(policy), name) is not getattr(Policy, name)
        ]
        if changed:
            raise PolicyError(
                f"{self.name}: {policy.name!r} has its own way of keeping slots while decoding ({', '.join(changed)}), but packed "
                "groups of tokens are neither moved, merged nor evicted; give a policy that compresses the prompt alone, such as "
                "full, snapkv, chunkkv or catekv"
            )

    def capacity(self, spec: LayerSpec) -> int:
        """Slots to allocate, in whole groups and bytes."""
        return -(-self.policy.capacity(spec) // self._unit) * self._unit

    def init(self, spec: LayerSpec) -> State:
        return self._packed(spec, self.policy.init(spec))

    def prefill(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
        carry: Carry,
    ) -> tuple[PackedSlots, Carry]:
        slots, carry = self.policy.prefill(spec, q, k, v, lengths, carry)
        return self._packed(spec, slots), carry

    def append(
        self,
        spec: LayerSpec,
        state: PackedSlots,
        k: Float[Array, "B K H"],
        v: Float[Array, "B K H"],
        pos: Int[Array, " B"],
    ) -> PackedSlots:
        """A new token takes the places of residual ones that have been read for the last time, and are packed: R keys together."""
        size, slot = state.pos.shape[-1], state.next
        residual = state.k_recent.shape[2]
        rows, heads = (jnp.arange(n, dtype=jnp.int32) for n in slot.shape)
        at = rows[:, None], heads[None, :]
        k_place, v_place = slot % residual, slot % (residual + 1)

        where = jnp.where(
            slot > residual, slot - residual - 1, size
        )  # past the last, hence dropped, where there is none
        old = state.v_recent[*at, v_place]
        values = packing.put(state.v, old, where, self.bits, self._channels(spec), spec.dtype)

        # Not inside `cond`, through whose branches the packed keys would be copied.
        new = packing.pack(state.k_recent, self.bits, self.group, "slots", spec.dtype)
        due = ((k_place == 0) & (slot > 0))[..., None]
        k_recent = state.k_recent.at[*at, k_place].set(spec.rope.rotate(k, pos[:, None]).astype(spec.dtype))
        v_recent = state.v_recent.at[*at, v_place].set(v.astype(spec.dtype))

        def filled(x: Array, new: Array) -> Array:
            count = new.shape[2]
            where = ((slot // residual - 1) * count)[..., None] + jnp.arange(count, dtype=jnp.int32)
            return x.at[rows[:, None, None], heads[:, None], jnp.where(due, where, x.shape[2])].set(new, mode="drop")

        return PackedSlots(
            k=jax.tree.map(filled, state.k, new),
            v=values,
            k_recent=k_recent,
            v_recent=v_recent,
            pos=state.pos.at[*at, slot].set(pos[:, None]),
            next=slot + 1,
            seen=state.seen + 1,
        )

    def attend(
        self, spec: LayerSpec, state: PackedSlots, q: Float[Array, "B N H"], pos: Int[Array, " B"], carry: Carry
    ) -> tuple[Float[Array, "B N H"], PackedSlots, Carry]:
        visible = state.live
        if spec.window is not None:
            visible &= state.pos > pos[:, None, None] - spec.window
        q = spec.rope.rotate(q, pos[:, None])
        return packed_attention(q, state, visible, bits=self.bits, scale=spec.scale), state, carry

    def slots(self, spec: LayerSpec, state: PackedSlots) -> Slots:
        """All slots unpacked."""
        places = jnp.arange(state.pos.shape[-1], dtype=jnp.int32)
        packed_k, packed_v = (packing.unpack(x, self.bits).astype(spec.dtype) for x in (state.k, state.v))
        live = state.live[..., None]

        def joined(packed: Array, recent: Array, exact: Bool[Array, "B K C"]) -> Array:
            latest = recent[:, :, places % recent.shape[2]]
            return jnp.where(live, jnp.where(exact[..., None], latest, packed), 0)

        return Slots(
            k=joined(packed_k, state.k_recent, places >= state.k_packed[..., None]),
            v=joined(packed_v, state.v_recent, places >= state.next[..., None] - state.v_recent.shape[2]),
            pos=state.pos,
            weight=state.live.astype(jnp.float32),
            next=state.next,
            seen=state.seen,
        )

    def _packed(self, spec: LayerSpec, slots: Slots) -> PackedSlots:
        """A cache whose slots are filled from the left, packed."""
        size = self.capacity(spec)
        room = [(0, 0), (0, 0), (0, size - slots.pos.shape[-1])]
        k, v = (jnp.pad(x, [*room, (0, 0)]) for x in (slots.k, slots.v))
        residual = min(self.residual, -(-(size + 1) // self._unit) * self._unit)  # more is of no use
        state = PackedSlots(
            k=packing.pack(k, self.bits, self.group, "slots", spec.dtype),
            v=packing.pack(v, self.bits, self._channels(spec), "channels", spec.dtype),
            k_recent=jnp.zeros((*slots.next.shape, residual, spec.head_dim), spec.dtype),
            v_recent=jnp.zeros((*slots.next.shape, residual + 1, spec.head_dim), spec.dtype),
            pos=jnp.pad(slots.pos, room, constant_values=-1),
            next=slots.next,
            seen=slots.seen,
        )
        latest = state.k_packed[..., None] + jnp.arange(residual, dtype=jnp.int32)

        def taken(x: Float[Array, "B K C H"], slot: Int[Array, "B K P"]) -> Float[Array, "B K P H"]:
            return jnp.take_along_axis(x, slot[..., None], axis=2, mode="clip")

        return dataclasses.replace(
            state, k_recent=taken(k, latest), v_recent=taken(v, jnp.maximum(state.v_recent_slots, 0))
        )

    @property
    def _unit(self) -> int:
        """Slots that whole groups and whole bytes take."""
        return math.lcm(self.group, 8 // self.bits)

    def _channels(self, spec: LayerSpec) -> int:
        """Channels of a value's group."""
        return math.gcd(self.group, spec.head_dim)


@register
@dataclasses.dataclass(frozen=True)
class KIVI(Policy):
    """Keep everything, in a few bits (Liu et al. 2024, KIVI, section 3).

    Keys, some of whose channels are far larger than others, are quantised by the channel: `group` neighbouring tokens of one
    channel share a scale and a zero. Values are quantised by the token: `group` channels share them. The latest tokens stay
    exact: of values the last `residual`; of keys those since the last multiple of it, where so many are packed together. As in the
    published code, a query attends before its step packs: to its own token, and to what it pushes out of the residual, exactly. The
    prompt is read exactly. What attention reads is unpacked block by block.

    For another policy's cache in few bits see `quantized`.

    Attributes:
        bits: of a number, besides its share of scale and zero: 2, 4 or 8.
        group: numbers that share a scale and a zero; of values, whose group is no longer than a head, the largest divisor of
            both this and the head dim.
        residual: R, latest tokens that stay exact; a multiple of `group`, and of the 8 / bits tokens whose numbers share a byte.
            (The paper uses 32 and 128 for both.)
    """

    name: ClassVar[str] = "kivi"
    paper: ClassVar[str] = "Liu et al. 2024, KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache"
    keeps: ClassVar[str] = "every token, all but the latest in a few bits a number"
    memory: ClassVar[Memory] = "quantised"
    stage: ClassVar[Stage] = "both"

    bits: Bits = 2
    group: int = 32
    residual: int = 32

    def __post_init__(self) -> None:
        _check(self, self.bits, self.group, self.residual)

    def bind(self, config: ModelConfig) -> Policy:
        return self._quantized.bind(config)

    def capacity(self, spec: LayerSpec) -> int:
        return self._quantized.capacity(spec)

    def init(self, spec: LayerSpec) -> State:
        raise PolicyError(f"{self.name}: bind(config) gives the policy that runs")

    @property
    def _quantized(self) -> Quantized:
        return Quantized(Full(), self.bits, self.group, self.residual)


def _check(policy: Policy, bits: int, group: int, residual: int) -> None:
    """Raise `PolicyError` unless the hyperparameters of `policy` fit together."""
    check_fields(policy, group=1, residual=1)
    if residual % group:
        raise PolicyError(
            f"{policy.name}: residual={residual} and group={group}; keys are packed when `residual` tokens have come together, in "
            "whole groups, so give a multiple of group"
        )
    if residual % (8 // bits):
        raise PolicyError(
            f"{policy.name}: residual={residual} and bits={bits}; the numbers of {8 // bits} tokens share a byte, so give a multiple "
            f"of {8 // bits} as residual"
        )


def quantized(policy: Policy, bits: Bits = 2, group: int = 32, residual: int = 32) -> Quantized:
    """Keep what a policy keeps in a few bits, as `KIVI` does: `quantized(ChunkKV(budget=512), bits=4)`.

    The policy must leave its cache alone after the prompt, but for adding new tokens: full, snapkv, pyramidkv, chunkkv,
    expected_attention, or both kinds of heads of catekv. Packed groups are not changed again, so policies that evict or merge while
    they decode, that recall, or that have a store of their own are refused. `by_head` and `by_layer` take quantised policies beside others.

    Args:
        policy: any such, compositions included.
        bits, group, residual: see `KIVI`.

    Raises:
        PolicyError: a number is out of range, or (once a model is known) the policy is none of these.
    """
    return Quantized(policy, bits, group, residual)


def packed_attention(
    q: Float[Array, "B N H"], state: PackedSlots, visible: Bool[Array, "B K C"], *, bits: Bits, scale: float
) -> Float[Array, "B N H"]:
    """Softmax attention over packed slots, of which `BLOCK` at a time are unpacked; exact where keys and values are.

    A kernel that reads packed keys and values would take the place of this function.

    Args:
        q: rotated queries.
        visible: slots that count.
        scale: factor on the logits.
    """
    batch, heads, dim = q.shape
    _, kv_heads, size = visible.shape
    recent = state.v_recent.shape[2]
    grouped = q.reshape(batch, kv_heads, -1, dim).astype(jnp.float32)
    blocks, block = _blocks(size, math.lcm(size // state.k.scale.shape[2], 8 // bits))

    def products(keys: Float[Array, "B K C H"]) -> Float[Array, "B K G C"]:
        return jnp.einsum("bkgh,bkch->bkgc", grouped, keys.astype(jnp.float32)) * scale

    def write(i: Int[Array, ""], logits: Float[Array, "B K G C"]) -> Float[Array, "B K G C"]:
        new = products(packing.unpack(state.k.part(i * block, block, bits), bits))
        return jax.lax.dynamic_update_slice_in_dim(logits, new, i * block, axis=3)

    logits = jax.lax.fori_loop(0, blocks, write, jnp.zeros((*grouped.shape[:3], size), jnp.float32))

    # The latest R + 1 slots apart: their values are exact, and the keys of those that are not packed yet.
    start = jnp.maximum(state.next - recent, 0)[..., None]
    latest = start + jnp.arange(recent, dtype=jnp.int32)

    def among_latest(x: Array) -> Array:
        """Of a [B, K, X, C], the latest slots' part, number by number: for slices a compiler would lay out all of it anew."""
        rows, heads, others = jnp.ix_(*(jnp.arange(n, dtype=jnp.int32) for n in x.shape[:3]))
        return x.at[rows[..., None], heads[..., None], others[..., None], latest[:, :, None]].get(mode="clip")

    def at_places(recent: Float[Array, "B K P H"]) -> Float[Array, "B K E H"]:
        return jnp.take_along_axis(recent, latest[..., None] % recent.shape[2], axis=2)

    exact = (latest >= state.k_packed[..., None])[:, :, None]
    late_logits = jnp.where(exact, products(at_places(state.k_recent)), among_latest(logits))
    late_visible = among_latest(visible[:, :, None]) & (latest < state.next[..., None])[:, :, None]
    late_logits = jnp.where(late_visible, late_logits, MASKED)
    packed = (visible & (jnp.arange(size, dtype=jnp.int32) < start))[:, :, None]
    logits = jnp.where(packed, logits, MASKED)

    most = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), jnp.max(late_logits, axis=-1, keepdims=True))
    share = jnp.where(packed, jnp.exp(logits - most), 0.0)
    late_share = jnp.where(late_visible, jnp.exp(late_logits - most), 0.0)
    total = jnp.sum(share, axis=-1, keepdims=True) + jnp.sum(late_share, axis=-1, keepdims=True)

    def add(i: Int[Array, ""], out: Float[Array, "B K G H"]) -> Float[Array, "B K G H"]:
        values = packing.unpack(state.v.part(i * block, block, bits), bits)
        weights, there = (jax.lax.dynamic_slice_in_dim(x, i * block, block, axis=3) for x in (share, packed))
        values = jnp.where(jnp.swapaxes(there, 2, 3), values, 0.0)
        return out + jnp.einsum("bkgc,bkch->bkgh", weights, values)

    late_values = jnp.where(jnp.swapaxes(late_visible, 2, 3), at_places(state.v_recent).astype(jnp.float32), 0.0)
    out = jax.lax.fori_loop(0, blocks, add, jnp.einsum("bkgr,bkrh->bkgh", late_share, late_values))
    out /= jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    return out.reshape(batch, heads, dim).astype(q.dtype)


def _blocks(size: int, group: int) -> tuple[int, int]:
    """How many blocks of how many slots: whole groups, up to `BLOCK` slots, that divide the cache."""
    groups = size // group
    most = max(BLOCK // group, 1)
    count = next(n for n in range(min(most, groups), 0, -1) if groups % n == 0)
    return groups // count, count * group
