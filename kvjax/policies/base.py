"""The policy protocol: what to keep of the past.

A `Policy` is a frozen dataclass of plain hyperparameters, what a user names. It is hashable, so equal policies share one compiled
program. `policy.layer(spec)` gives the pure functions of one layer, a `Layer`, over a state whose leaves never change shape or
dtype. The model calls them once for the prompt, and for every new token:

    state, carry = layer.prefill(prompt, carry)

    state = layer.append(state, token)
    out, state, carry = layer.attend(state, token, carry)
    state = layer.compress(state)

A `Prompt` and a `Token` have queries and keys both rotated and not: a policy that keeps original positions stores rotated keys, one
that assigns positions anew rotates when it attends. `carry` travels from layer to layer within one step, for what a
layer tells the next ones. What only some methods can do is in `capabilities`, and declared by a layer's `traits`.

Where XLA computes it, as on a CPU, all of it can be differentiated (`jax.grad`): through the keys and values that are kept, and not
through the choice of them, which is piecewise constant. So with an ample budget gradients are the full cache's. Of quantised numbers
only scales and zeros have gradients. Pallas kernels of attention, and policies that cannot be differentiated (`chelsea`, `attention_matching` and
`offloaded`), raise an error that says so.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, Literal, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax import cache
from kvjax._util.any_rank import any_rank
from kvjax.cache import LayerSpec, Prompt, Token
from kvjax.config import ModelConfig

from .fields import check_fields
from .info import PolicyError, PolicyInfo
from .replay import Replay

State = Any
"""A layer's cache: any pytree of fixed shape."""

Carry = dict[str, Any]
"""What travels from layer to layer: by `Layer.key`, so that policies composed with one another do not mix."""

Compression = Literal["never", "every_step", "when_full"]
"""When a layer's `compress` has something to do: never, after every token, or as `capabilities.WhenFull` tells."""

Reading = Literal["blocks", "tokens", "whole"]
"""How a text is read that comes in parts, see `Traits`."""

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

    def layer(self, spec: LayerSpec) -> "Layer[Any]":
        """One layer's functions. Whatever differs from layer to layer is decided here."""
        return Layer(self, spec)

    def map(self, wrap: Callable[["Policy"], "Policy"]) -> "Policy":
        """This policy with `wrap` around it; of a combination, around each policy that it is made of."""
        return wrap(self)

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
        """Bytes that one decoding step reads in the whole model, see `Layer.bytes_read`; arguments as for `nbytes`."""
        return sum(layer.bytes_read for layer in self._layers(config, batch, prompt_len, max_new_tokens, dtype))

    def _layers(self, config: ModelConfig, *shape: Any) -> list["Layer[Any]"]:
        policy = self.bind(config)
        return [policy.layer(spec) for spec in cache.layer_specs(config, *shape)]


@dataclasses.dataclass(frozen=True)
class Traits:
    """What a layer declares of itself; tests prove it true.

    Attributes:
        compression: when `compress` has something to do.
        plain: a new token goes into the next slot of a `LayerCache` and attends to all slots, as in `Layer`.
        compress_reads_kv: `compress` computes with keys or values, and does not just pass them on.
        looks_ahead: it is a `capabilities.LooksAhead`.
        reading: how a text is read that comes in parts, or is too long to be held: in "blocks" (it is a `capabilities.ReadsBlocks`),
            its "tokens" one after the other, or not, as the layer chooses from a "whole" prompt.
        has_own_store: it is a `capabilities.HasOwnStore`.
        deals_store: what is large in its own store are keys and values, of which each device may have some slots: its state has `k` and `v`,
            `slot_axes`, `pos` of [B, K, C] and `dealt`, as a `LayerCache` has.
        sparse: it is a `sparse.SparseLayer`: queries read a selection of all that is kept.
        dense: it keeps everything, whatever its policy does in other layers.
        replays: how parts of a prompt are to be read once more before `prefill` chooses from it, whose prompt then has no queries and
            only rotated keys, and whose carry has what was learnt (`Replay.found`).
        surroundings: whether it is told what the model has around its attention (`Surroundings`).
        in_parts: it is a `capabilities.InParts`: groups of its KV heads are layers by themselves.
        sums_heads: a step of it adds up, or seeks the highest, over the devices among which its KV heads are dealt. GPUs that are not told may
            wait for each other for ever.
    """

    compression: Compression = "never"
    plain: bool = False
    compress_reads_kv: bool = False
    looks_ahead: bool = False
    reading: Reading = "whole"
    has_own_store: bool = False
    deals_store: bool = False
    sparse: bool = False
    dense: bool = False
    replays: tuple[Replay, ...] = ()
    surroundings: bool = False
    in_parts: bool = False
    sums_heads: bool = False

    @property
    def deals_slots(self) -> bool:
        """Whether keys and values can be on several devices, each of which has some slots (`kvjax.policies.dealt`).

        Between two readings of text such a layer leaves them to functions of `kvjax.cache`, or as a sparse one with a store of its own to
        whoever gives it what it selects (`sparse.SparseLayer.attend_to`).
        """
        return (
            self.sparse or self.deals_store or (self.plain and self.compression == "never" and not self.has_own_store)
        )


