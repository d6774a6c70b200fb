"""The key most like a query, among very many, without a score for each pair in memory.

On Hopper the kernel is Mosaic GPU's. Once JAX drops Pallas' Triton backend: XLA on older GPUs.
"""

from .api import nearest as nearest
from .types import Nearest as Nearest
