"""Quantisation: keys and values in a few bits, under any policy that leaves its cache alone once the prompt is read."""

import dataclasses
import math
from typing import Any, ClassVar, Literal, Self

import einops
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, Prompt, Token, TokenBlock, packing
from kvjax.cache.packing import Bits, Packed
from kvjax.models.config import ModelConfig
from kvjax.pallas_kernels.masking import MASKED

from ..base import Carry, Layer, Policy, Traits
from ..fields import check_fields
from ..info import PolicyError, PolicyInfo
from .rotated import RotatedLayer, Values
from .wrapper import Wrapper


@flax.struct.dataclass
class PackedCache:
    """A cache in a few bits, but for its latest tokens. B rows, K KV heads, C slots, R residual tokens, E = R + 1, H head dim.

    It is as the latest query reads it, which has its own token and the R before it exact: what is to be packed then is packed when
    the next token comes. The token in slot s has its key exact at place s mod R, and its value at s mod (R + 1), as long as they are
    residual; slots below `next` are filled.

    Attributes:
        k: rotated keys; those up to the last multiple of R before the newest token count.
        v: values; those but for the newest one and the R before it count.
        k_recent, v_recent: exact keys and values of the latest slots.
        pos, next, seen, dealt: as in `LayerCache`. What is exact is on every device.
    """

    k: Packed
    v: Packed
    k_recent: Float[Array, "B K R H"]
    v_recent: Float[Array, "B K E H"]
    pos: Int[Array, "B K C"]
    next: Int[Array, "B K"]
    seen: Int[Array, " B"]
    dealt: int = flax.struct.field(pytree_node=False, default=1, kw_only=True)

    @property
    def cache(self) -> Self:
        """Itself, as of a `LayerCache`."""
        return self

    @property
    def slot_axes(self) -> tuple[Any, Any]:
        """Along which axis each array of keys and values has slots, or what several of them have together."""
        return self.k.slot_axes, self.v.slot_axes

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
        return _latest(self.next, self.v_recent.shape[2])


def _latest(following: Int[Array, "B K"], places: int) -> Int[Array, "B K E"]:
    """The latest slot that takes each of so many places in turn; negative where there is none."""
    last = following[..., None] - 1
    return last - (last - jnp.arange(places, dtype=jnp.int32)) % places


