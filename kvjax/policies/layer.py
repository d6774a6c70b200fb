"""`CacheLayer`: the functions of one layer's cache, which a policy makes. `kvjax.policies.base` has the protocol."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax._util.any_rank import any_rank
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Token, TokenBlock

from .info import PolicyError, PolicyInfo
from .replay import Replay, without_model

State = Any
"""The cache of one layer: any pytree of fixed shape."""

Carry = dict[str, Any]
"""Values that travel from layer to layer within one step. Keys begin with `CacheLayer.key`, to avoid collisions."""

Queries = Callable[[], Float[Array, "B N H"]]
"""Returns queries, which are computed only if it is called."""

When = Literal["never", "every_step", "when_full"]
"""When a layer compresses, see `CacheLayer.when`."""

Reads = Literal["blocks", "tokens", "whole"]
"""How a layer supports chunked prefill, see `CacheLayer.reads`."""

Attention = Literal["kept", "dense", "sparse"]
"""Which tokens a query of the layer reads, see `CacheLayer.attention`."""


class Described(Protocol):
    """What a layer needs of its policy."""

    @property
    def info(self) -> PolicyInfo:
        """Description of the policy."""
        ...


P = TypeVar("P", bound=Described)


@dataclasses.dataclass(frozen=True)
class CacheLayer(Generic[P]):
    """The cache of one layer: pure functions over a state of fixed shape. Hashable, so that programs are cached by it.

    This class keeps everything. Subclasses override the functions that they change. The properties `when`, `reads`,
    `is_plain` and `has_own_store` follow from the overridden functions. A subclass overrides a property only where the
    derived value is wrong.

    Attributes:
        policy: the policy that made the layer.
        spec: the layer's static shapes and model facts.

    Example:
        >>> layer = kvjax.Full().layer(spec)
        >>> state, carry = layer.prefill(prompt, {})
        >>> state = layer.append(state, token)
        >>> out, state, carry = layer.attend(state, token, carry)
        >>> out.shape, layer.view(state).count.item()  # rows, query heads, channels; tokens
        ((1, 2, 4), 7)
    """

    policy: P
    spec: LayerSpec

    @property
    def when(self) -> When:
        """When `compress` has something to do: "never", "every_step", or "when_full" in the rows of `is_due`."""
        cls = type(self)
        if cls.is_due is not CacheLayer.is_due:
            return "when_full"
        return "never" if cls.compress is CacheLayer.compress else "every_step"

    @property
    def reads(self) -> Reads:
        """How the layer supports chunked prefill.

        "blocks": by its own `read_block`. "tokens": token by token, by the inherited `read_block`. "whole": not
        supported, because the layer chooses from a whole prompt.
        """
        return "whole" if type(self).read_block is CacheLayer.read_block else "blocks"

    @property
    def attention(self) -> Attention:
        """Which tokens a query reads: those that the method "kept", a "sparse" selection of all, or all ("dense")."""
        return "kept"

    @property
    def chooses_evenly(self) -> bool:
        """Whether `chosen` names the same number of a prompt's tokens for each head, which the layer keeps, with all new ones.

        `then` begins with such layers (`kvjax.policies.families.scoring.PromptScorerLayer`).
        """
        return False

    @property
    def selects_slots(self) -> bool:
        """Whether queries read a selection of a `LayerCache` of rotated keys, by these alone. `then` ends with such layers."""
        return False

    @property
    def is_plain(self) -> bool:
        """Whether `append` and `attend` are those of this class.

        The state is then a `LayerCache`, a new token goes into its next slot, and queries read all slots.
        """
        cls = type(self)
        return (cls.append, cls.attend) == (CacheLayer.append, CacheLayer.attend)

    @property
    def has_own_store(self) -> bool:
        """Whether the state stores keys and values in another form than a `LayerCache`, to which `view` converts it."""
        return type(self).view is not CacheLayer.view

    @property
    def shards_own_store(self) -> bool:
        """Whether the slots of the layer's own store can be sharded over devices.

        The state then has `k`, `v`, `slot_axes`, `pos` [B, K, C] and `slot_shards`, as a `LayerCache` has.
        """
        return False

    @property
    def shards_slots(self) -> bool:
        """Whether the slots of keys and values can be sharded over devices (`kvjax.policies.sharded`).

        While it decodes, such a layer accesses keys and values only through functions of `kvjax.cache`. A sparse layer
        with its own store accesses them through its caller, which passes the selected entries to
        `SparseLayer.attend_to`.
        """
        appends = self.is_plain and self.when == "never" and not self.has_own_store
        return appends or self.shards_own_store or self.attention == "sparse"

    @property
    def compress_reads_kv(self) -> bool:
        """Whether `compress` computes with keys or values, beyond moving them. `offloaded` then fetches them."""
        return False

    @property
    def replays(self) -> tuple[Replay, ...]:
        """Passes that read parts of a prompt again before `prefill` chooses from it.

        The prompt that `prefill` then gets has no queries and only rotated keys. The carry has what the passes observed
        (`Replay.found`).
        """
        return ()

    @property
    def needs_context(self) -> bool:
        """Whether `prefill` and `read_block` need an `AttentionContext` (inputs, output projection) in the carry."""
        return False

    @property
    def needs_token_inputs(self) -> bool:
        """Whether `append` needs the `inputs` of its token."""
        return False

    @property
    def reduces_heads(self) -> bool:
        """Whether a decode step runs a psum or pmax over the devices that shard the layer's KV heads.

        XLA then keeps collectives in order. GPUs can deadlock if a layer does not declare it.
        """
        return False

    @property
    def max_kept(self) -> int:
        """Maximum number of tokens that one head keeps between two steps."""
        return self.spec.max_tokens

    @property
    def capacity(self) -> int:
        """Slots to allocate per head. A layer that compresses needs one more than `max_kept`, for the newest token."""
        newest = 0 if self.when == "never" else 1
        if not isinstance(self.max_kept, int):
            raise PolicyError(
                f"{self.policy.info.name}: max_kept={self.max_kept} is not a whole number of tokens. Convert a fractional budget with "
                "kvjax.policies.budget_tokens and budget_rows."
            )
        return cache.round_slots(min(self.max_kept + newest, self.spec.max_tokens))

    @property
    def bytes_read(self) -> int:
        """Bytes of keys, values and metadata that a decoding step reads. By default the whole state."""
        return sum(held_bytes(self))

    @property
    def key(self) -> str:
        """The key in `carry` under which a layer leaves values for itself or for other layers of its policy."""
        return repr((self.policy, self.spec.kv_heads))

    def init(self, total: Int[Array, " B"] | None = None) -> State:
        """Return the state of an empty cache.

        Args:
            total: tokens that each row will reach, [B]. Fractional budgets are fractions of it. Defaults to
                `spec.max_tokens`.
        """
        return cache.empty(self.spec, self.capacity)

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[State, Carry]:
        """Return the state after a right-padded prompt, and the carry."""
        return cache.from_prompt(self.spec, self.capacity, prompt), carry

    def read_block(self, state: State, block: TokenBlock, carry: Carry) -> tuple[Float[Array, "B S N H"], State, Carry]:
        """Process one block of a chunked prefill.

        The block's tokens attend to the kept tokens and, causally, to the block. The method's rule then chooses from
        both. One block with a whole prompt equals `prefill`. In a method that compresses while it decodes, a block of
        one token equals `append`, `attend` and `compress`. Rows without a token keep their state. This default
        processes the block token by token. A layer that `compresses_together` leaves the choice to
        `compress_together`, and may return a state with more slots until then.

        Returns:
            The block's attention output, the state after the block, and the carry.

        Raises:
            PolicyError: the layer chooses from a whole prompt.
        """
        check_reads_blocks(self)

        def one(state: State, given: Any) -> tuple[State, Array]:
            token, exists = given
            out, new, _ = self.attend(self.append(state, token), token, {})
            return cache.where_rows(exists, self.compress(new), state), out

        state, out = jax.lax.scan(one, state, (block.by_token(), jnp.swapaxes(block.mask, 0, 1)))
        return jnp.swapaxes(out, 0, 1), state, carry

    def advance(self, state: State) -> State:
        """Return what is kept of the new state of a recurrent layer, which the model has computed from the previous one."""
        return state

    def append(self, state: State, token: Token) -> State:
        """Return the state with one new token per row."""
        return cache.insert(state, token)[0]

    def look_ahead(self, queries: Queries, position: Int[Array, " B"], carry: Carry) -> Carry:
        """Return the carry with whatever the layer prepares while the previous layer is computed. By default nothing.

        Args:
            queries: returns unrotated queries [B, N, H] that this layer would compute from the previous layer's
                attention input. They are computed only if it is called.
            position: original position of each row's newest token.
            carry: values of earlier layers.
        """
        return carry

    def attend(self, state: State, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], State, Carry]:
        """Return the attention output of the newest token, the state with updated scores, and the carry.

        `append` has already put the token into the state.
        """
        return cache.attend(self.spec, state, token)[0], state, carry

    def compress(self, state: State) -> State:
        """Return the state, reduced to its budget. Called after every decoded token.

        A method that compresses at intervals decides so from its own state, inside `jax.lax.cond`. Rows of a ragged
        batch and composed policies are therefore due at different times.
        """
        return state

    @property
    def compresses_together(self) -> bool:
        """Whether the layer needs what others observe before it compresses, see `compress_together`."""
        return False

    def before_compress(self, state: State, carry: Carry) -> Carry:
        """Return the carry with what other layers need to know of this one before they compress. By default nothing."""
        return carry

    def compress_together(self, state: State, carry: Carry) -> State:
        """Compress a layer that `compresses_together`, with the carry of all layers' `before_compress`.

        `compress` of such a layer uses what the layer itself observes.
        """
        return self.compress(state)

    def is_due(self, state: State) -> Bool[Array, " B"]:
        """Return the rows in which `compress` has something to do now. For methods that compress at intervals."""
        raise NotImplementedError(f"{type(self).__qualname__}: when='when_full' needs is_due(state). Define it.")

    def view(self, state: State) -> LayerCache:
        """Return the kept tokens of all KV heads as a `LayerCache`, for inspection. By default the state's `cache`."""
        return state.cache

    def slot_scores(self, state: State) -> Float[Array, "B K C"] | None:
        """Return the score of each slot of `view`, for inspection. By default the state's `score`, None without one."""
        return getattr(state, "score", None)

    def map_parts(self, change: "Callable[[CacheLayer[Any]], CacheLayer[Any]]") -> "CacheLayer[Any]":
        """Return the layer with `change` applied to each sublayer. Most layers are one sublayer with all KV heads."""
        return change(self)


