"""`by_layer`: a different policy in each layer. The combination is a policy itself, so it nests."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvjax.cache import LayerSpec
from kvjax.config import ModelConfig

from ..base import Policy, Windowed
from ..info import PolicyError, PolicyInfo, combined
from ..layer import CacheLayer


@dataclasses.dataclass(frozen=True)
class ByLayer(Policy):
    """A different policy in each layer, made by `by_layer`.

    Attributes:
        layers: one policy per layer.

    Example:
        >>> policy = kvjax.policies.ByLayer((kvjax.Full(), kvjax.SnapKV(budget=64)))
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('by_layer(full; snapkv:budget=64)', 0.71)
    """

    layers: tuple[Policy, ...]

    @property
    def info(self) -> PolicyInfo:
        return combined("by_layer", (policy.info for policy in self.layers))

    def __str__(self) -> str:
        return f"by_layer({'; '.join(map(str, self.layers))})"

    def bind(self, config: ModelConfig) -> "ByLayer":
        if config.num_layers != len(self.layers):
            raise PolicyError(
                f"by_layer: {len(self.layers)} layers are given, but the model has {config.num_layers}. Give one policy per layer."
            )
        return ByLayer(tuple(policy.bind(config) for policy in self.layers))

    def for_model(self, config: ModelConfig) -> Policy:
        """One policy per cached layer, or one per layer that is compressed (`ModelConfig.cached` and `compressed`)."""
        if len(self.layers) == len(config.cached) and any(window is not None for window in config.windows):
            return Windowed.of(self, config, config.cached)
        return super().for_model(config)

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
    """Give layers different policies.

    Args:
        policies: one policy per layer, or a mapping from layer to policy.
        default: policy of the layers that a mapping leaves out.
        num_layers: number of layers, for a mapping.

    Raises:
        PolicyError: a mapping comes without `default` or `num_layers`, or has a layer that does not exist.

    Example:
        >>> policy = kvjax.by_layer({0: kvjax.Full()}, default=kvjax.SnapKV(budget=512), num_layers=4)
        >>> [str(layer) for layer in policy.layers]
        ['full', 'snapkv:budget=512', 'snapkv:budget=512', 'snapkv:budget=512']
    """
    if isinstance(policies, Mapping):
        if default is None or num_layers is None:
            raise PolicyError("by_layer: a mapping of layers needs a default policy and num_layers. Give both.")
        unknown = [layer for layer in policies if not 0 <= layer < num_layers]
        if unknown:
            raise PolicyError(f"by_layer: there is no layer {unknown[0]}. Give 0 to less than {num_layers}.")
        policies = [policies.get(layer, default) for layer in range(num_layers)]
    return ByLayer(tuple(policies))
