"""The policy protocol: what to keep of the past, as a few pure functions over a cache state.

A policy is a frozen dataclass of plain hyperparameters. It is hashable, so equal policies share one compiled program. The model
calls it once a layer for the prompt, and four times a layer for every new token:

    state, carry = policy.prefill(spec, q, k, v, lengths, carry)

    state = policy.append(spec, state, k, v, pos)
    out, state, carry = policy.attend(spec, state, q, pos, carry)
    carry = policy.foresee(next_spec, queries, pos, carry)
    state = policy.compress(spec, state)

Queries and keys arrive *unrotated*: a policy that keeps original positions rotates keys when it stores them, one that
reassigns positions rotates when it attends. `spec.rope` does either. The state's leaves never change shape or dtype.
`carry` travels from layer to layer within one step, for what a layer tells the next ones.

Where XLA computes it, as on a CPU, all of it can be differentiated (`jax.grad`): through the keys and values that are kept, and not
through the choice of them, which is piecewise constant. So with an ample budget gradients are the full cache's. Of quantised numbers
only scales and zeros have gradients. Pallas kernels of attention, and a policy that cannot be differentiated (`chelsea`), say so when that is tried.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.arguments import plain
from kvjax.cache import LayerSpec, Slots
from kvjax.models.config import ModelConfig

State = Any
"""A policy's cache of one layer: any pytree of fixed shape."""

Carry = Any
"""What travels from layer to layer: any pytree, or None."""

Due = Bool[Array, " B"] | Literal["always", "never"]
"""When `Policy.compress` has something to do: now in some rows, after every token, or never."""

Memory = Literal["full", "freed", "bandwidth", "quantised"]
"""What becomes of the memory of what is dropped, see `Policy`."""

Stage = Literal["none", "prompt", "decoding", "both"]
"""When a policy compresses, see `Policy`."""