@dataclasses.dataclass(frozen=True)
class WrappedLayer(CacheLayer[P]):
    """A layer that forwards every function to another one. Subclasses override what they change.

    Attributes:
        inner: the wrapped layer.

    Example:
        >>> inner = kvjax.SnapKV(budget=4, window=2).layer(spec)
        >>> layer = kvjax.policies.WrappedLayer(kvjax.Full(), spec, inner=inner)
        >>> state, _ = layer.prefill(prompt, {})
        >>> layer.view(state).count.item()  # of the inner layer
        4
    """

    inner: CacheLayer[Any] = dataclasses.field(kw_only=True)

    @property
    def when(self) -> When:
        return self.inner.when

    @property
    def reads(self) -> Reads:
        return self.inner.reads

    @property
    def attention(self) -> Attention:
        return self.inner.attention

    @property
    def has_own_store(self) -> bool:
        return self.inner.has_own_store

    @property
    def shards_own_store(self) -> bool:
        return self.inner.shards_own_store

    @property
    def compress_reads_kv(self) -> bool:
        return self.inner.compress_reads_kv

    @property
    def replays(self) -> tuple[Replay, ...]:
        return self.inner.replays

    @property
    def needs_context(self) -> bool:
        return self.inner.needs_context

    @property
    def needs_token_inputs(self) -> bool:
        return self.inner.needs_token_inputs

    @property
    def reduces_heads(self) -> bool:
        return self.inner.reduces_heads

    @property
    def max_kept(self) -> int:
        return self.inner.max_kept

    @property
    def capacity(self) -> int:
        return self.inner.capacity

    @property
    def bytes_read(self) -> int:
        return self.inner.bytes_read

    def init(self, total: Int[Array, " B"] | None = None) -> State:
        return self.inner.init(total)

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[State, Carry]:
        return self.inner.prefill(prompt, carry)

    def read_block(self, state: State, block: TokenBlock, carry: Carry) -> tuple[Float[Array, "B S N H"], State, Carry]:
        check_reads_blocks(self)
        return self.inner.read_block(state, block, carry)

    def advance(self, state: State) -> State:
        return self.inner.advance(state)

    def append(self, state: State, token: Token) -> State:
        return self.inner.append(state, token)

    def look_ahead(self, queries: Queries, position: Int[Array, " B"], carry: Carry) -> Carry:
        return self.inner.look_ahead(queries, position, carry)

    def attend(self, state: State, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], State, Carry]:
        return self.inner.attend(state, token, carry)

    def compress(self, state: State) -> State:
        return self.inner.compress(state)

    @property
    def compresses_together(self) -> bool:
        return self.inner.compresses_together

    def before_compress(self, state: State, carry: Carry) -> Carry:
        return self.inner.before_compress(state, carry)

    def compress_together(self, state: State, carry: Carry) -> State:
        return self.inner.compress_together(state, carry)

    def is_due(self, state: State) -> Bool[Array, " B"]:
        return self.inner.is_due(state)

    def view(self, state: State) -> LayerCache:
        return self.inner.view(state)

    def slot_scores(self, state: State) -> Float[Array, "B K C"] | None:
        return self.inner.slot_scores(state)


