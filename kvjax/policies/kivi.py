"""KIVI: everything in a few bits, keys quantised by the channel and values by the token."""

import dataclasses
from typing import Any, ClassVar

from kvjax.cache import LayerSpec
from kvjax.cache.packing import Bits
from kvjax.config import ModelConfig

from .base import CacheLayer, Policy
from .full import Full
from .info import PolicyInfo
from .registry import register
from .transforms.quantize import Quantized, check_packing


@register
@dataclasses.dataclass(frozen=True)
class KIVI(Policy):
    """Keep everything, in a few bits (Liu et al. 2024, KIVI, section 3).

    Keys, some of whose channels are far larger than others, are quantised by the channel: `group` neighbouring tokens of one
    channel share a scale and a zero. Values are quantised by the token: `group` channels share them. The latest tokens stay
    exact: of values the last `residual`; of keys those since the last multiple of it, where so many are packed together. As in the
    published code, a query attends before its step packs: to its own token, and to what it pushes out of the residual, exactly. The
    prompt is read exactly. Attention reads the bits where they lie, by a kernel on GPUs; XLA unpacks them block by block.

    For another policy's cache in few bits see `quantized`.

    Attributes:
        bits: of a number, besides its share of scale and zero: 2, 4 or 8.
        group: G, numbers that share a scale and a zero; of values, whose group is no longer than a head, the largest divisor of
            both this and the head dim.
        residual: R, latest tokens that stay exact; a multiple of `group`, and of the 8 / bits tokens whose numbers share a byte.
            (The paper uses 32 and 128 for both.)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="kivi",
        paper="Liu et al. 2024, KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache",
        summary="every token, all but the latest in a few bits a number",
        memory="quantized",
        stage="both",
        takes_budget=False,
    )

    bits: Bits = 2
    group: int = 32
    residual: int = 32

    def __post_init__(self) -> None:
        check_packing(self, self.bits, self.group, self.residual)

    def bind(self, config: ModelConfig) -> Policy:
        return self._quantized.bind(config)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return self._quantized.layer(spec)

    @property
    def _quantized(self) -> Quantized:
        return Quantized(Full(), self.bits, self.group, self.residual)
