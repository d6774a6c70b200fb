"""Combinators: policies made of policies, by layer and by head. Each is a policy itself, so they nest."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import cache, host_memory
from kvjax.cache import LayerSpec, Slots
from kvjax.models.config import ModelConfig
from kvjax.pallas_kernels.divided import query_heads

from .base import Carry, Due, Policy, PolicyError, State, any_due

Part = tuple[Policy, LayerSpec, np.ndarray]
"""Of a layer: a policy, the layer as it sees it, and its KV heads."""


@dataclasses.dataclass(frozen=True)
class ByLayer(Policy):
    """Another policy in each layer; made by `by_layer`.

    Attributes:
        layers: one policy a layer.
    """

    layers: tuple[Policy, ...]

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"by_layer({', '.join(dict.fromkeys(policy.name for policy in self.layers))})"

    @property
    def positions(self) -> Literal["original", "cache"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _positions(self.layers)

    @property
    def grows(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(policy.grows for policy in self.layers)

    def bind(self, config: ModelConfig) -> "ByLayer":
        if config.num_layers != len(self.layers):
            raise PolicyError(f"by_layer was given {len(self.layers)} layers, but the model has {config.num_layers}")
        return ByLayer(tuple(policy.bind(config) for policy in self.layers))

    def check(self, tokens: int) -> None:
        for policy in dict.fromkeys(self.layers):
            policy.check(tokens)

    def each(self, wrap: Callable[[Policy], Policy]) -> "ByLayer":
        return ByLayer(tuple(policy.each(wrap) for policy in self.layers))

    def at(self, spec: LayerSpec) -> Policy:
        """The policy of this layer."""
        return self.layers[spec.layer]

    def layer_bytes_read(self, spec: LayerSpec) -> int:
        return self.at(spec).layer_bytes_read(spec)

    def capacity(self, spec: LayerSpec) -> int:
        return self.at(spec).capacity(spec)

    def init(self, spec: LayerSpec) -> State:
        return self.at(spec).init(spec)

    def prefill(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
        carry: Carry,
    ) -> tuple[State, Carry]:
        state, own = self.at(spec).prefill(spec, q, k, v, lengths, _own(carry, self.at(spec)))
        return state, _with(carry, self.at(spec), own)

    def append(
        self, spec: LayerSpec, state: State, k: Float[Array, "B K H"], v: Float[Array, "B K H"], pos: Int[Array, " B"]
    ) -> State:
        return self.at(spec).append(spec, state, k, v, pos)

    def attend(
        self, spec: LayerSpec, state: State, q: Float[Array, "B N H"], pos: Int[Array, " B"], carry: Carry
    ) -> tuple[Float[Array, "B N H"], State, Carry]:
        out, state, own = self.at(spec).attend(spec, state, q, pos, _own(carry, self.at(spec)))
        return out, state, _with(carry, self.at(spec), own)

    def foresee(
        self, spec: LayerSpec, queries: Callable[[], Float[Array, "B N H"]], pos: Int[Array, " B"], carry: Carry
    ) -> Carry:
        policy = self.at(spec)
        return _with(carry, policy, policy.foresee(spec, queries, pos, _own(carry, policy)))

    def compress(self, spec: LayerSpec, state: State) -> State:
        return self.at(spec).compress(spec, state)

    def due(self, spec: LayerSpec, state: State) -> Due:
        return self.at(spec).due(spec, state)

    def slots(self, spec: LayerSpec, state: State) -> Slots:
        return self.at(spec).slots(spec, state)


def by_layer(
    policies: Sequence[Policy] | Mapping[int, Policy], default: Policy | None = None, num_layers: int | None = None
) -> ByLayer:
    """Give layers policies of their own.

    Args:
        policies: one a layer; or a mapping from layer to policy, with `default` for the layers it leaves out of `num_layers`.

    Raises:
        PolicyError: a mapping without `default` or `num_layers`, or with a layer that does not exist.
    """
    if isinstance(policies, Mapping):
        if default is None or num_layers is None:
            raise PolicyError("by_layer: a mapping of layers needs a default policy and num_layers")
        unknown = [layer for layer in policies if not 0 <= layer < num_layers]
        if unknown:
            raise PolicyError(f"by_layer: layer {unknown[0]} is not among the model's {num_layers} (counted from 0)")
        policies = [policies.get(layer, default) for layer in range(num_layers)]
    return ByLayer(tuple(policies))


@dataclasses.dataclass(frozen=True)
class ByHead(Policy):
    """Another policy for each group of KV heads; made by `by_head`.

    Every group has a cache of its own shape, so a group that keeps less really holds less memory.

    Attributes:
        groups: policies.
        heads: for each group, the KV heads that it has in each layer: [group][layer][...].
    """

    groups: tuple[Policy, ...]
    heads: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"by_head({', '.join(policy.name for policy in self.groups)})"

    @property
    def positions(self) -> Literal["original", "cache"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _positions(self.groups)

    @property
    def grows(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(policy.grows for policy in self.groups)

    def bind(self, config: ModelConfig) -> "ByHead":
        every = list(range(config.num_kv_heads))
        for layers in zip(*self.heads, strict=False):
            if sorted(head for heads in layers for head in heads) != every:
                raise PolicyError(
                    f"by_head: the heads given do not divide this model's {len(every)} KV heads among the groups, each head "
                    "to exactly one; was the profile made for another model?"
                )
        if any(len(layers) != config.num_layers for layers in self.heads):
            raise PolicyError(
                f"by_head was given heads of {len(self.heads[0])} layers, but the model has {config.num_layers}"
            )
        return ByHead(tuple(policy.bind(config) for policy in self.groups), self.heads)

    def check(self, tokens: int) -> None:
        for policy in self.groups:
            policy.check(tokens)

    def each(self, wrap: Callable[[Policy], Policy]) -> "ByHead":
        return ByHead(tuple(policy.each(wrap) for policy in self.groups), self.heads)

    def layer_bytes_read(self, spec: LayerSpec) -> int:
        return sum(policy.layer_bytes_read(sub) for policy, sub, _ in self._parts(spec))

    def init(self, spec: LayerSpec) -> tuple[State, ...]:
        return tuple(policy.init(sub) for policy, sub, _ in self._parts(spec))

    def prefill(
        self,
        spec: LayerSpec,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Int[Array, " B"],
        carry: Carry,
    ) -> tuple[tuple[State, ...], Carry]:
        states = []
        for policy, sub, heads in self._parts(spec):
            queries, own = q[:, :, _queries(spec, heads)], _own(carry, policy)
            state, own = policy.prefill(sub, queries, k[:, :, heads], v[:, :, heads], lengths, own)
            states.append(state)
            carry = _with(carry, policy, own)
        return tuple(states), carry

    def append(
        self,
        spec: LayerSpec,
        state: tuple[State, ...],
        k: Float[Array, "B K H"],
        v: Float[Array, "B K H"],
        pos: Int[Array, " B"],
    ) -> tuple[State, ...]:
        parts = self._parts(spec)
        if _plain(parts, state):
            return tuple(cache.insert_divided(state, _kv_heads(parts), k, v, pos, rope=spec.rope))
        return tuple(
            policy.append(sub, part, k[:, heads], v[:, heads], pos)
            for (policy, sub, heads), part in zip(parts, state, strict=True)
        )

    def attend(
        self, spec: LayerSpec, state: tuple[State, ...], q: Float[Array, "B N H"], pos: Int[Array, " B"], carry: Carry
    ) -> tuple[Float[Array, "B N H"], tuple[State, ...], Carry]:
        parts = self._parts(spec)
        if _plain(parts, state):
            return (
                cache.attend_divided(spec, state, _kv_heads(parts), cache.turned(spec.rope, q, pos), pos),
                state,
                carry,
            )
        outs, states, order = [], [], []
        for (policy, sub, heads), part in zip(parts, state, strict=True):
            queries = _queries(spec, heads)
            out, part, own = policy.attend(sub, part, q[:, queries], pos, _own(carry, policy))
            outs.append(out)
            states.append(part)
            order.append(queries)
            carry = _with(carry, policy, own)
        back = np.argsort(np.concatenate(order))
        return jnp.concatenate(outs, axis=1)[:, back], tuple(states), carry

    def foresee(
        self, spec: LayerSpec, queries: Callable[[], Float[Array, "B N H"]], pos: Int[Array, " B"], carry: Carry
    ) -> Carry:
        for policy, sub, heads in self._parts(spec):
            at = _queries(spec, heads)
            own = policy.foresee(sub, lambda at=at: queries()[:, at], pos, _own(carry, policy))
            carry = _with(carry, policy, own)
        return carry

    def compress(self, spec: LayerSpec, state: tuple[State, ...]) -> tuple[State, ...]:
        return tuple(
            policy.compress(sub, part) for (policy, sub, _), part in zip(self._parts(spec), state, strict=True)
        )

    def due(self, spec: LayerSpec, state: tuple[State, ...]) -> Due:
        return any_due(policy.due(sub, part) for (policy, sub, _), part in zip(self._parts(spec), state, strict=True))

    def slots(self, spec: LayerSpec, state: tuple[State, ...]) -> Slots:
        parts = [p.slots(sub, part) for (p, sub, _), part in zip(self._parts(spec), state, strict=True)]
        size = max(part.pos.shape[-1] for part in parts)
        back = np.argsort(np.concatenate([heads for _, _, heads in self._parts(spec)]))

        def join(name: str, fill: Any) -> Array:
            arrays = [getattr(part, name) for part in parts]
            widths = [[(0, 0), (0, 0), (0, size - a.shape[2])] + [(0, 0)] * (a.ndim - 3) for a in arrays]
            padded = [jnp.pad(a, width, constant_values=fill) for a, width in zip(arrays, widths, strict=True)]
            return jnp.concatenate(padded, axis=1)[:, back]

        following = jnp.concatenate([part.next for part in parts], axis=1)[:, back]
        return Slots(join("k", 0), join("v", 0), join("pos", -1), join("weight", 0), following, parts[0].seen)

    def _parts(self, spec: LayerSpec) -> list[Part]:
        """Policy, layer as it sees it, and its places among the KV heads there are, of each group that has some in this layer."""
        group = spec.num_heads // spec.num_kv_heads
        there = tuple(range(spec.num_kv_heads)) if spec.kv_heads is None else spec.kv_heads
        return [
            (
                policy,
                dataclasses.replace(spec, num_heads=len(heads) * group, num_kv_heads=len(heads), kv_heads=heads),
                np.asarray([there.index(head) for head in heads]),
            )
            for policy, layers in zip(self.groups, self.heads, strict=True)
            if (heads := tuple(head for head in layers[spec.layer] if head in there))
        ]


def by_head(policies: Mapping[str, Policy], profile: Sequence[Sequence[str]]) -> ByHead:
    """Give KV heads policies of their own.

    Args:
        policies: a policy for each label.
        profile: the label of every KV head: [layer][head].

    Raises:
        PolicyError: the profile has a label without a policy.
    """
    unknown = {label for layer in profile for label in layer} - set(policies)
    if unknown:
        raise PolicyError(
            f"by_head: the profile labels heads {sorted(unknown)}, but policies are given for {sorted(policies)}"
        )
    heads = tuple(
        tuple(tuple(i for i, other in enumerate(layer) if other == label) for layer in profile) for label in policies
    )
    return ByHead(tuple(policies.values()), heads)


def overlaid(base: Policy, policy: Policy, heads: Sequence[Sequence[int]], num_kv_heads: int) -> ByHead:
    """A policy, with another one in some heads. If it has groups of heads itself, those heads are taken out of them.

    Args:
        heads: KV heads that get `policy`, in each layer.
        num_kv_heads: of the model.
    """
    every = tuple(tuple(range(num_kv_heads)) for _ in heads)
    groups, held = (base.groups, base.heads) if isinstance(base, ByHead) else ((base,), (every,))
    rest = tuple(
        tuple(tuple(head for head in layer if head not in taken) for layer, taken in zip(layers, heads, strict=True))
        for layers in held
    )
    return ByHead((*groups, policy), (*rest, tuple(map(tuple, heads))))


def _queries(spec: LayerSpec, heads: np.ndarray) -> np.ndarray:
    """Query heads that read these KV heads, in their order."""
    return query_heads(heads, spec.num_heads // spec.num_kv_heads)


def _kv_heads(parts: Sequence[Part]) -> list[tuple[int, ...]]:
    return [tuple(heads.tolist()) for _, _, heads in parts]


def _plain(parts: Sequence[Part], states: Sequence[State]) -> bool:
    """Whether all groups take and read a new token as `Policy` does, from device memory: then they can do so at once."""
    return all(
        type(policy).append is Policy.append
        and type(policy).attend is Policy.attend
        and not host_memory.on_host(state.k)
        for (policy, _, _), state in zip(parts, states, strict=True)
    )


def _positions(policies: Sequence[Policy]) -> Literal["original", "cache"]:
    """Positions stay within the cache only if they do so in every part."""
    return "cache" if all(policy.positions == "cache" for policy in policies) else "original"


def _own(carry: Carry, policy: Policy) -> Carry:
    """What this policy has told itself from layer to layer: carries of composed policies travel side by side."""
    return None if carry is None else carry.get(policy)


def _with(carry: Carry, policy: Policy, own: Carry) -> Carry:
    return carry if own is None else {**(carry or {}), policy: own}