def check_reads_blocks(layer: CacheLayer[Any]) -> None:
    """Raise `PolicyError` unless a layer supports chunked prefill."""
    if layer.reads == "whole":
        raise PolicyError(
            f"{layer.policy.info.name}: chunked prefill is not supported, because this policy chooses from the whole prompt. Leave "
            "prefill_block out, or use another policy, such as snapkv, treekv or chelsea."
        )


def read_as_prompt(
    layer: CacheLayer[Any], state: State, block: TokenBlock, carry: Carry, *, rotated: bool = True
) -> tuple[Float[Array, "B S N H"], State, Carry]:
    """`CacheLayer.read_block` for layers that choose from kept tokens and a block as they choose from a prompt.

    Args:
        layer: the layer.
        state: its state.
        block: new tokens.
        carry: values of earlier layers.
        rotated: see `as_prompt_with_block`.
    """
    check_reads_blocks(layer)
    prompt = cache.as_prompt_with_block(layer.view(state), block, rotated=rotated)
    new, carry = layer.prefill(prompt, carry)
    return cache.attend_prompt(layer.spec, prompt), cache.where_rows(block.count > 0, new, state), carry


def kept_slots(layers: Iterable[CacheLayer[Any]], states: Iterable[State]) -> tuple[LayerCache, ...]:
    """Slots of the cached layers. Recurrent layers, which keep no tokens, are not among them."""
    every = zip(layers, states, strict=True)
    return tuple(layer.view(state) for layer, state in every if layer.spec.recurrent is None)


