"""TurboQuant: everything in a few bits, of vectors rotated so that no number is far larger than others."""

import dataclasses
from typing import Any, ClassVar

from kvjax.cache import LayerSpec
from kvjax.cache.packing import Bits
from kvjax.config import ModelConfig

from .base import CacheLayer, Policy
from .full import Full
from .info import PolicyInfo
from .registry import register
from .transforms.quantize import Quantized, check_codes
from .transforms.rotated import Values


@register
@dataclasses.dataclass(frozen=True)
class TurboQuant(Policy):
    """Keep everything, in codes of rotated numbers (Zandieh et al. 2025, as it is in vLLM).

    A key is divided by its length and rotated by a Hadamard matrix, after which its coordinates are like a Gaussian's; each is rounded to
    the nearest of 2^bits levels that are best for one. A factor gives the key its own length back. Keys are never rotated back: the
    query is rotated instead. Values are rounded to evenly spaced levels between the least and the greatest of each token, as in vLLM, or
    coded as keys are. Nothing is calibrated, and no group waits for its tokens: each is coded when it comes, and its own step alone reads
    it exactly. The prompt is read exactly.

    As in vLLM the first and last layers are exact, and the paper's second stage, a sketch of what the codes miss (QJL), is left
    out, since it makes logits as noisy as what it mends. It has 3 bits, too, which are not here.

    For another policy's cache see `quantized(policy, scheme="turboquant")`.

    Attributes:
        bits: of a number, besides its share of factors: 2 or 4.
        group: channels of a value that share a scale and a zero: the largest divisor of both this and the head dim, a power of two.
        values: "levels" between the least and the greatest of a group, or "rotated" as keys are.
        signs: a seed, by which coordinates change signs at random before they are rotated, in each layer otherwise; None for none.
        exact_layers: layers at the beginning, and as many at the end, that are not quantised: all, of a model that has no more.
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
