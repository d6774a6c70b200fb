"""`pyramid`: PyramidKV's budgets by layer, for any policy with a budget."""

import dataclasses
from fractions import Fraction
from typing import Any, ClassVar

from kvjax.cache import LayerSpec
from kvjax.config import ModelConfig

from ..base import Policy
from ..fields import check_fields
from ..info import PolicyError, not_bound
from ..layer import CacheLayer
from .by_layer import by_layer
from .wrapper import Wrapper


@dataclasses.dataclass(frozen=True)
class Pyramid(Wrapper):
    """Another policy with PyramidKV's budgets, made by `pyramid`.

    Attributes:
        policy: policy of each layer.
        beta: see `PyramidKV`.
    """

    transform: ClassVar[str] = "pyramid"

    beta: int = 20

    def __post_init__(self) -> None:
        check_fields(self, beta=1)
        if getattr(self.policy, "budget", None) is None:
            raise PolicyError(
                f"pyramid: policy {self.policy.info.name!r} has no budget to divide among layers. Use a policy with a budget."
            )

    def bind(self, config: ModelConfig) -> Policy:
        policy: Any = self.policy
        budgets = layer_budgets(policy.budget, config.num_layers, self.beta, getattr(policy, "window", 0))
        return by_layer([policy.with_budget(budget) for budget in budgets]).bind(config)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        raise not_bound(self.info)


def pyramid(policy: Policy, beta: int = 20) -> Pyramid:
    """Give any policy PyramidKV's budgets by layer: `pyramid(ChunkKV(budget=512))`.

    Budgets depend on the layer only. A layer keeps a prompt within its budget whole, and never allocates more slots
    than its budget, in batches as well.

    Args:
        policy: policy with a budget.
        beta: see `PyramidKV`.

    Raises:
        PolicyError: the policy has no budget.

    Example:
        >>> str(kvjax.pyramid(kvjax.SnapKV(budget=512)))
        'pyramid(snapkv:budget=512)'
    """
    return Pyramid(policy, beta)


def layer_budgets(budget: int | float, num_layers: int, beta: int = 20, window: int = 0) -> list[Any]:
    """PyramidKV's budgets from the first to the last layer, in tokens for a budget in tokens, otherwise fractions.

    Args:
        budget: budget of the average layer.
        num_layers: number of layers.
        beta: see `PyramidKV`.
        window: tokens that every layer has in addition. Not used for fractions, where their share is unknown.
    """
    steps = max(num_layers - 1, 1)
    if isinstance(budget, int):
        last = (budget - window) // beta
        step = (2 * (budget - window) - 2 * last) // steps
        return [2 * (budget - window) - last - layer * step + window for layer in range(num_layers)]
    average = Fraction(budget).limit_denominator(10_000)
    first = min(2 * average - average / beta, Fraction(1))
    step = (2 * first - 2 * average) / steps
    return [float(first - layer * step) for layer in range(num_layers)]