class PolicyError(ValueError):
    """An unknown policy, a hyperparameter it does not have or cannot take, or a budget it cannot work with."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """Base of all policies: keeps everything, at original positions. Subclasses override what they do differently.

    Class attributes describe the method to people (`kvjax policies` prints them):
        name: how it is asked for.
        paper: authors, year, title.
        keeps: what it keeps, in one phrase.
        memory: "freed" (dropped slots hold no memory), "bandwidth" (all is kept, a part is read), "quantised" (all is kept, in
            fewer bits), or "full".
        stage: when it compresses: the "prompt" once it is read, while "decoding", "both", or "none".
        grows: whether the budget is for the prompt alone, and new tokens are kept in addition to it.
        merges: whether a slot may hold the mean of several tokens (it then counts as often, and weights sum to all tokens seen).
        adds: whether values of tokens that go are added to those of tokens that stay.
        positions: "original" (a token stays where it stood in the text) or "cache" (its place among the kept ones, which keeps
            any sequence inside the trained window).
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    keeps: ClassVar[str] = ""
    memory: ClassVar[Memory] = "full"
    stage: ClassVar[Stage] = "none"
    grows: ClassVar[bool] = False
    merges: ClassVar[bool] = False
    adds: ClassVar[bool] = False
    positions: ClassVar[Literal["original", "cache"]] = "original"

    def bind(self, config: ModelConfig) -> "Policy":
        """The policy for one model: where a method treats heads or layers differently, the composition that does so.

        Called once before anything runs; binding again changes nothing.

        Raises:
            PolicyError: the policy is for another model, or needs something of this one that it does not have.
        """
        return self

    def check(self, tokens: int) -> None:
        """Raise `PolicyError` if the policy cannot serve a sequence that will reach `tokens` tokens."""

    def recalls(self, spec: LayerSpec) -> bool:
        """Whether queries of this layer read a selection of all that is kept, and not simply everything; see `Recalling`."""
        return False

    def capacity(self, spec: LayerSpec) -> int:
        """Slots to allocate in one head of this layer."""
        return cache.round_slots(spec.max_tokens)

    def init(self, spec: LayerSpec) -> State:
        """The state of a sequence of no tokens."""
        return cache.empty(spec, self.capacity(spec))

    def prefill(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
        carry: Carry,
    ) -> tuple[State, Carry]:
        """The state after a right-padded prompt.

        Args:
            q, k, v: unrotated queries and keys, and values.
            lengths: tokens in each row.
        """
        return cache.whole(spec, self.capacity(spec), rotated(spec, k), v, lengths), carry

    def append(
        self, spec: LayerSpec, state: State, k: Float[Array, "B K H"], v: Float[Array, "B K H"], pos: Int[Array, " B"]
    ) -> State:
        """The state with one new token a row, at original position `pos`."""
        return cache.insert(state, k, v, pos, rope=spec.rope)

    def attend(
        self, spec: LayerSpec, state: State, q: Float[Array, "B N H"], pos: Int[Array, " B"], carry: Carry
    ) -> tuple[Float[Array, "B N H"], State, Carry]:
        """The attention output of the newest token; scores that the state keeps may move."""
        out, _ = cache.attend(spec, state, cache.turned(spec.rope, q, pos), pos)
        return out, state, carry

    def foresee(
        self, spec: LayerSpec, queries: Callable[[], Float[Array, "B N H"]], pos: Int[Array, " B"], carry: Carry
    ) -> Carry:
        """Look ahead to a layer before it begins: called between two layers with the `spec` of the second.

        Args:
            queries: gives the unrotated queries that the second layer would have for the first one's attention input. They are
                computed if this is called.
        """
        return carry

    def compress(self, spec: LayerSpec, state: State) -> State:
        """The state within its budget again; called after every decoded token.

        A method that compresses only now and then decides so by its own state, inside `jax.lax.cond`: rows of a ragged batch,
        and policies composed with one another, each keep their own time. `due` tells when that is.
        """
        return state

    def due(self, spec: LayerSpec, state: State) -> Due:
        """Whether `compress` has something to do now.

        The decode loop runs until a layer's is due, instead of having every layer ask after every token.
        """
        return "never" if type(self).compress is Policy.compress else "always"

    def extend(
        self,
        spec: LayerSpec,
        state: State,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        pos: Int[Array, " B"],
        carry: Carry,
    ) -> tuple[Float[Array, "B S N H"], State, Carry]:
        """Read S tokens a row, which stand at original positions from `pos` on: what a piece of a long prompt goes through.

        The result is that of `append`, `attend` and `compress` for one token after the other, which this is; a policy that
        can have it sooner overrides this. `carry` holds every token's, stacked in front.
        """

        def one(state: State, token: tuple[Any, ...]) -> tuple[State, tuple[Array, Carry]]:
            q, k, v, pos, carry = token
            out, state, carry = self.attend(spec, self.append(spec, state, k, v, pos), q, pos, carry)
            return self.compress(spec, state), (out, carry)

        places = jnp.swapaxes(cache.places(pos, q.shape[1]), 0, 1)
        tokens = *(jnp.swapaxes(x, 0, 1) for x in (q, k, v)), places, carry
        state, (out, carry) = jax.lax.scan(one, state, tokens)
        return jnp.swapaxes(out, 0, 1), state, carry

    def slots(self, spec: LayerSpec, state: State) -> Slots:
        """One layer's slots in all its KV heads, for looking at what is kept."""
        return state if isinstance(state, Slots) else state.slots

    def each(self, wrap: Callable[["Policy"], "Policy"]) -> "Policy":
        """This policy with `wrap` around it; of a composition, around each policy that it is made of."""
        return wrap(self)

    def layer_bytes_read(self, spec: LayerSpec) -> int:
        """Bytes of keys, values and metadata that a decoding step reads in one layer: of most policies, all they hold."""
        return sum(self._layer_nbytes(spec))

    def nbytes(
        self, config: ModelConfig, batch: int, prompt_len: int, max_new_tokens: int, dtype: Any = jnp.bfloat16
    ) -> int:
        """Bytes the cache of a whole model will hold on the device, known before anything runs.

        Args:
            prompt_len: tokens of the longest prompt.
            dtype: type of keys and values.
        """
        policy, specs = self.bind(config), cache.layer_specs(config, batch, prompt_len, max_new_tokens, dtype)
        return sum(policy._layer_nbytes(spec)[0] for spec in specs)

    def host_nbytes(
        self, config: ModelConfig, batch: int, prompt_len: int, max_new_tokens: int, dtype: Any = jnp.bfloat16
    ) -> int:
        """Bytes it will hold in the host's memory, see `offloaded`; arguments as for `nbytes`."""
        policy, specs = self.bind(config), cache.layer_specs(config, batch, prompt_len, max_new_tokens, dtype)
        return sum(policy._layer_nbytes(spec)[1] for spec in specs)

    def bytes_read(
        self, config: ModelConfig, batch: int, prompt_len: int, max_new_tokens: int, dtype: Any = jnp.bfloat16
    ) -> int:
        """Bytes that one decoding step reads in the whole model, see `layer_bytes_read`; arguments as for `nbytes`."""
        policy, specs = self.bind(config), cache.layer_specs(config, batch, prompt_len, max_new_tokens, dtype)
        return sum(policy.layer_bytes_read(spec) for spec in specs)

    def _layer_nbytes(self, spec: LayerSpec) -> tuple[int, int]:
        """Bytes that one layer's cache holds on the device and on the host."""
        held = jax.make_jaxpr(partial(self.init, spec))().out_avals
        host = _nbytes(leaf for leaf in held if leaf.memory_space == jax.memory.Space.Host)
        return _nbytes(held) - host, host


