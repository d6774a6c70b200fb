"""The full cache: every token, as in a plain transformer. The baseline of all other policies."""

import dataclasses
from typing import ClassVar

from kvjax.cache import LayerSpec

from .base import Policy
from .families.dense import DenseLayer
from .info import PolicyInfo
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class Full(Policy):
    """Keep every token.

    Example:
        >>> policy = kvjax.Full()
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('full', 1.0)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="full",
        paper="Vaswani et al. 2017, Attention Is All You Need",
        summary="every token",
        takes_budget=False,
    )

    def layer(self, spec: LayerSpec) -> DenseLayer["Full"]:
        return DenseLayer(self, spec)
