"""The policy protocol: what to keep of the past.

A `Policy` is a frozen dataclass of hyperparameters, which users name. It is hashable, so equal policies share one compiled program.
`policy.layer(spec)` returns a `CacheLayer`: the pure functions of one layer over a state whose leaves never change shape or dtype.
The model calls them once for the prompt, and once for every new token:

    state, carry = layer.prefill(prompt, carry)

    state = layer.append(state, token)
    out, state, carry = layer.attend(state, token, carry)
    state = layer.compress(state)

`CacheLayer` itself keeps everything. A method overrides the functions that it changes.

A `PromptKV` and a `Token` have queries and keys both rotated and not. A policy that keeps original positions stores rotated keys. One
that assigns new positions rotates when it attends. `carry` travels from layer to layer within one step, and holds what a layer
passes to later layers.

With the XLA implementations, as on CPU, all functions are differentiable (`jax.grad`) with respect to keys and values. The choice of
what to keep is piecewise constant, so no gradient flows through it. Of quantised values only scales and zeros have gradients. Pallas
attention kernels, `chelsea`, `attention_matching` and `offloaded` raise an error when they are differentiated.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, Literal, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax._util.any_rank import any_rank
from kvjax._util.arguments import plain
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Token, TokenBlock
from kvjax.config import ModelConfig

from .budget import check_budget
from .fields import check_fields
from .info import PolicyError, PolicyInfo
from .replay import Replay, without_model

State = Any
"""A layer's cache: any pytree of fixed shape."""

Carry = dict[str, Any]
"""What travels from layer to layer within one step. Keys begin with `CacheLayer.key`, so that composed policies do not mix."""

Queries = Callable[[], Float[Array, "B N H"]]
"""Returns queries that are computed only if it is called."""

When = Literal["never", "every_step", "when_full"]
"""When a layer compresses, see `CacheLayer.when`."""

Reads = Literal["blocks", "tokens", "whole"]
"""How a layer prefills a text that comes in blocks, see `CacheLayer.reads`."""

Attention = Literal["kept", "dense", "sparse"]
"""What queries of a layer read, see `CacheLayer.attention`."""

P = TypeVar("P", bound="Policy")


