"""All matmuls of a decode step between one layer's attention and the next layer's attention, in one Hopper kernel.

`models/transformer.py` calls it where the model and the device allow it.
"""

from .api import fused_decode_block as fused_decode_block
from .types import BlockOutput as BlockOutput
from .types import BlockWeights as BlockWeights
