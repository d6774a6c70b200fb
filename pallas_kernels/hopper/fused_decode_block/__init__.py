"""All matmuls of a decode step between one layer's attention and the next layer's attention, in one Hopper kernel.

`models/transformer.py` calls it where the model and the device allow it.

- `api.py`: the public function. `reference.py` is the same as separate matmuls.
- `plan.py`: how the work is divided. It defines the words that all modules use. Start there.
- `pallas_mosaic_gpu.py`: the kernel.
- `loads.py`, `int8.py`, `int4.py`, `epilogue.py`, `grid_barrier.py`: steps of the kernel, as code of individual
  threads: load inputs; multiply by int8 or 4-bit weights; reduce products to outputs; pass results to other programs.
  `mlir_helpers.py` has what they share.
"""

from .api import fused_decode_block as fused_decode_block
from .types import BlockOutput as BlockOutput
from .types import BlockWeights as BlockWeights