@dataclasses.dataclass(frozen=True)
class Policy:
    """Base of all policies: keeps everything, at original positions.

    Class attributes:
        about: the method in a few words.
    """

    about: ClassVar[PolicyInfo] = PolicyInfo("")

    def __post_init__(self) -> None:
        """Check hyperparameters by what the dataclass declares, and make numbers of NumPy and JAX Python's. See `fields.check_fields`."""
        check_fields(self)

    @property
    def info(self) -> PolicyInfo:
        """What is said of this policy; a combination composes it of what is said of its parts."""
        return self.about

    def __str__(self) -> str:
        """As `get_policy` reads it: its name, and hyperparameters that are not at their defaults."""
        settings = ",".join(changed_fields(self, dataclasses.fields(self)))
        return f"{self.info.name}:{settings}" if settings else self.info.name

    def bind(self, config: ModelConfig) -> "Policy":
        """The policy for one model: where a method treats heads or layers differently, the composition that does so.

        Called once before anything runs; binding again changes nothing.

        Raises:
            PolicyError: the policy is for another model, or needs something of this one that it does not have.
        """
        return self

    def validate(self, tokens: int) -> None:
        """Raise `PolicyError` if the policy cannot serve a sequence that will reach `tokens` tokens."""

    def layer(self, spec: LayerSpec) -> "CacheLayer[Any]":
        """One layer's functions. Whatever differs from layer to layer is decided here."""
        return CacheLayer(self, spec)

    def map(self, wrap: Callable[["Policy"], "Policy"]) -> "Policy":
        """This policy with `wrap` around it; of a combination, around each policy that it is made of."""
        return wrap(self)

    def with_budget(self, budget: Any) -> "Policy":
        """The policy with another budget. A combination passes it to every part that takes one.

        A policy without a budget, such as `full`, accepts any and stays as it is, so that a sweep over budgets needs no exception.

        Args:
            budget: a number of tokens, or a fraction. Numbers of NumPy and JAX are taken, too.

        Raises:
            PolicyError: the policy does not take that value.
        """
        if any(field.name == "budget" for field in dataclasses.fields(self)):
            return dataclasses.replace(self, budget=budget)
        check_budget(self.info.name, plain(budget))
        return self

    def nbytes(
        self, config: ModelConfig, batch: int, prompt_len: int, max_new_tokens: int, dtype: Any = jnp.bfloat16
    ) -> int:
        """Bytes the cache of a whole model will hold on the device, known before anything runs.

        Args:
            prompt_len: tokens of the longest prompt.
            dtype: type of keys and values.
        """
        return sum(held_bytes(layer)[0] for layer in self._layers(config, batch, prompt_len, max_new_tokens, dtype))

    def host_nbytes(
        self, config: ModelConfig, batch: int, prompt_len: int, max_new_tokens: int, dtype: Any = jnp.bfloat16
    ) -> int:
        """Bytes it will hold in the host's memory, see `offloaded`; arguments as for `nbytes`."""
        return sum(held_bytes(layer)[1] for layer in self._layers(config, batch, prompt_len, max_new_tokens, dtype))

    def bytes_read(
        self, config: ModelConfig, batch: int, prompt_len: int, max_new_tokens: int, dtype: Any = jnp.bfloat16
    ) -> int:
        """Bytes that one decoding step reads in the whole model, see `CacheLayer.bytes_read`; arguments as for `nbytes`."""
        return sum(layer.bytes_read for layer in self._layers(config, batch, prompt_len, max_new_tokens, dtype))

    def _layers(self, config: ModelConfig, *shape: Any) -> list["CacheLayer[Any]"]:
        policy = self.bind(config)
        return [policy.layer(spec) for spec in cache.layer_specs(config, *shape)]


