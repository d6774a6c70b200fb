"""Quantisation: low-bit keys and values, for any policy that only appends tokens after the prompt."""

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Token, TokenBlock, packing
from kvjax.cache.codecs import Codebook, Codec, Floats, Levels
from kvjax.cache.packing import Bits, PackedCache
from kvjax.config import ModelConfig

from ..base import Policy
from ..fields import check_fields
from ..info import PolicyError, PolicyInfo
from ..layer import CacheLayer, Carry, check_reads_blocks
from .coded import CodedLayer
from .low_bit import LowBitLayer
from .wrapper import Wrapper

Scheme = Literal["kivi", "turboquant", "fp8"]
"""How tokens are stored, see `KIVI`, `TurboQuant` and `FP8`."""

Keys = Literal["rotated", "fp8"]
"""How TurboQuant stores keys: in codes of rotated vectors, or in 8-bit floats."""

Values = Literal["levels", "rotated"]
"""How TurboQuant stores values: evenly spaced entries per group of channels, or in codes of rotated vectors."""

OPTIONS = {
    "kivi": ("bits", "group", "residual"),
    "turboquant": ("bits", "group", "keys", "values", "value_bits", "signs", "exact_layers"),
    "fp8": ("exact_layers",),
}
"""Hyperparameters that each scheme has."""


@dataclasses.dataclass(frozen=True)
class Quantized(Wrapper):
    """A policy with quantised keys and values, made by `quantized`.

    Attributes:
        policy: determines which tokens are kept.
        bits, group: see `KIVI` and `TurboQuant`.
        residual: for "kivi", see `KIVI`.
        scheme: "kivi", "turboquant" or "fp8".
        values, signs, keys, value_bits: for "turboquant", see `TurboQuant`.
        exact_layers: for "turboquant" and "fp8", see `TurboQuant`.

    Example:
        >>> policy = kvjax.policies.Quantized(kvjax.SnapKV(budget=64), bits=4)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('quantized(snapkv:budget=64; bits=4)', 0.28)
    """

    transform: ClassVar[str] = "quantized"

    bits: Bits = 2
    group: int = 32
    residual: int = 32
    scheme: Scheme = "kivi"
    values: Values = "levels"
    signs: int | None = None
    exact_layers: int = 0
    keys: Keys = "rotated"
    value_bits: Bits | None = None

    def __post_init__(self) -> None:
        every = {name for names in OPTIONS.values() for name in names}
        others = every - set(OPTIONS.get(self.scheme, every))
        for field in dataclasses.fields(self):
            if field.name in others and getattr(self, field.name) != field.default:
                raise PolicyError(
                    f"quantized: {field.name}={getattr(self, field.name)!r} has no effect with scheme={self.scheme!r}. Leave it out, or give "
                    "the other scheme."
                )
        check_scheme(self, self.scheme)

    @property
    def info(self) -> PolicyInfo:
        about = dataclasses.replace(super().info, memory="quantized", stage="both")
        return (
            about
            if self.scheme == "kivi"
            else dataclasses.replace(about, name=f"{self.scheme}({self.policy.info.name})")
        )

    def bind(self, config: ModelConfig) -> Policy:
        bound = super().bind(config)
        for spec in cache.layer_specs(config, 1, 64, 64, jnp.float32):
            bound.layer(spec)  # raises if a layer cannot be quantised
        return bound

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        inner = self.policy.layer(spec)
        if not inner.is_plain or inner.when != "never":
            raise PolicyError(
                f"{self.info.name}: {self.policy.info.name!r} changes its cache while decoding, but packed groups of tokens cannot be "
                "moved, merged or evicted. Use a policy that compresses only the prompt, such as full, snapkv, chunkkv or catekv."
            )
        if self.policy.info.refits_values:
            raise PolicyError(
                f"{self.info.name}: {self.policy.info.name!r} gives slots fitted weights, which quantised caches do not store. Use a policy "
                "whose slots are single tokens, such as snapkv."
            )
        if self.scheme == "kivi":
            return QuantizedLayer(self, spec, inner=inner)
        if min(spec.layer, spec.num_layers - 1 - spec.layer) < self.exact_layers:
            return inner
        keys, values = self._codecs(spec)
        if (keys.matrix is not None or values.matrix is not None) and spec.head_dim & (spec.head_dim - 1):
            raise PolicyError(
                f"{self.info.name}: scheme='turboquant' needs a head dim that is a power of two, but this model has {spec.head_dim}. "
                "Use kivi or fp8, or scheme='kivi' or 'fp8'."
            )
        return CodedLayer(self, spec, inner=inner, keys=keys, values=values)

    def _codecs(self, spec: LayerSpec) -> tuple[Codec, Codec]:
        """Return how keys and values of a layer are stored."""
        if self.scheme == "fp8":
            return Floats(), Floats()
        factor = jnp.float16 if spec.dtype.itemsize == 2 else spec.dtype
        signs = None if self.signs is None else self.signs + spec.layer
        keys = Floats() if self.keys == "fp8" else Codebook(self.bits, spec.head_dim, signs, factor)
        bits = self.value_bits or self.bits
        if self.values == "rotated":
            return keys, Codebook(bits, spec.head_dim, signs, factor)
        return keys, Levels(bits, math.gcd(self.group, spec.head_dim), spec.dtype)


