"""The policy protocol: which tokens of the past a layer keeps.

A `Policy` is a frozen dataclass of hyperparameters that users name. It is hashable, so equal policies share one
compiled program. `policy.layer(spec)` returns a `CacheLayer`: pure functions of one layer over a state whose leaves
never change shape or dtype. The model calls them once for the prompt, and once for every new token:

    state, carry = layer.prefill(prompt, carry)

    state = layer.append(state, token)
    out, state, carry = layer.attend(state, token, carry)
    state = layer.compress(state)

`CacheLayer` itself keeps everything. A method overrides the functions that it changes.

A `PromptKV` and a `Token` have queries and keys both rotated and unrotated. A policy that keeps original positions
stores rotated keys. A policy that assigns new positions rotates when it attends. `carry` travels from layer to layer
within one step, and holds what a layer passes to later layers.

With the XLA implementations, as on CPU, all functions are differentiable (`jax.grad`) with respect to keys and values.
The choice of tokens is piecewise constant, so no gradient flows through it. Only scales and zeros of quantised values
have gradients. Pallas attention kernels, `chelsea`, `attention_matching` and `offloaded` raise an error when they are
differentiated.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax.numpy as jnp

from kvjax import cache
from kvjax._util.arguments import plain
from kvjax.cache import LayerSpec
from kvjax.config import ModelConfig

from .budget import check_budget
from .families.recurrent import RecurrentLayer
from .families.ring import RingLayer
from .fields import check_fields
from .info import PolicyError, PolicyInfo
from .layer import CacheLayer, held_bytes

log = logging.getLogger(__name__)


def _values(policy: "Policy") -> Any:
    """Hyperparameters with their types."""
    return tuple(_typed(getattr(policy, field.name)) for field in dataclasses.fields(policy) if field.compare)


def _typed(value: Any) -> Any:
    return tuple(map(_typed, value)) if isinstance(value, tuple) else (type(value), value)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Base of all policies: keeps every token, at its original position.

    Class attributes:
        about: description of the method.

    Example:
        >>> policy = kvjax.SnapKV(budget=0.25, window=16)
        >>> str(policy), str(policy.with_budget(64))
        ('snapkv:budget=0.25,window=16', 'snapkv:budget=64,window=16')
        >>> full, small = (each.nbytes(params.config, 1, 192, 32, "float32") for each in (kvjax.Full(), policy))
        >>> full, small
        (121880, 52248)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo("")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("__eq__", "__hash__"):  # a dataclass does not replace those that its class has
            if name not in vars(cls):
                setattr(cls, name, vars(Policy)[name])

    def __eq__(self, other: object) -> bool:
        """Whether class and hyperparameters are equal, with their types: a budget of 1 is a token, and 1.0 is everything."""
        return isinstance(other, Policy) and type(self) is type(other) and _values(self) == _values(other)

    def __hash__(self) -> int:
        return hash((type(self), _values(self)))

    def __post_init__(self) -> None:
        """Check the hyperparameters, and convert NumPy and JAX numbers to Python's. See `fields.check_fields`."""
        check_fields(self)

    @property
    def info(self) -> PolicyInfo:
        """Description of this policy, under the name of its class if it has no other. A combination composes it from its parts."""
        return self.about if self.about.name else dataclasses.replace(self.about, name=type(self).__name__)

    def __str__(self) -> str:
        """The policy as text that `get_policy` parses: its name and the non-default hyperparameters."""
        settings = ",".join(changed_fields(self, dataclasses.fields(self)))
        return f"{self.info.name}:{settings}" if settings else self.info.name

    def bind(self, config: ModelConfig) -> "Policy":
        """Return the policy for one model.

        A method that treats heads or layers differently returns the composition that does so. Called once before
        anything runs. Binding again changes nothing.

        Raises:
            PolicyError: the policy is for another model, or needs something that this model lacks.
        """
        return self

    def for_model(self, config: ModelConfig) -> "Policy":
        """Return the policy for one model, bound to the layers that it compresses. See `Windowed` for the others.

        Applying it again changes nothing.

        Raises:
            PolicyError: as `bind`.
        """
        if config.compressed == tuple(range(config.num_layers)) and not any(config.windows):
            return self.bind(config)
        return Windowed.of(self, config, config.compressed)

    def validate(self, tokens: int) -> None:
        """Raise `PolicyError` if the policy cannot serve a sequence that will reach `tokens` tokens."""

    def layer(self, spec: LayerSpec) -> "CacheLayer[Any]":
        """Return the functions of one layer. Differences between layers are decided here."""
        return CacheLayer(self, spec)

    def map(self, wrap: Callable[["Policy"], "Policy"]) -> "Policy":
        """Return `wrap(self)`. A combination returns itself with `wrap` applied to each of its parts."""
        return wrap(self)

    def with_budget(self, budget: Any) -> "Policy":
        """Return the policy with another budget. A combination passes it to every part that takes one.

        A policy without a budget, such as `full`, checks the value and returns itself. A sweep over budgets therefore
        needs no exception.

        Args:
            budget: number of tokens, or a fraction in (0, 1]. NumPy and JAX numbers are accepted.

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
        """Bytes that the cache of a whole model occupies on the device, computed without running anything.

        Args:
            config: the model.
            batch: number of sequences.
            prompt_len: tokens of the longest prompt.
            max_new_tokens: maximum number of generated tokens.
            dtype: dtype of keys and values.
        """
        return sum(held_bytes(layer)[0] for layer in self._layers(config, batch, prompt_len, max_new_tokens, dtype))

    def host_nbytes(
        self, config: ModelConfig, batch: int, prompt_len: int, max_new_tokens: int, dtype: Any = jnp.bfloat16
    ) -> int:
        """Bytes that the cache occupies in host memory, see `offloaded`. Arguments as for `nbytes`."""
        return sum(held_bytes(layer)[1] for layer in self._layers(config, batch, prompt_len, max_new_tokens, dtype))

    def bytes_read(
        self, config: ModelConfig, batch: int, prompt_len: int, max_new_tokens: int, dtype: Any = jnp.bfloat16
    ) -> int:
        """Bytes that one decoding step of the whole model reads. Arguments as for `nbytes`."""
        return sum(layer.bytes_read for layer in self._layers(config, batch, prompt_len, max_new_tokens, dtype))

    def _layers(self, config: ModelConfig, *shape: Any) -> list["CacheLayer[Any]"]:
        policy = self.for_model(config)
        return [policy.layer(spec) for spec in cache.layer_specs(config, *shape)]


def changed_fields(policy: Policy, fields: Iterable[Any]) -> list[str]:
    """Return `name=value` for each hyperparameter that differs from its default, in the text form of policies."""
    values = [
        (field.name, getattr(policy, field.name)) for field in fields if getattr(policy, field.name) != field.default
    ]
    return [
        f"{name}=({value})" if hasattr(value, "layer") else f"{name}={'none' if value is None else value}"
        for name, value in values
    ]


@functools.lru_cache(maxsize=256)
def _report_windows(policy: str, window: int | None) -> None:
    """Log, once per policy and window, that layers keep their window instead of the policy's choice."""
    log.warning(
        "%s keeps at least the sliding window of %s tokens. Layers with this window keep the window instead. For "
        "compression, give a budget below the window.",
        policy,
        window,
    )


