"""PyramidKV: lower layers, whose attention is spread out, keep more of a prompt than upper ones."""

import bisect
import dataclasses
from fractions import Fraction
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.cache import LayerSpec, bucket
from kvjax.models.config import ModelConfig

from .base import Policy, PolicyError, budget_rows, check_fields
from .compose import by_layer
from .registry import register
from .snapkv import SnapKV


@register
@dataclasses.dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV with budgets that fall from layer to layer, the same in sum (Cai et al. 2024, section 4).

    Beside the window of w tokens, layers keep numbers of tokens in arithmetic progression, from twice the average down to
    1 / `beta` of it in the last layer. As in the published code, the prompt's length n bears on them: one within the budget b is
    kept whole, one below 2 (b - w) gets the same budget in all layers, and the first layer never keeps more than there is.

    A layer's slots are what its budget asks for, whatever length below its padded length a prompt has: rows of a batch may be
    short, and a short prompt needs up to b slots in every layer. For a batch of rows that are all long, and for budgets of
    this shape under other policies, see `pyramid`.

    Attributes:
        budget: slots for the prompt in the average layer, window included: tokens, or a fraction of prompt + new tokens.
        window, pool, kernel: see `SnapKV`.
        beta: how many times less than the average the last layer keeps beside the window.
    """

    name: ClassVar[str] = "pyramidkv"
    paper: ClassVar[str] = (
        "Cai et al. 2024, PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling"
    )
    keeps: ClassVar[str] = "as SnapKV, more in lower layers and less in upper ones"

    beta: int = 20

    def __post_init__(self) -> None:
        check_fields(self, beta=1)
        super().__post_init__()

    def rows(self, spec: LayerSpec, lengths: Int[Array, " B"]) -> Int[Array, " B"]:
        average = budget_rows(self.budget, lengths + spec.new_tokens)
        beside, before = average - self.window, lengths - self.window
        last = beside // self.beta
        first = 2 * beside - last
        first, last = jnp.where(first >= before, before, first), jnp.where(first >= before, 2 * beside - before, last)
        layer = first - spec.layer * ((first - last) // max(spec.num_layers - 1, 1)) + self.window
        return jnp.where((lengths <= average) | (lengths < 2 * beside), average, layer)

    def most(self, spec: LayerSpec) -> int:
        if spec.prompt_len == 0:
            return 0
        # A batch of one is padded to the next bucket; one of several may hold rows of any length.
        shortest = bisect.bisect_left(range(spec.prompt_len), spec.prompt_len, key=bucket) if spec.batch == 1 else 1
        with jax.ensure_compile_time_eval():
            lengths = jnp.arange(shortest, spec.prompt_len + 1, dtype=jnp.int32)
            return int(jnp.max(jnp.minimum(self.rows(spec, lengths), lengths)))


@dataclasses.dataclass(frozen=True)
class Pyramid(Policy):
    """Another policy with PyramidKV's budgets; made by `pyramid`.

    Attributes:
        policy: what each layer does with its budget.
        beta: see `PyramidKV`.
    """

    policy: Policy
    beta: int = 20

    def __post_init__(self) -> None:
        check_fields(self, beta=1)
        if not hasattr(self.policy, "budget"):
            raise PolicyError(
                f"pyramid: policy {self.policy.name!r} has no budget to divide among layers; give one that has"
            )

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"pyramid({self.policy.name})"

    def bind(self, config: ModelConfig) -> Policy:
        policy: Any = self.policy
        budgets = layer_budgets(policy.budget, config.num_layers, self.beta, getattr(policy, "window", 0))
        return by_layer([dataclasses.replace(policy, budget=budget) for budget in budgets]).bind(config)

    def capacity(self, spec: LayerSpec) -> int:
        raise PolicyError(
            f"{self.name}: layers differ by the model's number of them; bind(config) gives a model's policy"
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
