"""KIVI: every token in low-bit codes, with keys quantised per channel and values per token."""

import dataclasses
from typing import Any, ClassVar

from kvjax.cache import LayerSpec
from kvjax.cache.packing import Bits
from kvjax.config import ModelConfig

from .base import Policy
from .full import Full
from .info import PolicyInfo
from .layer import CacheLayer
from .registry import register
from .transforms.quantize import Quantized, check_packing


@register
@dataclasses.dataclass(frozen=True)
class KIVI(Policy):
    """Keep everything in low-bit codes (Liu et al. 2024, KIVI, section 3).

    Some channels of keys are much larger than others, so keys are quantised per channel: `group` neighbouring tokens of
    one channel share a scale and a zero. Values are quantised per token: `group` channels share them. The latest tokens
    stay exact: the last `residual` values, and the keys since the last multiple of `residual`, which are packed
    together. As in the published code, a query attends before its step packs. It reads its own token, and the tokens
    that this step packs, exactly. Prefill is exact. On GPUs, a kernel reads the packed codes directly. XLA unpacks them
    block by block.

    To quantise another policy's cache, see `quantized`.

    Attributes:
        bits: bits per number, without its share of scale and zero: 2, 4 or 8.
        group: G, numbers that share a scale and a zero. A value's group is the greatest common divisor of this and the
            head dim.
        residual: R, latest tokens that stay exact: a multiple of `group`, and of the 8 / bits tokens that share a byte.
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
