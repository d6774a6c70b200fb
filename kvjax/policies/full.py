"""The full cache: every token, as a plain transformer keeps it. The yardstick of all others."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float, Int

from kvjax import cache
from kvjax.cache import LayerSpec, Slots

from .base import Carry, Policy
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class Full(Policy):
    """Keep everything."""

    name: ClassVar[str] = "full"
    paper: ClassVar[str] = "Vaswani et al. 2017, Attention Is All You Need"
    keeps: ClassVar[str] = "every token"

    def extend(
        self,
        spec: LayerSpec,
        state: Slots,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        pos: Int[Array, " B"],
        carry: Carry,
    ) -> tuple[Float[Array, "B S N H"], Slots, Carry]:
        places = cache.places(pos, q.shape[1])
        state = cache.insert_many(state, spec.rope.rotate(k, places[..., None]), v, places)
        return cache.attend_many(spec, state, spec.rope.rotate(q, places[..., None]), places), state, carry