@any_rank
def prefill_alone(layer: CacheLayer[Any], prompt: PromptKV, carry: Carry) -> tuple[State, Carry]:
    """`CacheLayer.prefill` of a layer without a model, including a layer that reads parts of its prompt again.

    Without a model, a prompt cannot be read again. Replays therefore observe the queries, keys and values of the first
    pass. A recurrent layer has the state before the first token.

    Example:
        >>> layer = kvjax.StreamingLLM(budget=4, sinks=1).layer(spec)
        >>> state, _ = kvjax.policies.prefill_alone(layer, prompt, {})
        >>> sorted(layer.view(state).pos[0, 0].tolist())[-4:]  # the sink and the latest tokens
        [0, 3, 4, 5]
    """
    if layer.spec.recurrent is not None:
        return layer.init(prompt.total), carry
    for replay in layer.replays:
        carry = replay.with_observed(layer.spec.layer, without_model(replay, layer.spec, prompt), carry, layer.key)
        carry = replay.with_starts(jnp.full_like(prompt.lengths, replay.skipped), carry)
    return layer.prefill(prompt, carry)


@functools.lru_cache(maxsize=1 << 14)
def held_bytes(layer: CacheLayer[Any]) -> tuple[int, int]:
    """Bytes that one layer's cache occupies on the device and on the host."""
    held = jax.make_jaxpr(any_rank(layer.init))().out_avals
    host = _nbytes(leaf for leaf in held if leaf.memory_space == jax.memory.Space.Host)
    return _nbytes(held) - host, host


def _nbytes(leaves: Iterable[Any]) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