def any_due(parts: Iterable[Due]) -> Due:
    """Whether any of several answers of `Policy.due` is yes."""
    told = list(parts)
    asked = [part for part in told if not isinstance(part, str)]
    if any(isinstance(part, str) and part == "always" for part in told):
        return "always"
    return functools.reduce(jnp.logical_or, asked) if asked else "never"


def rotated(spec: LayerSpec, x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """A prompt's queries or keys, rotated to their original positions."""
    return spec.rope.rotate(x, jnp.arange(x.shape[1], dtype=jnp.int32)[None, :, None])


def budget_tokens(budget: int | float, tokens: int) -> int:
    """A budget in slots: as given, or as a fraction of the `tokens` a sequence will reach, rounded down."""
    return budget if isinstance(budget, int) else tokens * _ratio(budget).numerator // _ratio(budget).denominator


def budget_rows(budget: int | float, tokens: Int[Array, "*B"]) -> Int[Array, "*B"]:
    """`budget_tokens` for every row, in exact integer arithmetic."""
    if isinstance(budget, int):
        return jnp.full_like(tokens, budget)
    ratio = _ratio(budget)
    whole, rest = tokens // ratio.denominator, tokens % ratio.denominator
    return whole * ratio.numerator + rest * ratio.numerator // ratio.denominator


def check_budget(name: str, budget: Any) -> None:
    """Raise `PolicyError` unless `budget` is a positive number of tokens or a fraction in (0, 1]."""
    tokens = isinstance(budget, int) and not isinstance(budget, bool) and budget > 0
    fraction = isinstance(budget, float) and 0 < budget <= 1
    if not (tokens or fraction):
        raise PolicyError(
            f"{name}: budget={budget!r}; give a positive whole number of tokens (512) or a fraction of prompt + new tokens (0.2)"
        )


def check_fields(policy: Policy, **least: int | float) -> None:
    """Raise `PolicyError` if a hyperparameter of `policy` is out of range.

    A `budget` is checked as in `check_budget`, a field declared as a `Literal` against its values, and one declared as a number for
    being one. Numbers of NumPy and JAX become Python's.

    Args:
        least: by field, the least it may be; None, where a field has it, is no number and passes.
    """
    for field in dataclasses.fields(policy):  # numbers of NumPy and JAX make the same policy as Python's
        object.__setattr__(policy, field.name, plain(getattr(policy, field.name)))
    values = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    if "budget" in values:
        check_budget(policy.name, values["budget"])
    for field, hint in get_type_hints(type(policy)).items():
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        allowed = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
        if field not in values or (values[field] is None and type(None) in kinds):
            continue
        if allowed and values[field] not in allowed:
            raise PolicyError(f"{policy.name}: {field}={values[field]!r}; give one of {', '.join(map(repr, allowed))}")
        if {int, float, type(None)}.issuperset(kinds) and not _is_number(values[field], whole=float not in kinds):
            raise PolicyError(
                f"{policy.name}: {field}={values[field]!r}; give a {'number' if float in kinds else 'whole number'}"
            )
    for field, bound in least.items():
        if values[field] is not None and values[field] < bound:
            raise PolicyError(f"{policy.name}: {field}={values[field]}; give {bound} or more")


def _is_number(value: Any, whole: bool) -> bool:
    """Whether it is a finite number; True and False are none."""
    return isinstance(value, int if whole else int | float) and not isinstance(value, bool) and math.isfinite(value)


def _ratio(fraction: float) -> Fraction:
    return Fraction(fraction).limit_denominator(10_000)


def _nbytes(leaves: Iterable[Any]) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