@dataclasses.dataclass(frozen=True)
class CacheLayer(Generic[P]):
    """The cache of one layer: pure functions over a state of fixed shape. Hashable, so that programs are cached by it.

    This class keeps everything. Subclasses override the functions that they change. The properties `when`, `reads`, `is_plain` and
    `has_own_store` follow from which functions a class overrides. A subclass overrides a property only where it knows better.

    Attributes:
        policy: the policy that made the layer.
        spec: the layer's static shapes and model facts.
    """

    policy: P
    spec: LayerSpec

    @property
    def when(self) -> When:
        """When `compress` has something to do: never, after every token, or in the rows that `is_due` reports."""
        cls = type(self)
        if cls.is_due is not CacheLayer.is_due:
            return "when_full"
        return "never" if cls.compress is CacheLayer.compress else "every_step"

    @property
    def reads(self) -> Reads:
        """How a text that comes in blocks is prefilled.

        "blocks": by a `read_block` of the layer's own. "tokens": token by token, by the inherited one. "whole": not at all, because
        the layer chooses from a whole prompt.
        """
        return "whole" if type(self).read_block is CacheLayer.read_block else "blocks"

    @property
    def attention(self) -> Attention:
        """What a query reads: the tokens that the method "kept", or a "sparse" selection of all tokens, or all of them ("dense")."""
        return "kept"

    @property
    def is_plain(self) -> bool:
        """Whether the state is a `LayerCache`, a new token goes into its next slot, and queries read all slots, as in this class."""
        cls = type(self)
        return (cls.append, cls.attend) == (CacheLayer.append, CacheLayer.attend)

    @property
    def has_own_store(self) -> bool:
        """Whether the state has keys and values in another form than a `LayerCache`, of which `view` makes one."""
        return type(self).view is not CacheLayer.view

    @property
    def shards_own_store(self) -> bool:
        """Whether devices can each hold some slots of a store of the layer's own.

        Its state then has `k`, `v`, `slot_axes`, `pos` [B, K, C] and `slot_shards`, as a `LayerCache` has.
        """
        return False

    @property
    def shards_slots(self) -> bool:
        """Whether devices can each hold some slots of the keys and values (`kvjax.policies.sharded`).

        Such a layer leaves its keys and values to functions of `kvjax.cache` while it decodes. A sparse layer with a store of its
        own leaves them to the code that passes it what it selects (`SparseLayer.attend_to`).
        """
        appends = self.is_plain and self.when == "never" and not self.has_own_store
        return appends or self.shards_own_store or self.attention == "sparse"

    @property
    def compress_reads_kv(self) -> bool:
        """Whether `compress` computes with keys or values, and does not just move them. `offloaded` then fetches them."""
        return False

    @property
    def replays(self) -> tuple[Replay, ...]:
        """Passes that read parts of a prompt again before `prefill` chooses from it.

        That prompt has no queries and only rotated keys, and the carry has what the passes observed (`Replay.found`).
        """
        return ()

    @property
    def needs_context(self) -> bool:
        """Whether the carry of `prefill` and `read_block` needs what is around attention (`AttentionContext`)."""
        return False

    @property
    def reduces_heads(self) -> bool:
        """Whether a decode step runs a psum or pmax over the devices that hold the layer's KV heads.

        XLA then keeps collectives in order. A layer that forgets to declare it can deadlock GPUs.
        """
        return False

    @property
    def max_kept(self) -> int:
        """Maximum number of tokens that one head holds between two steps."""
        return self.spec.max_tokens

    @property
    def capacity(self) -> int:
        """Slots to allocate per head. A layer that compresses needs one more than `max_kept`, for the newest token."""
        newest = 0 if self.when == "never" else 1
        if not isinstance(self.max_kept, int):
            raise PolicyError(
                f"{self.policy.info.name}: max_kept={self.max_kept}; give a whole number of tokens, which kvjax.policies.budget_tokens and "
                "budget_rows make of a fractional budget"
            )
        return cache.round_slots(min(self.max_kept + newest, self.spec.max_tokens))

    @property
    def bytes_read(self) -> int:
        """Bytes of keys, values and metadata that a decoding step reads. By default all that the state holds."""
        return sum(held_bytes(self))

    @property
    def key(self) -> str:
        """The key in `carry` under which a layer leaves values for itself or for other layers of its policy."""
        return repr((self.policy, self.spec.kv_heads))

    def init(self, total: Int[Array, " B"] | None = None) -> State:
        """The state of sequences of no tokens.

        Args:
            total: tokens that each row will reach, of which fractional budgets are fractions. By default all there are slots for.
        """
        return cache.empty(self.spec, self.capacity)

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[State, Carry]:
        """The state after a right-padded prompt."""
        return cache.from_prompt(self.spec, self.capacity, prompt), carry

    def read_block(self, state: State, block: TokenBlock, carry: Carry) -> tuple[Float[Array, "B S N H"], State, Carry]:
        """The attention of a block's tokens, over what is kept and, causally, over the block; and the state after it.

        From both together the method's own rule chooses what stays. One block that holds a whole prompt equals `prefill`. In a
        method that compresses while it decodes, a block of one token equals `append`, `attend` and `compress`. Rows without a
        token stay as they are. This default reads token by token.

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

    def append(self, state: State, token: Token) -> State:
        """The state with one new token per row."""
        return cache.insert(state, token)[0]

    def look_ahead(self, queries: Queries, position: Int[Array, " B"], carry: Carry) -> Carry:
        """The carry, with what the layer prepares while the layer before it is computed. By default nothing.

        Args:
            queries: returns the unrotated queries [B, N, H] that this layer would compute from the attention input of the layer
                before it. Nothing is computed unless it is called.
            position: original position of each row's newest token.
        """
        return carry

    def attend(self, state: State, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], State, Carry]:
        """The attention output of the newest token, which `append` has put into the state; and the state with updated scores."""
        return cache.attend(self.spec, state, token)[0], state, carry

    def compress(self, state: State) -> State:
        """The state within its budget again; called after every decoded token.

        A method that compresses only now and then decides so by its own state, inside `jax.lax.cond`. Rows of a ragged batch and
        policies composed with one another are then due at different times.
        """
        return state

    def is_due(self, state: State) -> Bool[Array, " B"]:
        """Rows in which `compress` has something to do now; of methods that compress only now and then."""
        raise NotImplementedError(f"{type(self).__qualname__}: define is_due(state), as when='when_full'")

    def view(self, state: State) -> LayerCache:
        """What is kept, in slots of all the layer's KV heads, for looking at it. By default the state's `cache`."""
        return state.cache

    def map_parts(self, change: "Callable[[CacheLayer[Any]], CacheLayer[Any]]") -> "CacheLayer[Any]":
        """The layer with `change` applied to each layer that holds some of its KV heads. Most layers hold all of them."""
        return change(self)


@dataclasses.dataclass(frozen=True)
class WrappedLayer(CacheLayer[P]):
    """A layer around another one, to which every function is forwarded. Subclasses override what they change.

    Attributes:
        inner: the wrapped layer.
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

    def append(self, state: State, token: Token) -> State:
        return self.inner.append(state, token)

    def look_ahead(self, queries: Queries, position: Int[Array, " B"], carry: Carry) -> Carry:
        return self.inner.look_ahead(queries, position, carry)

    def attend(self, state: State, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], State, Carry]:
        return self.inner.attend(state, token, carry)

    def compress(self, state: State) -> State:
        return self.inner.compress(state)

    def is_due(self, state: State) -> Bool[Array, " B"]:
        return self.inner.is_due(state)

    def view(self, state: State) -> LayerCache:
        return self.inner.view(state)


