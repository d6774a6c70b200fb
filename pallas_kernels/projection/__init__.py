"""Matrix products of a decoding step's few rows, with what comes before and after them.

Once JAX drops Pallas' Triton backend: Mosaic GPU on Hopper and later, as `fused_decode_block` does between layers;
cuBLAS by way of XLA elsewhere.
"""

from .api import gated_projection as gated_projection
from .api import lookup as lookup
from .api import projection as projection
from .quantized import GroupedMatrix as GroupedMatrix
from .quantized import Int8Matrix as Int8Matrix
from .quantized import Matrix as Matrix
from .quantized import QuantizedMatrix as QuantizedMatrix
from .quantized import is_quantized as is_quantized
from .types import Norm as Norm
