"""`QuantizedFull`: the base of policies that keep every token, by a scheme of `quantized`."""

import dataclasses
from typing import Any, ClassVar

from kvjax.cache import LayerSpec
from kvjax.config import ModelConfig

from ..base import Policy
from ..full import Full
from ..layer import CacheLayer
from .quantize import Quantized, Scheme, check_scheme


@dataclasses.dataclass(frozen=True)
class QuantizedFull(Policy):
    """Base of policies that keep every token, by a scheme of `quantized`. Their fields are the scheme's hyperparameters.

    Class attributes:
        scheme: how tokens are stored.
    """

    scheme: ClassVar[Scheme]

    def __post_init__(self) -> None:
        check_scheme(self, self.scheme)

    def bind(self, config: ModelConfig) -> Policy:
        return self._quantized.bind(config)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return self._quantized.layer(spec)

    @property
    def _quantized(self) -> Quantized:
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Quantized(Full(), scheme=self.scheme, **options)