@dataclasses.dataclass(frozen=True)
class Quantized(Wrapper):
    """A policy whose keys and values are kept in a few bits; made by `quantized`.

    Attributes:
        policy: what is kept.
        bits, group: see `KIVI` and `TurboQuant`.
        residual: of "kivi", see `KIVI`.
        scheme: "kivi" or "turboquant".
        values, signs, exact_layers: of "turboquant", see `TurboQuant`.
    """

    transform: ClassVar[str] = "quantized"

    bits: Bits = 2
    group: int = 32
    residual: int = 32
    scheme: Literal["kivi", "turboquant"] = "kivi"
    values: Values = "levels"
    signs: int | None = None
    exact_layers: int = 0

    def __post_init__(self) -> None:
        others = ("residual",) if self.scheme == "turboquant" else ("values", "signs", "exact_layers")
        for field in dataclasses.fields(self):
            if field.name in others and getattr(self, field.name) != field.default:
                raise PolicyError(
                    f"quantized: {field.name}={getattr(self, field.name)!r} means nothing to scheme={self.scheme!r}; leave it out, or give "
                    "the other scheme"
                )
        if self.scheme == "turboquant":
            check_codes(self, self.bits)
        else:
            check_packing(self, self.bits, self.group, self.residual)

    @property
    def info(self) -> PolicyInfo:
        about = dataclasses.replace(super().info, memory="quantized", stage="both")
        if self.scheme == "turboquant":
            return dataclasses.replace(about, name=f"turboquant({self.policy.info.name})")
        return about

    def bind(self, config: ModelConfig) -> Policy:
        bound = super().bind(config)
        for spec in cache.layer_specs(config, 1, 64, 64, jnp.float32):
            bound.layer(spec)  # raises where a layer cannot be quantised
        return bound

    def layer(self, spec: LayerSpec) -> Layer[Any]:
        inner = self.policy.layer(spec)
        traits = inner.traits
        if not traits.plain or traits.compression != "never":
            raise PolicyError(
                f"{self.info.name}: {self.policy.info.name!r} has its own way of keeping tokens while decoding, but packed groups of "
                "tokens are neither moved, merged nor evicted; give a policy that compresses the prompt alone, such as full, snapkv, "
                "chunkkv or catekv"
            )
        if self.policy.info.fits:
            raise PolicyError(
                f"{self.info.name}: {self.policy.info.name!r} gives slots fitted weights, for which packed slots have no place; give a policy "
                "whose slots are single tokens, such as snapkv"
            )
        moves = inner.max_kept < spec.max_tokens  # which what is packed does not
        traits = dataclasses.replace(
            QuantizedLayer.traits,
            reading="whole" if moves else "blocks",
            replays=traits.replays,
            surroundings=traits.surroundings,
            deals_store=self.scheme == "turboquant" or cache.RUN % math.lcm(self.group, 8 // self.bits) == 0,
        )
        if self.scheme == "kivi":
            return QuantizedLayer(self, spec, traits)
        if min(spec.layer, spec.num_layers - 1 - spec.layer) < self.exact_layers:
            return inner
        if spec.head_dim & (spec.head_dim - 1):
            raise PolicyError(
                f"{self.info.name}: heads of {spec.head_dim} numbers; scheme='turboquant' rotates by a Hadamard matrix, whose size is a "
                "power of two, so take kivi, or scheme='kivi', for this model"
            )
        options: dict[str, Any] = {name: getattr(self, name) for name in ("bits", "group", "values", "signs")}
        return RotatedLayer(self, spec, traits, inner=inner, **options)


@dataclasses.dataclass(frozen=True)
class QuantizedLayer(Layer[Quantized]):
    """One layer, packed when its prompt is read and whenever so many new tokens have come; see `Quantized`."""

    traits: Traits = Traits(has_own_store=True, reading="blocks")

    @property
    def capacity(self) -> int:
        """Slots to allocate, in whole groups and bytes."""
        return -(-self._inner.capacity // self._unit) * self._unit

    def init(self, total: Int[Array, " B"] | None = None) -> PackedCache:
        return self._packed(self._inner.init(total))

    def prefill(self, prompt: Prompt, carry: Carry) -> tuple[PackedCache, Carry]:
        kept, carry = self._inner.prefill(prompt, carry)
        return self._packed(kept), carry

    def append(self, state: PackedCache, token: Token) -> PackedCache:
        """A new token takes the places of residual ones that have been read for the last time, and are packed: R keys together."""
        dtype, bits = self.spec.dtype, self.policy.bits
        size, slot = state.pos.shape[-1], state.next
        residual = state.k_recent.shape[2]
        rows, heads = (jnp.arange(n, dtype=jnp.int32) for n in slot.shape)
        at = rows[:, None], heads[None, :]
        k_place, v_place = slot % residual, slot % (residual + 1)

        # Past the last, hence dropped, where there is none.
        where = jnp.where(slot > residual, slot - residual - 1, size)
        where = where if state.dealt == 1 else cache.own_slot(state, where)
        old = state.v_recent[*at, v_place]
        values = packing.put(state.v, old, where, bits, self._channels, dtype)

        # Not inside `cond`, through whose branches the packed keys would be copied.
        new = packing.pack(state.k_recent, bits, self.policy.group, "slots", dtype)
        is_complete = ((k_place == 0) & (slot > 0))[..., None]
        k_recent = state.k_recent.at[*at, k_place].set(token.k_rotated.astype(dtype))
        v_recent = state.v_recent.at[*at, v_place].set(token.v.astype(dtype))

        def filled(x: Array, new: Array) -> Array:
            each = residual // new.shape[2]  # slots
            where = ((slot // residual - 1) * residual)[..., None] + jnp.arange(0, residual, each, dtype=jnp.int32)
            where = jnp.where(is_complete, where, size)
            where = where if state.dealt == 1 else cache.own_slot(state, where)
            return x.at[rows[:, None, None], heads[:, None], where // each].set(new, mode="drop")

        return dataclasses.replace(
            state,
            k=jax.tree.map(filled, state.k, new),
            v=values,
            k_recent=k_recent,
            v_recent=v_recent,
            pos=state.pos.at[*at, slot].set(token.position[:, None]),
            next=slot + 1,
            seen=state.seen + 1,
        )

    def attend(
        self, state: PackedCache, token: Token, carry: Carry
    ) -> tuple[Float[Array, "B N H"], PackedCache, Carry]:
        visible = state.live
        if self.spec.window is not None:
            visible &= state.pos > token.position[:, None, None] - self.spec.window
        part = packed_attention(token.q_rotated, state, visible, bits=self.policy.bits, scale=self.spec.scale)
        return part[0] if state.dealt == 1 else cache.merged(*part, state.dealt), state, carry

    def read_block(
        self, state: PackedCache, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], PackedCache, Carry]:
        """The block attends to what is packed when its first token comes, exactly to itself; then more is packed, as token by token."""
        begun = self.as_cache(self._with_first(state, block, jnp.minimum(block.count, 1)))
        held = cache.insert_block(dataclasses.replace(begun, next=state.next, seen=state.seen), block)
        return cache.attend_block(self.spec, held, block), self._with_first(state, block, block.count), carry

    def _with_first(self, state: PackedCache, block: TokenBlock, number: Int[Array, " B"]) -> PackedCache:
        """The state with the first `number` tokens of a block appended."""
        bits, dtype, residual, count = self.policy.bits, self.spec.dtype, state.k_recent.shape[2], 8 // self.policy.bits
        k, v = (jnp.swapaxes(x, 1, 2).astype(dtype) for x in (block.k_rotated, block.v))
        places = jnp.arange(state.pos.shape[-1], dtype=jnp.int32)
        fresh = (places >= state.next[..., None]) & (places < (state.next + number[:, None])[..., None])
        position = block.position[:, None, None] + places - state.next[..., None]
        after = dataclasses.replace(
            state,
            pos=jnp.where(fresh, position, state.pos),
            next=state.next + number[:, None],
            seen=state.seen + number,
        )

        def exact(recent: Array, new: Array, slot: Int[Array, "B K W"]) -> Float[Array, "B K W H"]:
            """Numbers of slots that are residual or the block's."""
            old = jnp.take_along_axis(recent, (slot % recent.shape[2])[..., None], axis=2)
            ahead = slot - state.next[..., None]
            given = jnp.take_along_axis(new, jnp.maximum(ahead, 0)[..., None], axis=2, mode="clip")
            return jnp.where((ahead >= 0)[..., None], given, old)

        def run(start: Int[Array, "B K"], size: int, unit: int) -> Int[Array, "B K W"]:
            return start[..., None] + jnp.arange(-(-size // unit) * unit, dtype=jnp.int32)

        keys = exact(state.k_recent, k, run(state.k_packed, residual + block.size, self._unit))
        start, stop = (jnp.maximum(n - residual - 1, 0) for n in (state.next, after.next))
        values = exact(state.v_recent, v, run(start // count * count, residual + 1 + block.size + count, count))
        return dataclasses.replace(
            after,
            k=packing.put_run(state.k, keys, state.k_packed, after.k_packed, bits, self.policy.group, dtype),
            v=packing.put_run(state.v, values, start, stop, bits, self._channels, dtype),
            k_recent=exact(state.k_recent, k, _latest(after.next, residual)),
            v_recent=exact(state.v_recent, v, _latest(after.next, residual + 1)),
        )

    def as_cache(self, state: PackedCache) -> LayerCache:
        """All slots unpacked."""
        places = jnp.arange(state.pos.shape[-1], dtype=jnp.int32)
        packed_k, packed_v = (packing.unpack(x, self.policy.bits).astype(self.spec.dtype) for x in (state.k, state.v))
        live = state.live[..., None]

        def joined(packed: Array, recent: Array, exact: Bool[Array, "B K C"]) -> Array:
            latest = recent[:, :, places % recent.shape[2]]
            return jnp.where(live, jnp.where(exact[..., None], latest, packed), 0)

        return LayerCache(
            k=joined(packed_k, state.k_recent, places >= state.k_packed[..., None]),
            v=joined(packed_v, state.v_recent, places >= state.next[..., None] - state.v_recent.shape[2]),
            pos=state.pos,
            weight=state.live.astype(jnp.float32),
            next=state.next,
            seen=state.seen,
        )

    def _packed(self, filled: LayerCache) -> PackedCache:
        """A cache whose slots are filled from the left, packed."""
        policy, spec, size = self.policy, self.spec, self.capacity
        padding = [(0, 0), (0, 0), (0, size - filled.pos.shape[-1])]
        k, v = (jnp.pad(x, [*padding, (0, 0)]) for x in (filled.k, filled.v))
        residual = min(policy.residual, -(-(size + 1) // self._unit) * self._unit)  # more is of no use
        state = PackedCache(
            k=packing.pack(k, policy.bits, policy.group, "slots", spec.dtype),
            v=packing.pack(v, policy.bits, self._channels, "channels", spec.dtype),
            k_recent=jnp.zeros((*filled.next.shape, residual, spec.head_dim), spec.dtype),
            v_recent=jnp.zeros((*filled.next.shape, residual + 1, spec.head_dim), spec.dtype),
            pos=jnp.pad(filled.pos, padding, constant_values=-1),
            next=filled.next,
            seen=filled.seen,
        )
        latest = state.k_packed[..., None] + jnp.arange(residual, dtype=jnp.int32)

        def taken(x: Float[Array, "B K C H"], slot: Int[Array, "B K P"]) -> Float[Array, "B K P H"]:
            return jnp.take_along_axis(x, slot[..., None], axis=2, mode="clip")

        return dataclasses.replace(
            state, k_recent=taken(k, latest), v_recent=taken(v, jnp.maximum(state.v_recent_slots, 0))
        )

    @property
    def _inner(self) -> Layer[Any]:
        """The layer of the policy that is quantised."""
        return self.policy.policy.layer(self.spec)

    @property
    def _unit(self) -> int:
        """Slots that whole groups and whole bytes take."""
        return math.lcm(self.policy.group, 8 // self.policy.bits)

    @property
    def _channels(self) -> int:
        """Channels of a value's group."""
        return math.gcd(self.policy.group, self.spec.head_dim)


def check_packing(policy: Policy, bits: int, group: int, residual: int) -> None:
    """Raise `PolicyError` unless the hyperparameters of `policy` fit together."""
    check_fields(policy, group=1, residual=1)
    if residual % group:
        raise PolicyError(
            f"{policy.info.name}: residual={residual} and group={group}; keys are packed when `residual` tokens have come together, in "
            "whole groups, so give a multiple of group"
        )
    if residual % (8 // bits):
        raise PolicyError(
            f"{policy.info.name}: residual={residual} and bits={bits}; the numbers of {8 // bits} tokens share a byte, so give a multiple "
            f"of {8 // bits} as residual"
        )


def check_codes(policy: Policy, bits: int) -> None:
    """Raise `PolicyError` unless the hyperparameters of `policy` are such as the codes of `TurboQuant` take."""
    check_fields(policy, group=1, exact_layers=0)
    if bits not in (2, 4):
        raise PolicyError(f"{policy.info.name}: bits={bits}; codes of rotated numbers have 2 or 4")


def quantized(
    policy: Policy,
    bits: Bits = 2,
    group: int = 32,
    residual: int = 32,
    scheme: Literal["kivi", "turboquant"] = "kivi",
    values: Values = "levels",
    signs: int | None = None,
    exact_layers: int = 0,
) -> Quantized:
    """Keep what a policy keeps in a few bits, as `KIVI` or `TurboQuant` does: `quantized(ChunkKV(budget=512), bits=4)`.

    The policy must leave its cache alone after the prompt, but for adding new tokens: full, snapkv, pyramidkv, chunkkv,
    expected_attention, or both kinds of heads of catekv. Packed groups are not changed again, so policies that evict or merge while
    they decode, sparse ones, and those with a store of their own are refused. `by_head` and `by_layer` take quantised policies beside others.

    Args:
        policy: any such, compositions included.
        bits, group, residual: see `KIVI`.
        scheme: "kivi"; or "turboquant", every token coded as it comes, by codes of rotated numbers.
        values, signs, exact_layers: of "turboquant", see `TurboQuant`.

    Raises:
        PolicyError: a number is out of range, or (once a model is known) the policy is none of these.
    """
    return Quantized(policy, bits, group, residual, scheme, values, signs, exact_layers)


def packed_attention(
    q: Float[Array, "B N H"], state: PackedCache, visible: Bool[Array, "B K C"], *, bits: Bits, scale: float
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
    """Softmax attention over a packed cache, of which a block of slots at a time is unpacked; exact where keys and values are.

    Of a cache that is dealt, over this device's slots.

    A kernel that reads packed keys and values would take the place of this function.

    Args:
        q: rotated queries.
        visible: slots that count.
        scale: factor on the logits.

    Returns:
        The attended values, and the logarithms of the sums of exponentials, -inf where nothing counts.
    """
    kv_heads, size = visible.shape[1], state.k.codes.shape[2] * (8 // bits)
    recent = state.v_recent.shape[2]
    grouped = einops.rearrange(q, "b (k g) h -> b k g h", k=kv_heads).astype(jnp.float32)
    blocks, block = packing.blocks(size, math.lcm(size // state.k.scale.shape[2], 8 // bits))

    def products(keys: Float[Array, "B K C H"]) -> Float[Array, "B K G C"]:
        return jnp.einsum("bkgh,bkch->bkgc", grouped, keys.astype(jnp.float32)) * scale

    def write(i: Int[Array, ""], logits: Float[Array, "B K G C"]) -> Float[Array, "B K G C"]:
        new = products(packing.unpack(state.k.part(i * block, block, bits), bits))
        return jax.lax.dynamic_update_slice_in_dim(logits, new, i * block, axis=3)

    logits = jax.lax.fori_loop(0, blocks, write, jnp.zeros((*grouped.shape[:3], size), jnp.float32))

    # The latest R + 1 slots apart: their values are exact, and the keys of those that are not packed yet.
    start = jnp.maximum(state.next - recent, 0)[..., None]
    latest = start + jnp.arange(recent, dtype=jnp.int32)

    def among_latest(x: Array, slot: Int[Array, "B K E"]) -> Array:
        """Of a [B, K, X, C], the latest slots' part, number by number: for slices a compiler would lay out all of it anew."""
        rows, heads, others = jnp.ix_(*(jnp.arange(n, dtype=jnp.int32) for n in x.shape[:3]))
        return x.at[rows[..., None], heads[..., None], others[..., None], slot[:, :, None]].get(mode="clip")

    def at_places(recent: Float[Array, "B K P H"]) -> Float[Array, "B K E H"]:
        return jnp.take_along_axis(recent, latest[..., None] % recent.shape[2], axis=2)

    exact = (latest >= state.k_packed[..., None])[:, :, None]
    own = latest if state.dealt == 1 else cache.own_slot(state, latest)
    late_logits = jnp.where(exact, products(at_places(state.k_recent)), among_latest(logits, own))
    late_visible = among_latest(visible[:, :, None], latest) & (latest < state.next[..., None])[:, :, None]
    packed = visible & (jnp.arange(visible.shape[-1], dtype=jnp.int32) < start)
    if state.dealt > 1:
        late_visible &= (own < size)[:, :, None]
        packed = cache.own(packed, state.dealt)
    late_logits = jnp.where(late_visible, late_logits, MASKED)
    packed = packed[:, :, None]
    logits = jnp.where(packed, logits, MASKED)

    highest = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), jnp.max(late_logits, axis=-1, keepdims=True))
    share = jnp.where(packed, jnp.exp(logits - highest), 0.0)
    late_share = jnp.where(late_visible, jnp.exp(late_logits - highest), 0.0)
    total = jnp.sum(share, axis=-1, keepdims=True) + jnp.sum(late_share, axis=-1, keepdims=True)

    def add(i: Int[Array, ""], out: Float[Array, "B K G H"]) -> Float[Array, "B K G H"]:
        values = packing.unpack(state.v.part(i * block, block, bits), bits)
        weights, valid = (jax.lax.dynamic_slice_in_dim(x, i * block, block, axis=3) for x in (share, packed))
        values = jnp.where(jnp.swapaxes(valid, 2, 3), values, 0.0)
        return out + jnp.einsum("bkgc,bkch->bkgh", weights, values)

    late_values = jnp.where(jnp.swapaxes(late_visible, 2, 3), at_places(state.v_recent).astype(jnp.float32), 0.0)
    out = jax.lax.fori_loop(0, blocks, add, jnp.einsum("bkgr,bkrh->bkgh", late_share, late_values))
    out /= jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    logsumexp = jnp.where(total > 0, highest + jnp.log(total), -jnp.inf)
    return (
        einops.rearrange(out, "b k g h -> b (k g) h").astype(q.dtype),
        einops.rearrange(logsumexp, "b k g 1 -> b (k g)"),
    )
