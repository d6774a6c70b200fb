"""Matmuls of model weights, with optional RMS norm before and residual or gate after. The models call it for every
projection.

The kernels are for the few rows of a decode step. If JAX removes Pallas' Triton backend, Mosaic GPU can replace them on
Hopper and later GPUs, as `fused_decode_block` does between layers. Other GPUs then use cuBLAS through XLA.
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
