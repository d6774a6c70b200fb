"""`then`: a policy that evicts from a prompt, followed by one whose queries read a selection of what is left."""

import dataclasses
from typing import Any, cast

import jax.numpy as jnp

from kvjax.cache import LayerSpec, layer_specs
from kvjax.config import ModelConfig

from ..base import Policy
from ..families.scoring import PromptScorerLayer
from ..families.sparse import SparseLayer
from ..families.staged import StagedLayer, second_spec
from ..info import PolicyError, PolicyInfo, combined
from ..layer import CacheLayer


@dataclasses.dataclass(frozen=True)
class Then(Policy):
    """An evicting policy and then a selecting one, made by `then`.

    Attributes:
        first: evicts tokens of the prompt.
        second: selects what a query reads of the tokens that are left.

    Example:
        >>> policy = kvjax.policies.Then(kvjax.SnapKV(budget=128), kvjax.Quest(budget=32, dense_layers=0))
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.bytes_read(*sizes) / kvjax.Full().bytes_read(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes that a step reads
        ('then(snapkv:budget=128; quest:budget=32,dense_layers=0)', 0.29)
    """

    first: Policy
    second: Policy

    @property
    def budget(self) -> int | float | None:
        """The budget of the first policy, which is what is kept of the prompt. None if it has none."""
        return getattr(self.first, "budget", None)

    @property
    def info(self) -> PolicyInfo:
        return combined("then", (self.first.info, self.second.info))

    def __str__(self) -> str:
        return f"then({self.first}; {self.second})"

    def bind(self, config: ModelConfig) -> "Then":
        bound = Then(self.first.bind(config), self.second.bind(config))
        for spec in layer_specs(config, 1, 64, 64, jnp.float32):
            bound.layer(spec)  # raises if the policies do not go together
        return bound

    def with_budget(self, budget: Any) -> "Then":
        return dataclasses.replace(self, first=self.first.with_budget(budget))

    def validate(self, tokens: int) -> None:
        self.first.validate(tokens)
        self.second.validate(tokens)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        first = self.first.layer(spec)
        if not first.chooses_evenly:
            raise PolicyError(
                f"{self.info.name}: {first.policy.info.name!r} does not keep the same number of a prompt's tokens in each head. Begin with "
                "a policy that does, such as snapkv, pyramidkv or expected_attention."
            )
        if spec.window is not None:
            raise PolicyError(f"{self.info.name}: layers with a sliding window are not supported. Use {self.first}.")
        scored = cast(PromptScorerLayer[Any], first)
        second = self.second.layer(second_spec(scored))
        if second.attention == "dense":
            return first
        if not second.selects_slots:
            raise PolicyError(
                f"{self.info.name}: {second.policy.info.name!r} does not select from a cache of rotated keys. End with quest."
            )
        return StagedLayer(self, spec, first=scored, second=cast(SparseLayer[Any], second))


def then(first: Policy, second: Policy) -> Then:
    """Evict from the prompt, and let queries read a selection of the rest: `then(SnapKV(budget=0.25), Quest(budget=256))`.

    Eviction saves memory, and selection saves bandwidth. (`RocketKV` is such a pair with its own second stage.) The
    first policy chooses from the prompt. The second one forms pages of the tokens that are left, in order, and of new
    ones, separately in each head. In layers where the second policy reads everything, the first works alone.

    A budget given beside the combination is the first policy's. A fraction as the second's budget is of the tokens that
    are left, and of new ones. Prompts are prefilled whole.

    Args:
        first: keeps each head's highest scores of a prompt: snapkv, pyramidkv, expected_attention, compactor, or your own.
        second: quest, or your own policy of a `SparseLayer` that selects by rotated keys.

    Raises:
        PolicyError: (once a model is known) the policies do not go together, or a layer has a sliding window.

    Example:
        >>> str(kvjax.then(kvjax.SnapKV(budget=0.25), kvjax.Quest(budget=256)))
        'then(snapkv:budget=0.25; quest:budget=256)'
    """
    return Then(first, second)
