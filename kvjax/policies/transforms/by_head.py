"""`by_head`: a different policy for each group of KV heads. The combination is a policy itself, so it nests."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, PromptKV, Token, TokenBlock
from kvjax.config import ModelConfig
from kvjax.pallas_kernels.head_shards import query_heads

from ..base import Policy
from ..info import PolicyError, PolicyInfo, combined
from ..layer import CacheLayer, Carry, Queries, Reads, State, When
from ..replay import Replay


@dataclasses.dataclass(frozen=True)
class ByHead(Policy):
    """A different policy for each group of KV heads, made by `by_head`.

    Each group has a cache of its own shape, so a group that keeps less occupies less memory.

    Attributes:
        groups: policies.
        heads: KV heads of each group in each layer: [group][layer][...].

    Example:
        >>> policies = {"all": kvjax.Full(), "few": kvjax.StreamingLLM(budget=64)}
        >>> policy = kvjax.by_head(policies, [["all", "few"], ["few", "few"]])  # two layers with two heads
        >>> isinstance(policy, kvjax.policies.ByHead), policy.heads  # of each group in each layer
        (True, (((0,), ()), ((1,), (0, 1))))
    """

    groups: tuple[Policy, ...]
    heads: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def info(self) -> PolicyInfo:
        return dataclasses.replace(combined("by_head", (policy.info for policy in self.groups)), heads_coupled=True)

    def __str__(self) -> str:
        names = [chr(ord("a") + i) for i in range(len(self.groups))]
        profile = []
        for layers in zip(*self.heads, strict=True):
            label = {head: name for name, heads in zip(names, layers, strict=True) for head in heads}
            profile.append(tuple(label[head] for head in sorted(label)))
        parts = [f"{name}={group}" for name, group in zip(names, self.groups, strict=True)]
        return f"by_head({'; '.join([*parts, f'profile={tuple(profile)}'])})"

    def bind(self, config: ModelConfig) -> "ByHead":
        every = list(range(config.num_kv_heads))
        for layers in zip(*self.heads, strict=False):
            if sorted(head for heads in layers for head in heads) != every:
                raise PolicyError(
                    f"by_head: the profile does not assign each of this model's {len(every)} KV heads to exactly one group. "
                    "Use a profile that was made for this model."
                )
        if any(len(layers) != config.num_layers for layers in self.heads):
            raise PolicyError(
                f"by_head: the profile has {len(self.heads[0])} layers, but the model has {config.num_layers}"
            )
        return ByHead(tuple(policy.bind(config) for policy in self.groups), self.heads)

    def with_budget(self, budget: Any) -> "ByHead":
        return ByHead(tuple(policy.with_budget(budget) for policy in self.groups), self.heads)

    def validate(self, tokens: int) -> None:
        for policy in self.groups:
            policy.validate(tokens)

    def layer(self, spec: LayerSpec) -> "ByHeadLayer":
        group = spec.num_heads // spec.num_kv_heads
        present = tuple(range(spec.num_kv_heads)) if spec.kv_heads is None else spec.kv_heads
        parts = []
        for policy, layers in zip(self.groups, self.heads, strict=True):
            heads = tuple(head for head in layers[spec.layer] if head in present)
            if heads:
                sub = dataclasses.replace(spec, num_heads=len(heads) * group, num_kv_heads=len(heads), kv_heads=heads)
                parts.append(Part(policy.layer(sub), tuple(present.index(head) for head in heads)))
        again = [part.layer for part in parts if part.layer.replays]
        once = [part.layer for part in parts if not part.layer.replays and part.layer.attention != "dense"]
        if again and once:
            raise PolicyError(
                f"by_head: {again[0].policy.info.name!r} reads a prompt again, after which {once[0].policy.info.name!r} cannot choose from it. "
                "Give all groups such a policy or full, or use by_layer."
            )
        return ByHeadLayer(self, spec, tuple(parts))

    def map(self, wrap: Callable[[Policy], Policy]) -> "ByHead":
        return ByHead(tuple(policy.map(wrap) for policy in self.groups), self.heads)


@dataclasses.dataclass(frozen=True)
class Part:
    """A group of KV heads in one layer.

    Attributes:
        layer: their functions.
        heads: their indices among the layer's KV heads.
    """

    layer: CacheLayer[Any]
    heads: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ByHeadLayer(CacheLayer[ByHead]):
    """A layer whose groups of heads have separate states, see `ByHead`."""

    parts: tuple[Part, ...]

    @property
    def when(self) -> When:
        """As often as the part that compresses most often."""
        when = {layer.when for layer in self._layers}
        return "every_step" if "every_step" in when else "when_full" if "when_full" in when else "never"

    @property
    def reads(self) -> Reads:
        return "whole" if any(layer.reads == "whole" for layer in self._layers) else "blocks"

    @property
    def compress_reads_kv(self) -> bool:
        return any(layer.compress_reads_kv for layer in self._layers)

    @property
    def replays(self) -> tuple[Replay, ...]:
        return tuple(dict.fromkeys(replay for layer in self._layers for replay in layer.replays))

    @property
    def needs_context(self) -> bool:
        return any(layer.needs_context for layer in self._layers)

    @property
    def needs_token_inputs(self) -> bool:
        return any(layer.needs_token_inputs for layer in self._layers)

    @property
    def reduces_heads(self) -> bool:
        return any(layer.reduces_heads for layer in self._layers)

    def map_parts(self, change: Callable[[CacheLayer[Any]], CacheLayer[Any]]) -> "ByHeadLayer":
        parts = tuple(dataclasses.replace(part, layer=part.layer.map_parts(change)) for part in self.parts)
        return dataclasses.replace(self, parts=parts)

    @property
    def bytes_read(self) -> int:
        return sum(part.layer.bytes_read for part in self.parts)

    def init(self, total: Int[Array, " B"] | None = None) -> tuple[State, ...]:
        return tuple(part.layer.init(total) for part in self.parts)

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[tuple[State, ...], Carry]:
        states = []
        for part in self.parts:
            state, carry = part.layer.prefill(prompt.heads(np.asarray(part.heads)), carry)
            states.append(state)
        return tuple(states), carry

    def append(self, state: tuple[State, ...], token: Token) -> tuple[State, ...]:
        if self._plain:
            return tuple(cache.insert_split(state, [part.heads for part in self.parts], token))
        return tuple(
            part.layer.append(own, token.heads(np.asarray(part.heads)))
            for part, own in zip(self.parts, state, strict=True)
        )

    def attend(
        self, state: tuple[State, ...], token: Token, carry: Carry
    ) -> tuple[Float[Array, "B N H"], tuple[State, ...], Carry]:
        if self._plain:
            heads = [part.heads for part in self.parts]
            return cache.attend_split(self.spec, state, heads, token), state, carry
        outs, states = [], []
        for part, own in zip(self.parts, state, strict=True):
            out, own, carry = part.layer.attend(own, token.heads(np.asarray(part.heads)), carry)
            outs.append(out)
            states.append(own)
        return jnp.concatenate(outs, axis=1)[:, self._in_order], tuple(states), carry

    def read_block(
        self, state: tuple[State, ...], block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], tuple[State, ...], Carry]:
        outs, states = [], []
        for part, own in zip(self.parts, state, strict=True):
            out, own, carry = part.layer.read_block(own, block.heads(np.asarray(part.heads)), carry)
            outs.append(out)
            states.append(own)
        return jnp.concatenate(outs, axis=2)[:, :, self._in_order], tuple(states), carry

    def compress(self, state: tuple[State, ...]) -> tuple[State, ...]:
        return tuple(part.layer.compress(own) for part, own in zip(self.parts, state, strict=True))

    def is_due(self, state: tuple[State, ...]) -> Bool[Array, " B"]:
        rows = [
            part.layer.is_due(own)
            for part, own in zip(self.parts, state, strict=True)
            if part.layer.when == "when_full"
        ]
        return reduce(jnp.logical_or, rows)

    def look_ahead(self, queries: Queries, position: Int[Array, " B"], carry: Carry) -> Carry:
        for part in self.parts:
            own = self._queries(part)
            carry = part.layer.look_ahead(lambda own=own: queries()[:, own], position, carry)
        return carry

    def view(self, state: tuple[State, ...]) -> LayerCache:
        caches = [part.layer.view(own) for part, own in zip(self.parts, state, strict=True)]

        def join(name: str, fill: Any) -> Array:
            return self._joined([getattr(each, name) for each in caches], fill)

        following = jnp.concatenate([each.next for each in caches], axis=1)[:, self._back]
        return LayerCache(join("k", 0), join("v", 0), join("pos", -1), join("weight", 0), following, caches[0].seen)

    def slot_scores(self, state: tuple[State, ...]) -> Float[Array, "B K C"] | None:
        """Scores of all groups. They are NaN for the heads of a group without scores."""
        parts = list(zip(self.parts, state, strict=True))
        found = [part.layer.slot_scores(own) for part, own in parts]
        if all(score is None for score in found):
            return None
        shapes = [part.layer.view(own).pos.shape for part, own in parts]
        arrays = [
            jnp.full(shape, jnp.nan) if score is None else score for score, shape in zip(found, shapes, strict=True)
        ]
        return self._joined(arrays, jnp.nan)

    def _joined(self, arrays: Sequence[Array], fill: Any) -> Array:
        """Arrays of the groups as one array of all KV heads, in the layer's order, padded to the same number of slots."""
        size = max(a.shape[2] for a in arrays)
        widths = [[(0, 0), (0, 0), (0, size - a.shape[2])] + [(0, 0)] * (a.ndim - 3) for a in arrays]
        padded = [jnp.pad(a, width, constant_values=fill) for a, width in zip(arrays, widths, strict=True)]
        return jnp.concatenate(padded, axis=1)[:, self._back]

    @property
    def _back(self) -> Any:
        """Index of each KV head of the layer among the heads of all groups."""
        return np.argsort(np.concatenate([part.heads for part in self.parts]))

    @property
    def _layers(self) -> list[CacheLayer[Any]]:
        return [part.layer for part in self.parts]

    @property
    def _plain(self) -> bool:
        """Whether all groups append and attend as `CacheLayer` does, and can therefore do so together."""
        return all(part.layer.is_plain for part in self.parts)

    @property
    def _in_order(self) -> np.ndarray:
        """Indices that put the concatenated query heads of the parts into the layer's order."""
        return np.argsort(np.concatenate([self._queries(part) for part in self.parts]))

    def _queries(self, part: Part) -> np.ndarray:
        """Query heads of a group among the layer's."""
        return query_heads(part.heads, self.spec.num_heads // self.spec.num_kv_heads)


def by_head(policies: Mapping[str, Policy], profile: Sequence[Sequence[str]]) -> ByHead:
    """Give groups of KV heads different policies.

    Args:
        policies: a policy for each label.
        profile: the label of every KV head: [layer][head].

    Raises:
        PolicyError: the profile has a label without a policy.

    Example:
        >>> policies = {"all": kvjax.Full(), "few": kvjax.StreamingLLM(budget=64)}
        >>> str(kvjax.by_head(policies, [["all", "few"], ["few", "few"]]))  # two layers with two heads
        "by_head(a=full; b=streaming_llm:budget=64; profile=(('a', 'b'), ('b', 'b')))"
    """
    unknown = {label for layer in profile for label in layer} - set(policies)
    if unknown:
        raise PolicyError(
            f"by_head: the profile labels heads {sorted(unknown)}, but policies are given for {sorted(policies)} only"
        )
    heads = tuple(
        tuple(tuple(i for i, other in enumerate(layer) if other == label) for layer in profile) for label in policies
    )
    return ByHead(tuple(policies.values()), heads)
