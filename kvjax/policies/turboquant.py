"""TurboQuant: every token in low-bit codes of rotated vectors, whose coordinates have similar magnitudes."""

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
from .transforms.quantize import Quantized, check_codes
from .transforms.rotated import Values


@register
@dataclasses.dataclass(frozen=True)
class TurboQuant(Policy):
    """Keep everything, in codes of rotated vectors (Zandieh et al. 2025, as implemented in vLLM).

    A key is divided by its norm and rotated by a Hadamard matrix, after which its coordinates are nearly Gaussian. Each
    coordinate is rounded to the nearest of 2^bits codebook entries that are optimal for a Gaussian. A factor restores
    the norm. Keys are never rotated back: the query is rotated instead. Values are rounded to evenly spaced entries
    between the minimum and maximum of each token, as in vLLM, or coded as keys are. There is no calibration, and no
    group waits for its tokens. Each token is coded when it comes, and only its own step reads it exactly. Prefill is
    exact.

    As in vLLM, the first and last layers are exact. The paper's second stage, a sketch of the quantisation error (QJL),
    is not implemented, because its noise in the logits is as large as the error that it corrects. The paper also has 3
    bits, which are not implemented.

    To quantise another policy's cache, see `quantized(policy, scheme="turboquant")`.

    Attributes:
        bits: bits per number, without its share of factors: 2 or 4.
        group: channels of a value that share a scale and a zero: the greatest common divisor of this and the head dim,
            which is a power of two.
        values: "levels" between the minimum and maximum of a group, or "rotated", as keys are.
        signs: seed of random sign changes of coordinates before the rotation, different in each layer. None for none.
        exact_layers: number of first layers, and of last layers, that are not quantised.
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="turboquant",
        paper="Zandieh et al. 2025, TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
        summary="every token, in codes of rotated numbers but for the first and last layers",
        memory="quantized",
        stage="both",
        takes_budget=False,
    )

    bits: Bits = 4
    group: int = 128
    values: Values = "levels"
    signs: int | None = None
    exact_layers: int = 2

    def __post_init__(self) -> None:
        check_codes(self, self.bits)

    def bind(self, config: ModelConfig) -> Policy:
        return self._quantized.bind(config)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return self._quantized.layer(spec)

    @property
    def _quantized(self) -> Quantized:
        options: dict[str, Any] = {name: getattr(self, name) for name in ("values", "signs", "exact_layers")}
        return Quantized(Full(), self.bits, self.group, scheme="turboquant", **options)