def check_reads_blocks(layer: CacheLayer[Any]) -> None:
    """Raise `PolicyError` unless a layer can prefill a text in blocks."""
    if layer.reads == "whole":
        raise PolicyError(
            f"{layer.policy.info.name} chooses from the prompt as a whole, which therefore cannot be read in blocks; leave prefill_block "
            "out, or take another policy, such as snapkv, treekv or chelsea"
        )


def read_as_prompt(
    layer: CacheLayer[Any], state: State, block: TokenBlock, carry: Carry, *, rotated: bool = True
) -> tuple[Float[Array, "B S N H"], State, Carry]:
    """`CacheLayer.read_block` of layers whose `prefill` chooses from what is kept and a block as it does from a prompt.

    Args:
        rotated: see `as_prompt_with_block`.
    """
    check_reads_blocks(layer)
    prompt = cache.as_prompt_with_block(layer.view(state), block, rotated=rotated)
    new, carry = layer.prefill(prompt, carry)
    return cache.attend_prompt(layer.spec, prompt), cache.where_rows(block.count > 0, new, state), carry


@any_rank
def prefill_alone(layer: CacheLayer[Any], prompt: PromptKV, carry: Carry) -> tuple[State, Carry]:
    """`CacheLayer.prefill` of a layer without a model, including a layer that reads parts of its prompt again.

    Without a model nothing can be read again, so replays observe the queries, keys and values of the first pass.
    """
    for replay in layer.replays:
        carry = replay.with_observed(layer.spec.layer, without_model(replay, layer.spec, prompt), carry, layer.key)
    return layer.prefill(prompt, carry)


def changed_fields(policy: Policy, fields: Iterable[Any]) -> list[str]:
    """`name=value` of a policy's hyperparameters that are not at their defaults, as they are written in text."""
    values = [
        (field.name, getattr(policy, field.name)) for field in fields if getattr(policy, field.name) != field.default
    ]
    return [
        f"{name}=({value})" if hasattr(value, "layer") else f"{name}={'none' if value is None else value}"
        for name, value in values
    ]


@functools.lru_cache(maxsize=1 << 14)
def held_bytes(layer: CacheLayer[Any]) -> tuple[int, int]:
    """Bytes that one layer's cache holds on the device and on the host."""
    held = jax.make_jaxpr(any_rank(layer.init))().out_avals
    host = _nbytes(leaf for leaf in held if leaf.memory_space == jax.memory.Space.Host)
    return _nbytes(held) - host, host


def _nbytes(leaves: Iterable[Any]) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