@dataclasses.dataclass(frozen=True)
class Layer(Generic[P]):
    """One layer's functions, pure and hashable. This one keeps everything; subclasses override what they do differently.

    Attributes:
        policy: whose layer it is.
        spec: all that is static about it.
        traits: what it declares of itself.
    """

    policy: P
    spec: LayerSpec
    traits: Traits = Traits(plain=True)

    @property
    def max_kept(self) -> int:
        """The most tokens that one head holds between two steps."""
        return self.spec.max_tokens

    @property
    def capacity(self) -> int:
        """Slots to allocate in one head: also for the newest token, which comes before another one goes."""
        newest = 0 if self.traits.compression == "never" else 1
        if not isinstance(self.max_kept, int):
            raise PolicyError(
                f"{self.policy.info.name}: max_kept={self.max_kept}; give a whole number of tokens, which kvjax.policies.budget_tokens and "
                "budget_rows make of a fractional budget"
            )
        return cache.round_slots(min(self.max_kept + newest, self.spec.max_tokens))

    @property
    def bytes_read(self) -> int:
        """Bytes of keys, values and metadata that a decoding step reads: of most methods, all they hold."""
        return sum(held_bytes(self))

    @property
    def key(self) -> str:
        """Under what a policy finds in `carry` what it has told itself."""
        return repr((self.policy, self.spec.kv_heads))

    def init(self, total: Int[Array, " B"] | None = None) -> State:
        """The state of sequences of no tokens.

        Args:
            total: tokens that each row will reach, which fractional budgets are fractions of; by default all there are slots for.
        """
        return cache.empty(self.spec, self.capacity)

    def prefill(self, prompt: Prompt, carry: Carry) -> tuple[State, Carry]:
        """The state after a right-padded prompt."""
        return cache.from_prompt(self.spec, self.capacity, prompt), carry

    def append(self, state: State, token: Token) -> State:
        """The state with one new token per row."""
        return cache.insert(state, token)[0]

    def attend(self, state: State, token: Token, carry: Carry) -> tuple[Float[Array, "B N H"], State, Carry]:
        """The attention output of the newest token, which is in the state; scores that the state keeps may move."""
        return cache.attend(self.spec, state, token)[0], state, carry

    def compress(self, state: State) -> State:
        """The state within its budget again; called after every decoded token.

        A method that compresses only now and then decides so by its own state, inside `jax.lax.cond`: rows of a ragged batch,
        and policies composed with one another, each keep their own time.
        """
        return state


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
def held_bytes(layer: Layer[Any]) -> tuple[int, int]:
    """Bytes that one layer's cache holds on the device and on the host."""
    held = jax.make_jaxpr(any_rank(layer.init))().out_avals
    host = _nbytes(leaf for leaf in held if leaf.memory_space == jax.memory.Space.Host)
    return _nbytes(held) - host, host


def _nbytes(leaves: Iterable[Any]) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