@dataclasses.dataclass(frozen=True)
class QuantizedLayer(LowBitLayer[Quantized]):
    """A layer that packs tokens after the prompt and at intervals while decoding, see `Quantized`."""

    @property
    def shards_own_store(self) -> bool:
        return cache.RUN % self._unit == 0

    @property
    def capacity(self) -> int:
        """Slots to allocate, in whole groups and bytes."""
        return -(-self.inner.capacity // self._unit) * self._unit

    def init(self, total: Int[Array, " B"] | None = None) -> PackedCache:
        return self._packed(self.inner.init(total))

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[PackedCache, Carry]:
        kept, carry = self.inner.prefill(prompt, carry)
        return self._packed(kept), carry

    def append(self, state: PackedCache, token: Token) -> PackedCache:
        """Add a token in place of residual ones that were read for the last time, and pack these: R keys at once."""
        dtype, bits = self.spec.dtype, self.policy.bits
        size, slot = state.pos.shape[-1], state.next
        residual = state.k_recent.shape[2]
        rows, heads = (jnp.arange(n, dtype=jnp.int32) for n in slot.shape)
        at = rows[:, None], heads[None, :]
        k_place, v_place = slot % residual, slot % (residual + 1)
        k_new, v_new = token.slot(k_place), token.slot(v_place)

        # Where there is no value to pack, the index is out of bounds, and the write is dropped.
        where = token.slot(jnp.where(slot > residual, slot - residual - 1, size))
        where = where if state.slot_shards == 1 else cache.local_slot(state, where)
        old = state.v_recent[*at, v_place]
        values = packing.put(state.v, old, where, bits, self._channels, dtype)

        # Not inside `cond`, whose branches would copy the packed keys.
        new = packing.pack(state.k_recent, bits, self.policy.group, "slots", dtype)
        is_complete = ((k_place == 0) & (slot > 0))[..., None]
        k_recent = state.k_recent.at[*at, k_new].set(token.k_rotated.astype(dtype), mode="drop")
        v_recent = state.v_recent.at[*at, v_new].set(token.v.astype(dtype), mode="drop")

        def filled(x: Array, new: Array) -> Array:
            each = residual // new.shape[2]  # slots per entry of `new`
            where = ((slot // residual - 1) * residual)[..., None] + jnp.arange(0, residual, each, dtype=jnp.int32)
            where = token.slot(jnp.where(is_complete, where, size))
            where = where if state.slot_shards == 1 else cache.local_slot(state, where)
            return x.at[rows[:, None, None], heads[:, None], where // each].set(new, mode="drop")

        return dataclasses.replace(
            state,
            k=jax.tree.map(filled, state.k, new),
            v=values,
            k_recent=k_recent,
            v_recent=v_recent,
            pos=state.pos.at[*at, token.slot(slot)].set(token.position[:, None], mode="drop"),
            next=slot + token.count(slot),
            seen=state.seen + token.count(state.seen),
        )

    def attend(
        self, state: PackedCache, token: Token, carry: Carry
    ) -> tuple[Float[Array, "B N H"], PackedCache, Carry]:
        return cache.attend_packed(self.spec, state, token, bits=self.policy.bits), state, carry

    def read_block(
        self, state: PackedCache, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], PackedCache, Carry]:
        """Process one block of a chunked prefill.

        The block attends to the cache as it is when its first token comes, and exactly to itself. Then tokens are packed as if
        they had come one by one.
        """
        check_reads_blocks(self)
        begun = self.view(self._with_first(state, block, jnp.minimum(block.count, 1)))
        held = cache.insert_block(dataclasses.replace(begun, next=state.next, seen=state.seen), block)
        return cache.attend_block(self.spec, held, block), self._with_first(state, block, block.count), carry

    def _with_first(self, state: PackedCache, block: TokenBlock, number: Int[Array, " B"]) -> PackedCache:
        """Return the state with the first `number` tokens of a block appended."""
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
            """Unquantised entries of slots that are residual or in the block."""
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
            k_recent=exact(state.k_recent, k, packing.latest_slots(after.next, residual)),
            v_recent=exact(state.v_recent, v, packing.latest_slots(after.next, residual + 1)),
        )

    def view(self, state: PackedCache) -> LayerCache:
        """All slots, unpacked."""
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
        """Pack a cache whose slots are filled from the left."""
        policy, spec, size = self.policy, self.spec, self.capacity
        padding = [(0, 0), (0, 0), (0, size - filled.pos.shape[-1])]
        k, v = (jnp.pad(x, [*padding, (0, 0)]) for x in (filled.k, filled.v))
        residual = min(policy.residual, -(-(size + 1) // self._unit) * self._unit)  # no more than there are slots
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
    def _unit(self) -> int:
        """Smallest number of slots that fills whole groups and whole bytes."""
        return math.lcm(self.policy.group, 8 // self.policy.bits)

    @property
    def _channels(self) -> int:
        """Channels of a value's group."""
        return math.gcd(self.policy.group, self.spec.head_dim)


def check_scheme(policy: Any, scheme: str) -> None:
    """Raise `PolicyError` unless the hyperparameters of `policy` are valid for a scheme."""
    if scheme == "kivi":
        _check_packing(policy, policy.bits, policy.group, policy.residual)
    else:
        _check_codes(policy)


def _check_packing(policy: Policy, bits: int, group: int, residual: int) -> None:
    check_fields(policy, group=1, residual=1)
    if bits == 3:
        raise PolicyError(f"{policy.info.name}: bits=3 is not supported. Give 2, 4 or 8, or use turboquant for 3 bits.")
    if residual % group:
        raise PolicyError(
            f"{policy.info.name}: residual={residual} is not a multiple of group={group}, but keys are packed `residual` tokens at a "
            "time, in whole groups. Give a multiple of group."
        )
    if residual % (8 // bits):
        raise PolicyError(
            f"{policy.info.name}: residual={residual} does not fit bits={bits}, with which {8 // bits} tokens share a byte. Give a multiple "
            f"of {8 // bits} as residual."
        )


def _check_codes(policy: Policy) -> None:
    least = {"group": 1, "exact_layers": 0}
    check_fields(
        policy, **{field.name: least[field.name] for field in dataclasses.fields(policy) if field.name in least}
    )
    for name in ("bits", "value_bits"):
        if getattr(policy, name, None) == 8:
            raise PolicyError(f"{policy.info.name}: {name}=8 is not supported. Give 2, 3 or 4, or use fp8 for 8 bits.")


def quantized(
    policy: Policy,
    bits: Bits = 2,
    group: int = 32,
    residual: int = 32,
    scheme: Scheme = "kivi",
    values: Values = "levels",
    signs: int | None = None,
    exact_layers: int = 0,
    keys: Keys = "rotated",
    value_bits: Bits | None = None,
) -> Quantized:
    """Quantise a policy's cache, as `KIVI`, `TurboQuant` or `FP8` does: `quantized(ChunkKV(budget=512), bits=4)`.

    The policy may only append tokens after the prompt: full, snapkv, pyramidkv, chunkkv, expected_attention, or both
    kinds of heads of catekv. Quantised slots are never changed, so policies that evict or merge while they decode,
    sparse policies, and policies with their own store are not supported. `by_head` and `by_layer` can combine quantised
    policies with others.

    Args:
        policy: such a policy, compositions included.
        bits, group, residual: see `KIVI`.
        scheme: "kivi"; "turboquant", which codes every token when it comes, as a rotated vector; or "fp8", which stores
            every token in 8-bit floats.
        values, signs, keys, value_bits: for "turboquant", see `TurboQuant`.
        exact_layers: for "turboquant" and "fp8", see `TurboQuant`.

    Raises:
        PolicyError: a number is out of range, or (once a model is known) the policy is not supported.

    Example:
        >>> str(kvjax.quantized(kvjax.SnapKV(budget=512), bits=4))
        'quantized(snapkv:budget=512; bits=4)'
    """
    return Quantized(policy, bits, group, residual, scheme, values, signs, exact_layers, keys, value_bits)
