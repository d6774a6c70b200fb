"""PyramidKV's budgets by layer, for any policy that has a budget."""

import dataclasses
from fractions import Fraction
from typing import Any, ClassVar

from kvjax.cache import LayerSpec
from kvjax.config import ModelConfig

from ..base import CacheLayer, Policy
from ..fields import check_fields
from ..info import PolicyError
from .by_layer import by_layer
from .wrapper import Wrapper


@dataclasses.dataclass(frozen=True)
class Pyramid(Wrapper):
    """Another policy with PyramidKV's budgets; made by `pyramid`.

    Attributes:
        policy: what each layer does with its budget.
        beta: see `PyramidKV`.
    """

    transform: ClassVar[str] = "pyramid"

    beta: int = 20

    def __post_init__(self) -> None:
        check_fields(self, beta=1)
        if getattr(self.policy, "budget", None) is None:
            raise PolicyError(
                f"pyramid: policy {self.policy.info.name!r} has no budget to divide among layers; give one that has"
            )

    def bind(self, config: ModelConfig) -> Policy:
        policy: Any = self.policy
        budgets = layer_budgets(policy.budget, config.num_layers, self.beta, getattr(policy, "window", 0))
        return by_layer([policy.with_budget(budget) for budget in budgets]).bind(config)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        raise PolicyError(
            f"{self.info.name}: layers differ by the model's number of them; bind(config) gives a model's policy"
        )


def pyramid(policy: Policy, beta: int = 20) -> Pyramid:
    """Any policy with a budget, with PyramidKV's budgets by layer: `pyramid(ChunkKV(budget=512))`.

    They depend on the layer alone: a prompt is kept whole in the layers whose budget it does not exceed, and no layer has more
    slots than that, in batches, too.

    Raises:
        PolicyError: the policy has no budget.
    """
    return Pyramid(policy, beta)


def layer_budgets(budget: int | float, num_layers: int, beta: int = 20, window: int = 0) -> list[Any]:
    """PyramidKV's budgets from the first layer to the last: numbers of tokens for one of tokens, else fractions.

    Args:
        budget: of the average layer.
        window: tokens of a budget that every layer has besides; of fractions, where it is not known how many these are, none.
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