@dataclasses.dataclass(frozen=True)
class Windowed(Policy):
    """A policy for a model with sliding windows or recurrent layers, made by `Policy.for_model`.

    The policy compresses the layers with full attention. The others keep the tokens inside their window, in slots that
    are reused. In a model whose layers all have a window, the policy compresses all of them. A layer in which the policy
    would keep at least a window, in at least as many bytes, keeps the window instead. Recurrent layers have no tokens to
    choose from, and keep their state.

    Attributes:
        policy: the bound policy.
        layers: layers of the model that it compresses. It sees them as the layers of a model of their own.
        num_layers: layers of the model.
        recurrent: number of layers without a cache.
    """

    policy: Policy
    layers: tuple[int, ...]
    num_layers: int
    recurrent: int = 0

    @classmethod
    def of(cls, policy: Policy, config: ModelConfig, layers: tuple[int, ...]) -> "Windowed":
        """Return a policy that is not bound yet, bound to some layers of a model."""
        recurrent = config.num_layers - len(config.cached)
        return cls(policy.bind(config.with_layers(layers)), layers, config.num_layers, recurrent)

    @property
    def budget(self) -> int | float | None:
        """The budget of the policy within, None if it has none."""
        return getattr(self.policy, "budget", None)

    @property
    def info(self) -> PolicyInfo:
        info = self.policy.info
        every = len(self.layers) + self.recurrent == self.num_layers
        return info if every else dataclasses.replace(info, positions="original")

    def __str__(self) -> str:
        return str(self.policy)

    def bind(self, config: ModelConfig) -> "Windowed":
        return dataclasses.replace(self, policy=self.policy.bind(config))

    def for_model(self, config: ModelConfig) -> "Windowed":
        recurrent = config.num_layers - len(config.cached)
        if self.num_layers != config.num_layers:
            raise PolicyError(
                f"{self.info.name}: the policy is bound to a model of {self.num_layers} layers, but this model has "
                f"{config.num_layers}. Give an unbound policy."
            )
        if self.recurrent != recurrent:
            raise PolicyError(
                f"{self.info.name}: the policy is bound to a model with {self.recurrent} recurrent layers, but this model has "
                f"{recurrent}. Give an unbound policy."
            )
        return self.bind(config.with_layers(self.layers))

    def with_budget(self, budget: Any) -> "Windowed":
        return dataclasses.replace(self, policy=self.policy.with_budget(budget))

    def validate(self, tokens: int) -> None:
        self.policy.validate(tokens)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        if spec.recurrent is not None:
            return RecurrentLayer(self, spec)
        if spec.layer not in self.layers:
            return RingLayer(self, spec)
        own = dataclasses.replace(spec, layer=self.layers.index(spec.layer), num_layers=len(self.layers))
        layer = self.policy.layer(own)
        return RingLayer(self, spec) if spec.window is not None and self._keeps_window(layer) else layer

    def _keeps_window(self, layer: CacheLayer[Any]) -> bool:
        """Whether a layer's heads all keep at least the sliding window, in at least as many bytes."""
        window, kept = layer.spec.window, list[int]()
        layer.map_parts(lambda part: kept.append(part.max_kept) or part)
        ring = RingLayer(self, layer.spec)
        keeps = window is not None and min(kept) >= window and sum(held_bytes(ring)) <= sum(held_bytes(layer))
        if keeps and self.info.takes_budget:
            _report_windows(str(self), window)
        return keeps

    def map(self, wrap: Callable[[Policy], Policy]) -> "Windowed":
        return dataclasses.replace(self, policy=self.policy.map(wrap))
