"""TurboQuant: every token in low-bit codes of rotated vectors, whose coordinates have similar magnitudes."""

import dataclasses
from typing import ClassVar

from kvjax.cache.packing import Bits

from .info import PolicyInfo
from .registry import register
from .transforms.quantize import Keys, Scheme, Values
from .transforms.quantized_full import QuantizedFull


@register
@dataclasses.dataclass(frozen=True)
class TurboQuant(QuantizedFull):
    """Keep everything, in codes of rotated vectors (Zandieh et al. 2025, as implemented in vLLM).

    A key is divided by its norm and rotated by a Hadamard matrix, after which its coordinates are nearly Gaussian. Each
    coordinate is rounded to the nearest of 2^bits codebook entries that are optimal for a Gaussian. A factor restores
    the norm. Keys are never rotated back: the query is rotated instead. Values are rounded to evenly spaced entries
    between the minimum and maximum of each token, as in vLLM, or coded as keys are. There is no calibration, and no
    group waits for its tokens. Each token is coded when it comes, and only its own step reads it exactly. Prefill is
    exact.

    As in vLLM, the first and last layers are exact. The paper's second stage, a sketch of the quantisation error (QJL),
    is not implemented, because its noise in the logits is as large as the error that it corrects.

    vLLM's presets are `keys="fp8", bits=4` (k8v4), `bits=4` (4bit_nc), `bits=3, value_bits=4` (k3v4_nc) and `bits=3`
    (3bit_nc). In k8v4, keys are not rotated. Here they have one factor per token and head, as in `FP8`; vLLM has none.

    To quantise another policy's cache, see `quantized(policy, scheme="turboquant")`.

    Attributes:
        bits: bits per number, without its share of factors: 2, 3 or 4. 8 codes of 3 bits share 3 bytes.
        group: channels of a value that share a scale and a zero: the greatest common divisor of this and the head dim,
            which is a power of two.
        values: "levels" between the minimum and maximum of a group, or "rotated", as keys are.
        signs: seed of random sign changes of coordinates before the rotation, different in each layer. None for none, as
            in vLLM: some vectors, such as one of equal numbers, are then coded with a larger error.
        exact_layers: number of first layers, and of last layers, that are not quantised.
        keys: "rotated", or "fp8" for 8-bit floats.
        value_bits: bits per number of values. None for `bits`.

    Example:
        >>> policy = kvjax.TurboQuant(bits=4, exact_layers=0)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('turboquant:exact_layers=0', 0.36)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="turboquant",
        paper="Zandieh et al. 2025, TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
        summary="every token, in codes of rotated numbers but for the first and last layers",
        memory="quantized",
        stage="both",
        takes_budget=False,
    )

    scheme: ClassVar[Scheme] = "turboquant"

    bits: Bits = 4
    group: int = 128
    values: Values = "levels"
    signs: int | None = None
    exact_layers: int = 2
    keys: Keys = "rotated"
    value_bits: Bits | None = None
