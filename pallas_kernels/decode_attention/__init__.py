"""Attention of one new query a row over the slots of a compressed cache.

Once JAX drops Pallas' Triton backend: Mosaic GPU on Hopper and later, whose copy engine brings tiles of the cache
while others are multiplied; XLA elsewhere.
"""

from .api import decode_attention as decode_attention
from .types import Attended as Attended
from .types import Rotation as Rotation
