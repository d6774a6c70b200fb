"""KIVI: every token in low-bit codes, with keys quantised per channel and values per token."""

import dataclasses
from typing import ClassVar

from kvjax.cache.packing import Bits

from .info import PolicyInfo
from .registry import register
from .transforms.quantize import Scheme
from .transforms.quantized_full import QuantizedFull


@register
@dataclasses.dataclass(frozen=True)
class KIVI(QuantizedFull):
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

    Example:
        >>> policy = kvjax.KIVI(bits=2)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('kivi', 0.38)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="kivi",
        paper="Liu et al. 2024, KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache",
        summary="every token, all but the latest in a few bits a number",
        memory="quantized",
        stage="both",
        takes_budget=False,
    )

    scheme: ClassVar[Scheme] = "kivi"

    bits: Bits = 2
    group: int = 32
    residual: int = 32
