"""FP8: every token in 8-bit floats."""

import dataclasses
from typing import ClassVar

from .info import PolicyInfo
from .registry import register
from .transforms.quantize import Scheme
from .transforms.quantized_full import QuantizedFull


@register
@dataclasses.dataclass(frozen=True)
class FP8(QuantizedFull):
    """Keep everything in 8-bit floats (Micikevicius et al. 2022), with one factor per token and KV head.

    Keys and values are divided by a factor, so that the largest number of each vector is 448, and rounded to e4m3. Each
    token is coded when it comes, and only its own step reads it exactly. Prefill is exact.

    To quantise another policy's cache, see `quantized(policy, scheme="fp8")`.

    Attributes:
        exact_layers: number of first layers, and of last layers, that are not quantised.

    Example:
        >>> policy = kvjax.FP8()
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('fp8', 0.61)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="fp8",
        paper="Micikevicius et al. 2022, FP8 Formats for Deep Learning",
        summary="every token, in 8-bit floats",
        memory="quantized",
        stage="both",
        takes_budget=False,
    )

    scheme: ClassVar[Scheme] = "fp8"

    exact_layers: int = 0
