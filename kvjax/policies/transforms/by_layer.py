"""Another policy in each layer. The combination is a policy itself, so it nests."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvjax.cache import LayerSpec
from kvjax.config import ModelConfig

from ..base import CacheLayer, Policy
from ..info import PolicyError, PolicyInfo, combined


@dataclasses.dataclass(frozen=True)
class ByLayer(Policy):
    """Another policy in each layer; made by `by_layer`.

    Attributes:
        layers: one policy per layer.
    """

    layers: tuple[Policy, ...]

    @property
    def info(self) -> PolicyInfo:
        return combined("by_layer", (policy.info for policy in self.layers))

    def __str__(self) -> str:
        return f"by_layer({'; '.join(map(str, self.layers))})"

    def bind(self, config: ModelConfig) -> "ByLayer":
        if config.num_layers != len(self.layers):
            raise PolicyError(f"by_layer was given {len(self.layers)} layers, but the model has {config.num_layers}")
        return ByLayer(tuple(policy.bind(config) for policy in self.layers))

    def with_budget(self, budget: Any) -> "ByLayer":
        return ByLayer(tuple(policy.with_budget(budget) for policy in self.layers))

    def validate(self, tokens: int) -> None:
        for policy in dict.fromkeys(self.layers):
            policy.validate(tokens)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return self.layers[spec.layer].layer(spec)

    def map(self, wrap: Callable[[Policy], Policy]) -> "ByLayer":
        return ByLayer(tuple(policy.map(wrap) for policy in self.layers))


def by_layer(
    policies: Sequence[Policy] | Mapping[int, Policy], default: Policy | None = None, num_layers: int | None = None
) -> ByLayer:
    """Give layers policies of their own.

    Args:
        policies: one per layer; or a mapping from layer to policy, with `default` for the layers it leaves out of `num_layers`.

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
