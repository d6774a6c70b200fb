"""From one layer's attention to the next one's queries, keys and values."""

from .api import fused_decode_block as fused_decode_block
from .types import BlockOutput as BlockOutput
from .types import BlockWeights as BlockWeights
