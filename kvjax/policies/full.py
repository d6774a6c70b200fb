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
    """Keep every token."""

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="full",
        paper="Vaswani et al. 2017, Attention Is All You Need",
        summary="every token",
        takes_budget=False,
    )

    def layer(self, spec: LayerSpec) -> DenseLayer["Full"]:
        return DenseLayer(self, spec)
