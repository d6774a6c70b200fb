"""The full cache: every token, as a plain transformer keeps it. The yardstick of all others."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float

from kvjax import cache
from kvjax.cache import LayerCache, LayerSpec, TokenBlock

from .base import Carry, Layer, Policy, Traits
from .info import PolicyInfo
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class Full(Policy):
    """Keep everything."""

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="full",
        paper="Vaswani et al. 2017, Attention Is All You Need",
        summary="every token",
        takes_budget=False,
    )

    def layer(self, spec: LayerSpec) -> Layer["Full"]:
        return FullLayer(self, spec)


@dataclasses.dataclass(frozen=True)
class FullLayer(Layer[Full]):
    """One layer, which reads several tokens at once."""

    traits: Traits = Traits(plain=True, reads_blocks=True)

    def read_block(
        self, state: LayerCache, block: TokenBlock, carry: Carry
    ) -> tuple[Float[Array, "B S N H"], LayerCache, Carry]:
        state = cache.insert_block(state, block)
        return cache.attend_block(self.spec, state, block), state, carry
